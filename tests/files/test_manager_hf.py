"""The manager and Hugging Face files: export, start from weights, expert formats, refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.files.toy import bits
from torchtitan_ckpt import CheckpointManager, MappingAdapter
from torchtitan_ckpt.errors import ConfigError, DamagedError, MismatchError, RefusedError
from torchtitan_ckpt.formats import dcp

CONFIGS = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "published" / "tiny_configs.json").read_text()
)


class Bag(nn.Module):
    """A module with parameters under any dotted names; integers and biases become buffers."""

    def __init__(self, entries, seed, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for key, entry in entries.items():
            *path, leaf = key.split(".")
            module = self
            for name in path:
                if name not in module._modules:
                    module.add_module(name, nn.Module())
                module = module._modules[name]
            if entry.dtype.startswith("int"):
                module.register_buffer(leaf, torch.randint(300, entry.shape, generator=generator))
                continue
            value = torch.randn(entry.shape, generator=generator)
            if "expert_bias" in leaf:
                module.register_buffer(leaf, value)
            else:
                module.register_parameter(leaf, nn.Parameter(value.to(dtype)))


def job(folder, family, *, seed=0, dtype=torch.float32, generation=None, **options):
    """A manager over a model of a family, its adapter, and the model."""
    adapter = MappingAdapter(CONFIGS[family], generation=generation)
    model = Bag(adapter.native_entries(), seed, dtype)
    for alias, source in adapter.tied_native.items():
        owner = model.get_submodule(alias.rpartition(".")[0])
        setattr(owner, alias.rpartition(".")[2], model.get_parameter(source))
    config = CheckpointManager.Config(enable=True, interval=100, **options)
    manager = CheckpointManager(
        config, model_parts=[model], sd_adapter=adapter, base_folder=str(folder)
    )
    return manager, adapter, model


def tensors_of(folder):
    """Every tensor of a folder, by the safetensors library."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def same(a, b, *, but=()):
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    return [k for k in ours if bits(ours[k]) != bits(theirs[k]) and not k.endswith(but)]


FAMILIES = sorted(CONFIGS)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_and_start_from_it(tmp_path, family):
    options = {"last_save_in_hf": True, "export_dtype": "float32"}
    manager, adapter, model = job(tmp_path / "a", family, **options)
    assert manager.save(7, last_step=True)
    manager.close()
    step = tmp_path / "a" / "checkpoint" / "step-7"
    assert tensors_of(step).keys() == adapter.hf_entries().keys()
    start = {"initial_load_in_hf": True, "initial_load_path": str(step)}
    manager, _, other = job(tmp_path / "b", family, seed=1, **start)
    assert same(model, other) != []
    assert manager.load()
    manager.close()
    # What has no Hugging Face key starts from the constant that the table declares.
    assert same(model, other, but=("expert_bias", "expert_bias_E")) in ([], _native_only(adapter))


def _native_only(adapter):
    return [k for out in adapter.left_out(adapter.native_entries()) for k in out.keys]


def test_an_export_in_bf16_leaves_pinned_and_integer_tensors_alone(tmp_path):
    options = {"last_save_in_hf": True, "export_dtype": "bfloat16"}
    manager, _, model = job(tmp_path, "deepseek_v4", **options)
    live = {k: v.dtype for k, v in model.state_dict().items()}
    manager.save(1, last_step=True)
    manager.close()
    found = tensors_of(tmp_path / "checkpoint" / "step-1")
    expected = {
        "tid2eid": torch.int64,
        "gate.bias": torch.float32,
        "attn_sink": torch.float32,
        "q_norm.weight": torch.bfloat16,
    }
    for ending, dtype in expected.items():
        assert {v.dtype for k, v in found.items() if k.endswith(ending)} == {dtype}, ending
    assert {k: v.dtype for k, v in model.state_dict().items()} == live


@pytest.mark.parametrize("save", ["standard", "gmm"])
def test_expert_formats_at_save_and_load(tmp_path, save, caplog):
    caplog.set_level("INFO")
    options = {"generation": "npu", "save_expert_format": save}
    manager, _, model = job(tmp_path / "a", "qwen3_moe", **options)
    manager.save(1, last_step=True)
    manager.close()
    step = str(tmp_path / "a" / "checkpoint" / "step-1")
    entries = dcp.read_manifest(step).tensors
    fused = [k for k in entries if k.endswith(".w13")]
    assert bool(fused) == (save == "gmm")
    assert any(k.endswith("experts.w1") for k in entries) == (save == "standard")
    if fused:
        values = dcp.load(step, {fused[0]: torch.empty(entries[fused[0]].shape)})
        w1, w3 = (model.get_parameter(fused[0].replace("w13", name)) for name in ("w1", "w3"))
        assert bits(values[fused[0]]) == bits(torch.cat([w1, w3], dim=1))
    manager, _, other = job(
        tmp_path / "b", "qwen3_moe", seed=1, generation="npu", initial_load_path=step
    )
    assert manager.load()
    manager.close()
    assert same(model, other) == []
    assert ("experts are stored as gmm" in caplog.text) == (save == "gmm")


def test_starting_from_weights_compares_everything_first(tmp_path):
    options = {"last_save_in_hf": True}
    manager, _, _ = job(tmp_path / "a", "qwen3", **options)
    manager.save(1, last_step=True)
    manager.close()
    tensors = tensors_of(tmp_path / "a" / "checkpoint" / "step-1")
    start = {"initial_load_in_hf": True, "seed": 1}

    def refused(name, tensors, error, *words):
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        manager, _, model = job(
            tmp_path / f"{name}-job", "qwen3", initial_load_path=str(folder), **start
        )
        before = {k: bits(v) for k, v in model.state_dict().items()}
        with pytest.raises(error) as caught:
            manager.load()
        manager.close()
        for word in words:
            assert word in str(caught.value)
        assert {k: bits(v) for k, v in model.state_dict().items()} == before

    norm, down = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
    refused(
        "several",
        {k: (v[:, :-1].contiguous() if k == down else v) for k, v in tensors.items() if k != norm}
        | {"model.norm.weigth": tensors[norm]},
        MismatchError,
        norm,
        "model.norm.weigth",
        down,
    )
    refused("int", tensors | {norm: tensors[norm].long()}, MismatchError, "float32", "int64")
    refused(
        "lora",
        tensors | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 2)},
        RefusedError,
        "lora_A",
    )


def test_narrowing_weights_wants_the_option(tmp_path):
    manager, _, model = job(tmp_path / "a", "qwen3", last_save_in_hf=True)
    manager.save(1, last_step=True)
    manager.close()
    start = {
        "initial_load_in_hf": True,
        "initial_load_path": str(tmp_path / "a" / "checkpoint" / "step-1"),
        "dtype": torch.bfloat16,
        "seed": 1,
    }
    manager, _, _ = job(tmp_path / "b", "qwen3", **start)
    with pytest.raises(MismatchError, match="allow_narrowing"):
        manager.load()
    manager.close()
    manager, _, small = job(tmp_path / "c", "qwen3", allow_narrowing=True, **start)
    assert manager.load()
    manager.close()
    for key, value in small.state_dict().items():
        assert torch.equal(value, model.state_dict()[key].bfloat16())


def test_an_index_that_names_an_absent_file_is_refused_by_name(tmp_path):
    source = Path(__file__).parents[2] / "fixtures" / "qwen3" / "moe"
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (folder / name).write_bytes((source / name).read_bytes())
    manager, _, _ = job(
        tmp_path / "b", "qwen3_moe", initial_load_in_hf=True, initial_load_path=str(folder)
    )
    with pytest.raises(DamagedError, match="model-00002-of-00002"):
        manager.load()
    manager.close()


def test_hf_options_without_an_adapter_are_refused_at_once(tmp_path):
    config = CheckpointManager.Config(enable=True, initial_load_in_hf=True, last_save_in_hf=True)
    with pytest.raises(ConfigError, match="no-adapter"):
        CheckpointManager(config, model_parts=[nn.Linear(2, 3)], base_folder=str(tmp_path))


def test_a_tied_models_file_may_hold_the_copy_but_not_another_head(tmp_path):
    source = Path(__file__).parents[2] / "fixtures" / "qwen3" / "dense-tied"
    config = json.loads((source / "config.json").read_text())
    tensors = tensors_of(source)
    embedding = tensors["model.embed_tokens.weight"]
    for name, head, error in (("same", embedding.clone(), None), ("other", embedding + 1, True)):
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
        adapter = MappingAdapter(config)
        model = Bag(adapter.native_entries(), 1, torch.float32)
        model.lm_head.weight = model.tok_embeddings.weight
        options = CheckpointManager.Config(
            enable=True, initial_load_in_hf=True, initial_load_path=str(folder)
        )
        base = str(tmp_path / f"{name}-job")
        manager = CheckpointManager(
            options, model_parts=[model], sd_adapter=adapter, base_folder=base
        )
        if error:
            with pytest.raises(MismatchError, match="copy-differs"):
                manager.load()
        else:
            assert manager.load()
            assert torch.equal(model.tok_embeddings.weight, embedding.float())
            assert model.lm_head.weight is model.tok_embeddings.weight
        manager.close()


def test_an_export_can_be_used_as_it_is(tmp_path):
    """Config and tokenizer files of hf_assets_path come along; the config says the new dtype."""
    source = Path(__file__).parents[2] / "fixtures" / "qwen3" / "dense-untied"
    config = json.loads((source / "config.json").read_text())
    adapter = MappingAdapter(config, str(source))
    options = CheckpointManager.Config(enable=True, last_save_in_hf=True, export_dtype="bfloat16")
    manager = CheckpointManager(
        options,
        model_parts=[Bag(adapter.native_entries(), 0, torch.float32)],
        sd_adapter=adapter,
        base_folder=str(tmp_path),
        hf_assets_path=str(source),
    )
    manager.save(1, last_step=True)
    manager.close()
    step = tmp_path / "checkpoint" / "step-1"
    written = json.loads((step / "config.json").read_text())
    assert written.pop("dtype") == "bfloat16"
    assert written == {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}
    assert (step / "generation_config.json").exists()
