"""`convert` in all pairs of formats, judged by torch's and safetensors' own readers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.files.convert_lab import (
    FIXTURES,
    dcp_tensors,
    full_step,
    go,
    hf_tensors,
    native_of,
    same,
    same_dict,
    save_dcp,
    write_hf,
)
from tests.files.dcp_lab import GOLDEN
from torchtitan_ckpt.errors import (
    ConfigError,
    MappingError,
    MismatchError,
    SaveError,
)
from torchtitan_ckpt.formats import dcp, read_manifest
from torchtitan_ckpt.state.rng import RngState

NAMES = ("dense-tied", "dense-untied", "moe")


@pytest.mark.parametrize("name", NAMES)
def test_hf_to_dcp_is_what_the_adapter_makes_and_torch_reads_it(name, tmp_path):
    done = go(FIXTURES / name, tmp_path / "step-3")
    assert (done.source_format, done.target_format, done.verified) == ("hf", "dcp", True)
    assert same_dict(dcp_tensors(tmp_path / "step-3", tmp_path / "x.pt"), native_of(name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [2**16, 2**28])
def test_there_and_back_gives_the_files_tensors_again(name, window, tmp_path):
    go(FIXTURES / name, tmp_path / "dcp", window=window)
    done = go(
        tmp_path / "dcp",
        tmp_path / "hf",
        config=str(FIXTURES / name),
        window=window,
        max_shard_size="100KB",
    )
    assert same_dict(hf_tensors(tmp_path / "hf"), hf_tensors(FIXTURES / name))
    assert len(done.files) > 1
    assert (tmp_path / "hf" / "generation_config.json").read_bytes() == (
        FIXTURES / name / "generation_config.json"
    ).read_bytes()


def test_an_fp32_step_is_exported_rounded_once(tmp_path):
    state = {k: v.float() * 1.01 for k, v in native_of("moe").items()}
    save_dcp(state, tmp_path / "dcp")
    go(tmp_path / "dcp", tmp_path / "hf", config=str(FIXTURES / "moe"), export_dtype="bfloat16")
    got = hf_tensors(tmp_path / "hf")
    from torchtitan_ckpt.adapter import MappingAdapter

    expected = MappingAdapter(FIXTURES / "moe").to_hf(state)
    assert same_dict(got, {k: v.to(torch.bfloat16) for k, v in expected.items()})
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_import_to_float32(tmp_path):
    go(FIXTURES / "dense-tied", tmp_path / "dcp", export_dtype="float32")
    got = dcp_tensors(tmp_path / "dcp", tmp_path / "x.pt")
    assert same_dict(got, {k: v.float() for k, v in native_of("dense-tied").items()})


def test_a_full_step_to_pt_is_what_dcp_to_torch_makes(tmp_path):
    save_dcp(full_step(), tmp_path / "step-7")
    theirs = dcp_tensors(tmp_path / "step-7", tmp_path / "theirs.pt")
    go(tmp_path / "step-7", tmp_path / "ours.pt")
    for mmap in (False, True):
        ours = torch.load(tmp_path / "ours.pt", weights_only=True, mmap=mmap)
        assert set(ours) == set(theirs)
        for key in theirs:
            if isinstance(theirs[key], dict):
                assert set(theirs[key]) == set(ours[key])
                assert all(same(ours[key][k], theirs[key][k]) for k in theirs[key])
            else:
                assert same(ours[key], theirs[key]), key


def test_flat_keys_when_asked(tmp_path):
    save_dcp(full_step(), tmp_path / "step-7")
    go(tmp_path / "step-7", tmp_path / "ours.pt", flat=True)
    ours = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert set(ours) == set(read_manifest(tmp_path / "step-7").keys)


@pytest.mark.parametrize("name", ["torch-2.13-1rank", "torch-2.13-4ranks", "torch-2.4.1-2ranks"])
def test_golden_dcp_through_pt_and_back(name, tmp_path):
    done = go(GOLDEN / name, tmp_path / "a.pt")
    go(tmp_path / "a.pt", tmp_path / "dcp", to="dcp")
    tensors = read_manifest(GOLDEN / name).tensors
    plain = not any("weights_only" in note for note in done.notes)
    assert plain == (name != "torch-2.13-1rank")  # that one holds a numpy array
    theirs = dcp_tensors(GOLDEN / name, tmp_path / "theirs.pt")
    ours = torch.load(tmp_path / "a.pt", weights_only=plain)
    back = dcp_tensors(tmp_path / "dcp", tmp_path / "back.pt")
    assert set(tensors) == set(read_manifest(tmp_path / "dcp").tensors)
    for key in tensors:
        if key in theirs:
            assert same(ours[key], theirs[key]), key
            assert same(back[key], theirs[key]), key


def test_a_full_step_through_pt_keeps_the_keys_that_a_resume_wants(tmp_path):
    save_dcp(full_step(), tmp_path / "step-7")
    go(tmp_path / "step-7", tmp_path / "a.pt")
    go(tmp_path / "a.pt", tmp_path / "step-8")
    before, after = read_manifest(tmp_path / "step-7"), read_manifest(tmp_path / "step-8")
    assert before.keys == after.keys
    a = dcp_tensors(tmp_path / "step-7", tmp_path / "x.pt")
    b = dcp_tensors(tmp_path / "step-8", tmp_path / "y.pt")
    flat = {
        f"{k}.{n}": v for k, part in a.items() if isinstance(part, dict) for n, v in part.items()
    }
    assert all(same(b[key], value) for key, value in flat.items())


def test_generators_are_one_value_there_and_back(tmp_path):
    """A rank's generators are a dict that a save keeps whole; so does the way through a `.pt`."""
    state = {"w": torch.ones(2, 3), "train_state.step": 3}
    state |= {
        f"train_state.@rng.rank_{i}.{key}": value
        for i in range(2)
        for key, value in RngState(split="here").state_dict().items()
    }
    state["train_state.@rng.world_size"] = 2
    dcp.save(state, tmp_path / "step-3")
    go(tmp_path / "step-3", tmp_path / "a.pt")
    go(tmp_path / "a.pt", tmp_path / "back")
    there = dcp.load(tmp_path / "back", dict.fromkeys(state) | {"w": torch.empty(2, 3)})
    assert read_manifest(tmp_path / "back").keys == set(state)
    assert all(same(there[key], value) for key, value in state.items())


def test_pt_to_hf_and_hf_to_pt(tmp_path):
    go(FIXTURES / "moe", tmp_path / "m.pt")
    assert same_dict(torch.load(tmp_path / "m.pt", weights_only=True), native_of("moe"))
    go(tmp_path / "m.pt", tmp_path / "hf", to="hf", config=str(FIXTURES / "moe"))
    assert same_dict(hf_tensors(tmp_path / "hf"), hf_tensors(FIXTURES / "moe"))


def test_hf_to_hf_in_other_files(tmp_path):
    done = go(FIXTURES / "moe", tmp_path / "one", to="hf")
    assert done.files == ("model.safetensors",)
    assert same_dict(hf_tensors(tmp_path / "one"), hf_tensors(FIXTURES / "moe"))
    # The source's index is an asset by its looks; the one that was written wins.
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()


def test_dcp_to_dcp_gathers_shards_and_keeps_objects_as_they_are(tmp_path):
    source = GOLDEN / "torch-2.13-4ranks"
    go(source, tmp_path / "step-1", to="dcp")
    theirs = dcp_tensors(source, tmp_path / "x.pt")
    ours = dcp_tensors(tmp_path / "step-1", tmp_path / "y.pt")
    keys = read_manifest(source).keys
    assert keys == read_manifest(tmp_path / "step-1").keys
    for key in ours:
        if key in theirs:
            assert same(ours[key], theirs[key]), key


def test_parts_of_a_step(tmp_path):
    save_dcp(full_step(), tmp_path / "step-7")
    go(tmp_path / "step-7", tmp_path / "model.pt", only="model")
    model = {k: v for k, v in full_step().items() if not isinstance(v, dict)}
    assert same_dict(torch.load(tmp_path / "model.pt", weights_only=True), model)
    go(tmp_path / "step-7", tmp_path / "rest.pt", exclude=("optimizer", "dataloader"))
    rest = torch.load(tmp_path / "rest.pt", weights_only=True)
    assert set(rest) == {*model, "lr_scheduler", "train_state"}
    with pytest.raises(ConfigError, match=r"nothing of optimiser[^$]*nearest: optimizer"):
        go(tmp_path / "step-7", tmp_path / "no.pt", exclude=("optimiser",))


def test_an_export_leaves_the_other_states_out_and_says_so(tmp_path):
    save_dcp(full_step(), tmp_path / "step-7")
    done = go(tmp_path / "step-7", tmp_path / "hf", config=str(FIXTURES / "dense-tied"))
    text = "\n".join(done.left_out)
    assert all(state in text for state in ("optimizer", "lr_scheduler", "dataloader"))


def test_a_broken_tie_is_refused(tmp_path):
    state = dict(native_of("dense-tied"))
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    save_dcp(state, tmp_path / "dcp")
    with pytest.raises(MismatchError, match="tied-differ"):
        go(tmp_path / "dcp", tmp_path / "hf", config=str(FIXTURES / "dense-tied"))
    assert not (tmp_path / "hf").exists()


def test_an_incomplete_model_is_refused_with_the_missing_keys(tmp_path):
    state = {k: v for k, v in native_of("moe").items() if not k.startswith("layers.1.")}
    save_dcp(state, tmp_path / "dcp")
    with pytest.raises(MismatchError, match=r"model\.layers\.1") as caught:
        go(tmp_path / "dcp", tmp_path / "hf", config=str(FIXTURES / "moe"))
    assert caught.value.problems[0].code == "convert.incomplete"


def test_lora_is_refused_by_name(tmp_path):
    state = {**native_of("moe"), "layers.0.attention.wo.lora_A.weight": torch.ones(2, 3)}
    save_dcp(state, tmp_path / "dcp")
    with pytest.raises(MappingError, match="lora_A"):
        go(tmp_path / "dcp", tmp_path / "x.pt")


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "note").write_text("mine")
    with pytest.raises(SaveError, match="exists already"):
        go(FIXTURES / "moe", tmp_path / "hf", to="hf")
    (tmp_path / "x.pt").write_text("mine")
    with pytest.raises(SaveError, match="exists already"):
        go(FIXTURES / "moe", tmp_path / "x.pt")
    assert (tmp_path / "x.pt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    go(FIXTURES / "moe", tmp_path / "empty", to="hf")
    assert same_dict(hf_tensors(tmp_path / "empty"), hf_tensors(FIXTURES / "moe"))
    with pytest.raises(ConfigError, match="inside the source"):
        go(tmp_path / "empty", tmp_path / "empty" / "dcp")


def test_no_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SaveError, match="not enough space"):
        go(FIXTURES / "moe", tmp_path / "dcp")
    assert list(tmp_path.iterdir()) == []


def test_dry_run_writes_nothing(tmp_path):
    done = go(FIXTURES / "moe", tmp_path / "hf", to="hf", max_shard_size="150KB", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert len(done.files) == 2
    assert done.assets == ("config.json", "generation_config.json")
    assert done.bytes_out == sum(t.nbytes for t in hf_tensors(FIXTURES / "moe").values())


def test_what_is_needed_to_know_the_model_is_said(tmp_path):
    save_dcp(native_of("moe"), tmp_path / "dcp")
    with pytest.raises(ConfigError, match=r"--config"):
        go(tmp_path / "dcp", tmp_path / "hf")
    with pytest.raises(MappingError, match="no model family"):
        go(tmp_path / "dcp", tmp_path / "hf", family="qwen9")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"export_dtype": "int8"}, "no dtype to convert to"),
        ({"quantize": "fp8", "to": "dcp"}, "only Hugging Face files are written quantized"),
        ({"exclude": ("optimizer",)}, "hold the model alone"),
        ({"weights": (1.0, 2.0)}, "2 weights for 1"),
        ({"window": 100}, "too few"),
        ({"threads": 0}, "no thread"),
        ({"family": "qwen3", "adapter": "a:b"}, "both a family and an adapter"),
    ],
)
def test_contradictions(options, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        go(FIXTURES / "moe", tmp_path / "dcp", **options)


def test_a_file_of_another_models_config(tmp_path):
    save_dcp(native_of("dense-untied"), tmp_path / "dcp")
    with pytest.raises((MappingError, MismatchError)):
        go(tmp_path / "dcp", tmp_path / "hf", config=str(FIXTURES / "dense-tied"))


def test_shapes_are_those_of_the_config(tmp_path):
    state = dict(native_of("dense-untied"))
    wide = torch.zeros(8, state["tok_embeddings.weight"].shape[1]).bfloat16()
    for key in ("tok_embeddings.weight", "lm_head.weight"):
        state[key] = torch.cat([state[key], wide])
    save_dcp(state, tmp_path / "dcp")
    with pytest.raises(MismatchError, match="padded vocabulary"):
        go(tmp_path / "dcp", tmp_path / "hf", config=str(FIXTURES / "dense-untied"))


def test_every_dtype_survives_dcp_and_pt(tmp_path):
    state = {
        "a": torch.tensor(2.5),
        "b": torch.arange(7),
        "c": torch.tensor([True, False, True]),
        "d": torch.arange(24, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(4, 6),
        "e": torch.empty(0, 3),
        "f": torch.randn(3, 5).half(),
        "g": torch.randn(5, 3).t(),
        "h": torch.full((4,), float("nan"), dtype=torch.bfloat16),
    }
    save_dcp(state, tmp_path / "dcp")
    go(tmp_path / "dcp", tmp_path / "a.pt")
    go(tmp_path / "a.pt", tmp_path / "dcp2")
    assert same_dict(torch.load(tmp_path / "a.pt", weights_only=True), state)
    assert same_dict(dcp_tensors(tmp_path / "dcp2", tmp_path / "b.pt"), state)


def test_a_scalar_and_integers_reach_hugging_face_files(tmp_path):
    tensors = {"s": torch.tensor(2.5), "i": torch.arange(5), "m": torch.tensor([True, False])}
    write_hf(tmp_path / "a", tensors, {})
    go(tmp_path / "a", tmp_path / "b", to="hf")
    assert same_dict(load_file(tmp_path / "b" / "model.safetensors"), tensors)
