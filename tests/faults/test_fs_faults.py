"""The file system fails at the n-th call of a save: it completes or raises SaveError in words.

Below Python, so that torch's zip writer and safetensors' writes are seen too. After each fault the
older step is there bit for bit, nothing half-written is visible, the same job saves its next step,
and neither it nor a restarted one leaves anything behind.
"""

import random
import re
import shutil

import pytest

from tests.faults import judge, scenarios, shim
from tests.faults.conftest import needs_shim, points
from tests.faults.shim import Action

pytestmark = needs_shim

# What goes wrong, from that call on or once: (action, errno, which kinds of calls fail later).
FAULTS = {
    "full": (Action.FAIL_FROM, "ENOSPC", shim.FULL),
    "read-only": (Action.FAIL_FROM, "EACCES", shim.SHUT),
    "broken": (Action.FAIL, "EIO", shim.KINDS),
    "short": (Action.SHORT, "", ()),
}
WORDS = re.compile(r"ENOSPC|EACCES|EIO|the disk is full|permission|fail|Input/output|No space")


def hits(fault, call):
    """Whether a fault can meet this call at all."""
    kind = call.partition(" ")[0]
    return {
        "full": kind in shim.FULL,
        "read-only": kind in shim.SHUT,
        "broken": True,
        "short": kind == "write",
    }[fault]


def complaint(lab, truth, prepared, scenario, at, fault):
    """What is wrong after a fault at call `at`; an empty string when all is well."""
    scene = scenarios.SCENARIOS[scenario]
    folder = prepared(scenario)
    action, error, failing = FAULTS[fault]
    wide = scene.get("wide", False)
    child = lab.start(
        scenarios.fail_at, folder, scenario, truth[wide], at, action, error, failing or shim.KINDS
    )
    result = child.wait(120)
    wrong = [f"raised {text}" for text in result["raw"]]
    if not result["saved"] and not result["raised"]:
        wrong.append("neither saved nor refused")
    if fault == "short" and result["raised"]:
        wrong.append(f"a short write is no error: {result['raised']}")
    wrong += [f"no cause in: {text}" for text in result["raised"] if not WORDS.search(text)]
    gone = [] if result["saved"] and scene.get("keep_latest_k", 2) else result["lost"]
    wrong += [f"step {n} was lost" for n in gone]
    wrong += result["wrong"]
    wrong += [result["continued"]] if result["continued"] else []
    wrong += result.get("strays of the same job", [])
    after = lab.run(judge.restart, folder, truth[wide], wide)
    wrong += [*after["wrong"], *after["wrong after"], *after["left"]]
    wrong += [f"after the restart: not {key}" for key in ("same", "next") if not after[key]]
    if scene.get("keep_latest_k", 2) == 0:
        kept = {n for n, _ in after["kept"]}
        wrong += [f"step {n} is lost" for n in range(1, scene["base"] + 1) if n not in kept]
    if after["resumed"] != max(after["full"], default=0):
        wrong.append(f"step {after['resumed']} was resumed, of {after['full']}")
    if not wrong:
        shutil.rmtree(folder)
    return "; ".join(wrong)


def check(lab, truth, prepared, calls, cases):
    texts = lab.each(cases, lambda case: complaint(lab, truth, prepared, *case))
    bad = [
        f"{name}, {fault} at call {at} ({calls(name)[at - 1]}): {text}"
        for (name, at, fault), text in zip(cases, texts, strict=True)
        if text
    ]
    assert not bad, f"{len(bad)} of {len(cases)}\n" + "\n".join(bad)


def cases_of(calls, scenario, chosen):
    """Every call that is worth a fault, with every fault that can meet it."""
    return [
        (scenario, at, fault)
        for at in chosen
        for fault in FAULTS
        if hits(fault, calls(scenario)[at - 1])
    ]


def test_a_save_may_fail_at_any_call(lab, truth, prepared, calls, seed):
    rng = random.Random(seed)
    cases = []
    for scenario in scenarios.SCENARIOS:
        cases += rng.sample(cases_of(calls, scenario, points(calls(scenario))), 4)
    check(lab, truth, prepared, calls, cases)


def test_the_sample_meets_every_kind_of_call(calls):
    """What the scenarios make is what the shim can fail: a new kind of call must be added to it."""
    kinds = {call.partition(" ")[0] for name in scenarios.SCENARIOS for call in calls(name)}
    assert kinds == set(shim.WRITES)


@pytest.mark.parametrize("scenario", ["first", "next", "hf"])
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_folder_that_is_full_or_shut_from_the_start(lab, truth, prepared, scenario, fault):
    """chmod does nothing for root, so the shim refuses as a read-only parent would."""
    action, error, failing = FAULTS[fault]
    result = lab.run(
        scenarios.fail_at, prepared(scenario), scenario, truth[False], 1, action, error, failing
    )
    (text,) = result["raised"]
    assert text.startswith("SaveError: [")
    assert {"full": "the disk is full", "read-only": "no permission"}[fault] in text
    assert "fix" in text
    assert not result["saved"]


def test_a_zip_writer_that_fails_names_the_cause(lab, truth, prepared, calls):
    """torch writes a large tensor through its own zip writer, which hides what it met."""
    large = [n for n, call in enumerate(calls("wide"), 1) if call.startswith("write unfinished")]
    cases = [("wide", at, "full") for at in large[len(large) // 2 :: 20]]
    check(lab, truth, prepared, calls, cases)


def test_an_export_that_fails_names_the_cause(lab, truth, prepared, calls):
    """Closing a file can fail too, also while an earlier failure is being cleaned up."""
    own = [n for n, call in enumerate(calls("hf"), 1) if call.endswith(".partial")]
    assert any(calls("hf")[n - 1].startswith("close") for n in own)
    cases = [("hf", at, fault) for at in own for fault in ("full", "broken")]
    check(lab, truth, prepared, calls, [c for c in cases if hits(c[2], calls("hf")[c[1] - 1])])


@pytest.mark.parametrize("fault", ["broken", "read-only"])
def test_a_replacement_that_fails_half_way_leaves_the_old_step(lab, truth, prepared, calls, fault):
    """Where names cannot be swapped: the old step is away, the new one does not get its name."""
    scenario = "again without exchange"
    away = calls(scenario).index("rename step-2") + 1
    check(lab, truth, prepared, calls, [(scenario, away, fault), (scenario, away + 1, fault)])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_a_save_may_fail_at_every_call(lab, truth, prepared, calls, scenario):
    """At each single call, with every fault that can meet it: about 220 cases a scenario."""
    every = range(1, len(calls(scenario)) + 1)
    check(lab, truth, prepared, calls, cases_of(calls, scenario, every))


# --- the folder vanishes ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("when", ["between", "before", "during", "after"])
def test_a_folder_that_vanishes(lab, truth, tmp_path, mode, when):
    """Removed between two saves, or around the writing of one; the next save makes it anew."""
    result = lab.run(scenarios.vanish, str(tmp_path), when, truth[False], async_mode=mode)
    assert result["raw"] == []
    assert all(text.startswith("SaveError: [") for text in result["raised"])
    assert result["wrong"] == []
    assert result["left"] == []
    # What vanished before it was written is made anew; what was written and is gone is said.
    assert bool(result["raised"]) == (when == "after")
    assert result["steps"] == ([3] if when == "after" else [2, 3])


# --- reading ------------------------------------------------------------------------------------


READING = {
    "broken": (Action.FAIL, "EIO"),
    "shut": (Action.FAIL, "EACCES"),
    "short": (Action.SHORT, ""),
}


def reading(lab, truth, prepared, at, fault):
    """A load that meets a fault is right, or raises a CheckpointError and changes nothing."""
    result = lab.run(scenarios.load_at, prepared("next"), truth[False], at, *READING[fault])
    if result["raised"]:
        if fault == "short":
            return f"a short read is no error: {result['raised']}"
        if not result["same"]:
            return f"a load that failed has changed the job: {result['raised']}"
        return "" if result["ours"] and "[" in result["raised"] else result["raised"]
    return "" if result["step"] == 2 and result["same"] else f"loaded {result}"


def check_reading(lab, truth, prepared, fault, choose):
    """A load that cannot read for the moment is no reason to resume an older step, or half of one.

    `choose` picks the calls that fail out of all that a load makes.
    """
    whole = lab.run(scenarios.load_at, prepared("next"), truth[False], 0, Action.NOTHING, "")
    assert whole["step"] == 2
    assert whole["same"]
    numbers = choose(range(1, whole["count"] + 1))
    texts = lab.each(numbers, lambda at: reading(lab, truth, prepared, at, fault))
    bad = [f"call {at}: {text}" for at, text in zip(numbers, texts, strict=True) if text]
    assert not bad, f"{len(bad)} of {len(numbers)}\n" + "\n".join(bad)


@pytest.mark.parametrize("fault", READING)
def test_a_load_may_fail_at_any_call(lab, truth, prepared, seed, fault):
    rng = random.Random(seed)
    check_reading(lab, truth, prepared, fault, lambda calls: rng.sample(calls, min(8, len(calls))))


@pytest.mark.slow
@pytest.mark.parametrize("fault", READING)
def test_a_load_may_fail_at_every_call(lab, truth, prepared, fault):
    check_reading(lab, truth, prepared, fault, list)
