"""What a job loads, for every combination of options and disk, from one decision table."""

import itertools

import pytest

from torchtitan_ckpt.config import TRAINING_STATES, CheckpointConfig, validate
from torchtitan_ckpt.decision import OutputView, SourceView, StepFolder, StepKind
from torchtitan_ckpt.errors import CheckpointError, ConfigError
from torchtitan_ckpt.resolve import resolve

OUT = "out/checkpoint"


def step(number, kind, why=""):
    return StepFolder(number, f"{OUT}/step-{number}", StepKind(kind), why)


OUTPUTS = {
    "absent": OutputView(OUT),
    "empty": OutputView(OUT, True),
    "broken": OutputView(OUT, True, (step(20, "broken", ".metadata is missing"),)),
    "valid": OutputView(
        OUT, True, (step(5, "full"), step(10, "full"), step(20, "broken", "no .metadata"))
    ),
    "seed": OutputView(OUT, True, (step(0, "seed"),)),
    "model-only": OutputView(OUT, True, (step(10, "model-only"),)),
    "hf": OutputView(OUT, True, (step(10, "hf"),)),
    "mixed": OutputView(OUT, True, (step(5, "full"), step(8, "model-only"), step(9, "hf"))),
}
PATH = "checkpoint.initial_load_path"
SOURCES = {
    "absent": None,
    "missing": SourceView("p", PATH),
    "dcp": SourceView("p", PATH, True, "dcp", frozenset({"model", *TRAINING_STATES})),
    "dcp-model": SourceView("p", PATH, True, "dcp", frozenset({"model"})),
    "hf": SourceView("p", PATH, True, "hf"),
    "hf-quantized": SourceView("p", PATH, True, "hf", quantized=True),
    "neither": SourceView("p", PATH, True, None, refused=(("dcp", "no .metadata"),)),
}
ALL = list(TRAINING_STATES)


def loadable_step(c):
    """Steps of the chosen output folder that -1 may take, newest first, by the written rules."""
    newest = {"valid": 10, "mixed": 5, "seed": 0}
    if c["exclude"] == ALL:
        newest |= {"model-only": 10, "mixed": 8}
    return newest.get(c["output"])


# First matching row wins: (name, condition, outcome). An outcome is an action or an error code.
ROWS = [
    ("off", lambda c: not c["enable"], "disabled"),
    (
        "step named and absent",
        lambda c: (
            c["load_step"] == 7
            or (c["load_step"] in (10, 20) and c["output"] in ("absent", "empty", "seed"))
            or (c["load_step"] == 10 and c["output"] in ("broken", "mixed"))
            or (c["load_step"] == 20 and c["output"] not in ("broken", "valid"))
        ),
        "resolve.step-missing",
    ),
    ("step named and broken", lambda c: c["load_step"] == 20, "resolve.step-broken"),
    (
        "step named and of another kind",
        lambda c: (
            c["load_step"] == 10
            and (c["output"] == "hf" or (c["output"] == "model-only" and c["exclude"] != ALL))
        ),
        "resolve.step-kind",
    ),
    ("step named", lambda c: c["load_step"] == 10, "resume"),
    ("newest", lambda c: loadable_step(c) is not None, "resume"),
    (
        "nothing to resume",
        lambda c: c["output"] in ("model-only", "hf"),
        "resolve.nothing-resumable",
    ),
    (
        "hf without a path",
        lambda c: c["source"] == "absent" and c["in_hf"],
        "resolve.hf-path-missing",
    ),
    ("no source", lambda c: c["source"] == "absent", "fresh"),
    ("path missing", lambda c: c["source"] == "missing", "resolve.path-missing"),
    ("neither", lambda c: c["source"] == "neither", "resolve.no-format"),
    (
        "format differs from the flag",
        lambda c: c["in_hf"] != c["source"].startswith("hf"),
        "resolve.format-mismatch",
    ),
    (
        "quantized differs from the flag",
        lambda c: c["in_hf"] and c["quantized"] != (c["source"] == "hf-quantized"),
        "resolve.quantized-mismatch",
    ),
    (
        "model-only source, full load wanted",
        lambda c: c["source"] == "dcp-model" and not c["model_only"] and c["exclude"] != ALL,
        "resolve.states-missing",
    ),
    ("initial", lambda c: True, "initial"),
]

AXES = {
    "output": list(OUTPUTS),
    "load_step": [-1, 7, 10, 20],
    "source": list(SOURCES),
    "in_hf": [False, True],
    "quantized": [False, True],
    "model_only": [True, False],
    "exclude": [[], ["dataloader"], ALL],
    "enable": [True, False],
    "load_only": [False, True],
}


def run(c):
    config = CheckpointConfig(
        enable=c["enable"],
        load_step=c["load_step"],
        initial_load_path=None if c["source"] == "absent" else "p",
        initial_load_in_hf=c["in_hf"],
        initial_load_in_hf_quantized=c["quantized"],
        initial_load_model_only=c["model_only"],
        exclude_from_loading=c["exclude"],
        load_only=c["load_only"],
    )
    validate(config)
    return resolve(config, OUTPUTS[c["output"]], SOURCES[c["source"]], states=TRAINING_STATES)


def test_every_combination():
    hit = dict.fromkeys((name for name, _, _ in ROWS), 0)
    wrong, count = [], 0
    for values in itertools.product(*AXES.values()):
        c = dict(zip(AXES, values, strict=True))
        name, expected = next((n, o) for n, when, o in ROWS if when(c))
        try:
            decision = run(c)
        except ConfigError:
            continue  # refused before any disk is looked at: test_config
        except CheckpointError as error:
            got = error.problems[0].code
        else:
            got = decision.action
            if got == "resume" and c["load_step"] == -1:
                assert decision.step == loadable_step(c), c
            if got in ("resume", "initial"):
                full = set(ALL) - set(c["exclude"])
                seed = c["output"] == "seed" and got == "resume"
                only = got == "initial" and (c["model_only"] or c["in_hf"])
                assert set(decision.states) == {"model"} | (set() if seed or only else full), c
        hit[name] += 1
        count += 1
        if got != expected:
            wrong.append((name, c, got, expected))
    assert not wrong, (len(wrong), wrong[:3])
    assert all(hit.values()), hit
    assert count > 8000


def case(output="absent", source="absent", **options):
    base = {
        "output": output,
        "load_step": -1,
        "source": source,
        "in_hf": False,
        "quantized": False,
        "model_only": True,
        "exclude": [],
        "enable": True,
        "load_only": False,
    }
    return run({**base, **options})


def test_a_valid_output_wins_and_the_ignored_options_are_named():
    decision = case("valid", "dcp")
    assert (decision.path, decision.step) == (f"{OUT}/step-10", 10)
    (ignored,) = decision.ignored
    assert ignored.option == "checkpoint.initial_load_path"
    assert "step-10" in ignored.why


def test_broken_and_model_only_steps_are_passed_over_loudly():
    assert "step-20" in case("valid").notices[0]
    assert "no .metadata" in case("valid").notices[0]
    passed = [f.step for f in case("mixed").passed_over]
    assert passed == [9, 8]
    assert len(case("mixed").notices) == 2


def test_a_fresh_start_beside_a_broken_step_is_said():
    decision = case("broken")
    assert decision.action == "fresh"
    assert "step-20" in decision.notices[0]


def test_the_remedies_of_a_model_only_folder_are_the_three_that_work():
    with pytest.raises(CheckpointError) as caught:
        case("model-only")
    text = str(caught.value)
    assert f"--checkpoint.initial_load_path {OUT}/step-10" in text
    assert "--checkpoint.load_step 10 --checkpoint.exclude_from_loading" in text
    assert "--checkpoint.no-last_save_model_only" in text
    with pytest.raises(CheckpointError, match="initial_load_in_hf"):
        case("hf")


def test_a_seed_beside_a_newer_model_only_step_is_not_taken_in_silence():
    output = OutputView(OUT, True, (step(0, "seed"), step(10, "model-only")))
    with pytest.raises(CheckpointError, match="nothing-resumable"):
        resolve(CheckpointConfig(enable=True), output, states=TRAINING_STATES)


def test_steps_compare_as_numbers():
    output = OutputView(OUT, True, (step(9, "full"), step(100, "full"), step(10, "full")))
    decision = resolve(CheckpointConfig(enable=True), output, states=TRAINING_STATES)
    assert decision.step == 100


def test_a_folder_of_checkpoints_named_as_source_gets_its_step_suggested():
    source = SourceView(
        "p", PATH, True, None, refused=(("dcp", "no .metadata"),), steps=("step-5", "step-10")
    )
    config = CheckpointConfig(enable=True, initial_load_path="p")
    with pytest.raises(CheckpointError, match=r"initial_load_path p/step-10"):
        resolve(config, OUTPUTS["absent"], source, states=TRAINING_STATES)


def test_the_decision_is_json():
    import json

    data = json.loads(json.dumps(case("mixed", "dcp").to_dict()))
    assert data["step"] == 5
    assert data["passed_over"][0]["kind"] == "hf"


@pytest.mark.parametrize("load_step", [-1, 10])
def test_an_hf_step_in_the_output_folder_is_not_blamed_on_last_save_model_only(load_step):
    with pytest.raises(CheckpointError) as caught:
        resolve(
            CheckpointConfig(enable=True, load_step=load_step),
            OUTPUTS["hf"],
            states=TRAINING_STATES,
        )
    assert caught.value.problems[0].cause.startswith(
        "last_save_in_hf wrote it as a last step, or Hugging Face weights were put into the output "
        "folder"
    )
