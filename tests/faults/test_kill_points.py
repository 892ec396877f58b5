"""SIGKILL before, after and half-way through each file system call of a save: nothing is lost.

Which calls there are is counted in a run that nobody disturbs. By default a seeded sample dies;
`slow` takes every call that differs from its neighbours, in every scenario.
"""

import random
import re
import shutil

import pytest

from tests.faults import judge, scenarios
from tests.faults.conftest import needs_shim, points
from tests.faults.shim import Action

pytestmark = needs_shim
DEATHS = (Action.DIE, Action.DIE_AFTER, Action.DIE_TORN)
# Scenarios that write nothing else than another one are left to the long mode.
QUICK = ("first", "next", "again", "again without exchange", "async", "model only", "hf")


def complaint(lab, truth, prepared, scenario, at, action):
    """What is wrong after a death at call `at`; an empty string when all is well."""
    scene = scenarios.SCENARIOS[scenario]
    wide = scene.get("wide", False)
    folder = prepared(scenario)
    victim = lab.start(scenarios.kill_at, folder, scenario, at, action)
    victim.listen(120)
    if not victim.over:
        victim.kill()
        return "it hung"
    if victim.failed:
        return f"it failed before it died: {victim.failed}"
    after = lab.run(judge.restart, folder, truth[wide], wide=wide)
    wrong = {key: after[key] for key in ("wrong", "wrong after", "left") if after[key]}
    wrong |= {key: False for key in ("same", "next") if not after[key]}
    newest = max(after["full"], default=0)
    if newest < scene["base"] or after["resumed"] != newest:
        wrong["resumed"] = (after["resumed"], after["kept"])
    if scene.get("keep_latest_k", 2) == 0 and len(after["kept"]) < scene["base"]:
        wrong["lost"] = after["kept"]
    if not wrong:
        shutil.rmtree(folder)
    return f"{victim.output()}{wrong}" if wrong else ""


def deaths(calls, scenario, chosen):
    return [(scenario, at, action) for at in chosen(points(calls(scenario))) for action in DEATHS]


def check(lab, truth, prepared, calls, cases):
    texts = lab.each(cases, lambda case: complaint(lab, truth, prepared, *case))
    bad = [
        f"{name}, {action.name} at call {at} ({calls(name)[at - 1]}): {text}"
        for (name, at, action), text in zip(cases, texts, strict=True)
        if text
    ]
    assert not bad, "\n".join(bad)


def test_a_save_may_die_at_any_call(lab, truth, prepared, calls, seed):
    rng = random.Random(seed)
    cases = [
        rng.choice(deaths(calls, scenario, lambda p: p)) for scenario in QUICK for _ in range(3)
    ]
    check(lab, truth, prepared, calls, cases)


@pytest.mark.parametrize("after", [0, 1, 2], ids=["old-away", "new-there", "old-removed"])
def test_the_turning_points_of_a_replacement(lab, truth, prepared, calls, after):
    """Where the file system cannot swap names, a step is out of sight between two renames."""
    scenario = "again without exchange"
    first = calls(scenario).index("rename step-2") + 1
    check(lab, truth, prepared, calls, [(scenario, first + after, action) for action in DEATHS])


def test_the_removal_of_an_old_step(lab, truth, prepared, calls):
    """Its name goes first: a step that loses its files one by one must not look like one."""
    touched = [
        n for n, call in enumerate(calls("next"), 1) if re.match(r"\S+ (step-1|removed\.)", call)
    ]
    assert len(touched) >= 4
    check(lab, truth, prepared, calls, [("next", at, Action.DIE_AFTER) for at in touched])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_a_save_may_die_at_every_call(lab, truth, prepared, calls, scenario):
    check(lab, truth, prepared, calls, deaths(calls, scenario, lambda p: p))
