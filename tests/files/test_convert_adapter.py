"""`convert` through hand-written adapters: run in parts where that is right, whole where not."""

import pytest
import torch

from tests.files.convert_lab import dcp_tensors, go, hf_tensors, same_dict, save_dcp, write_hf
from torchtitan_ckpt.errors import ConfigError, MappingError

LAYERS, EXPERTS = 12, 11


def native():
    torch.manual_seed(5)
    out = {"tok.weight": torch.randn(9, 6), "norm.weight": torch.randn(6)}
    for i in range(LAYERS):
        out[f"layers.{i}.wq"] = torch.randn(8, 6)
        out[f"layers.{i}.wk"] = torch.randn(4, 6)
        out[f"layers.{i}.w1"] = torch.randn(EXPERTS, 5, 6)
    return out


class Adapter:
    """Fuses q and k, splits experts, transposes one tensor: what adapters of the field do."""

    def __init__(self):
        self.fqn_to_index_mapping = None
        self.calls = []

    def to_hf(self, state):
        self.calls.append(len(state))
        out = {}
        for key, value in state.items():
            if key.endswith(".wq"):
                other = state[key.replace("wq", "wk")]
                fused = torch.empty(12, 6, dtype=value.dtype, device=value.device)
                fused[:8].copy_(value)
                fused[8:].copy_(other)
                out[f"h.{key.replace('wq', 'qk')}"] = fused
            elif key.endswith(".w1"):
                for n, part in enumerate(value.unbind(0)):
                    out[f"h.{key}.{n}"] = part
            elif not key.endswith(".wk"):
                out[f"h.{key}"] = value.t().contiguous() if value.dim() == 2 else value
        return out

    def from_hf(self, state):
        self.calls.append(len(state))
        out, experts = {}, {}
        for key, value in state.items():
            name = key[2:]
            if name.endswith(".qk"):
                out[name.replace("qk", "wq")] = value[:8]
                out[name.replace("qk", "wk")] = value[8:]
            elif ".w1." in name:
                base, number = name.rsplit(".", 1)
                experts.setdefault(base, {})[int(number)] = value
            else:
                out[name] = value.t() if value.dim() == 2 else value
        for base, parts in experts.items():
            out[base] = torch.stack([parts[n] for n in sorted(parts)])
        return out

    def get_hf_storage_reader(self, path, from_quantized=False):
        raise NotImplementedError


class Peeks(Adapter):
    """Looks at values: cannot run on meta tensors."""

    def to_hf(self, state):
        scale = float(state["norm.weight"].abs().sum())
        return {k: v + scale for k, v in super().to_hf(state).items()}


class Counts(Adapter):
    """Makes something else of a part than of the whole."""

    def to_hf(self, state):
        return {f"{k}.of{len(state)}": v for k, v in super().to_hf(state).items()}


MADE = []


def factory():
    MADE.append(Adapter())
    return MADE[-1]


def takes_config(config):
    assert config
    return factory()


NOT_ONE = object()


@pytest.mark.parametrize("name", ["factory", "takes_config", "Adapter"])
def test_an_adapter_is_run_in_parts(name, tmp_path):
    save_dcp(native(), tmp_path / "dcp")
    done = go(tmp_path / "dcp", tmp_path / "hf", adapter=f"{__name__}:{name}")
    assert same_dict(hf_tensors(tmp_path / "hf"), Adapter().to_hf(native()))
    assert f"in {2 + 2 * LAYERS} parts" in "\n".join(done.notes)
    if name == "factory":
        # Once on all keys (meta), then never more than the two that belong together.
        assert sorted(set(MADE[-1].calls)) == [1, 2, 2 + 3 * LAYERS]
        assert MADE[-1].calls.count(2 + 3 * LAYERS) == 1
    go(tmp_path / "hf", tmp_path / "back", adapter=f"{__name__}:{name}")
    assert same_dict(dcp_tensors(tmp_path / "back", tmp_path / "x.pt"), native())


@pytest.mark.parametrize("kind", [Peeks, Counts])
def test_what_cannot_run_in_parts_runs_whole_and_says_so(kind, tmp_path):
    save_dcp(native(), tmp_path / "dcp")
    done = go(tmp_path / "dcp", tmp_path / "hf", adapter=f"{__name__}:{kind.__name__}")
    assert "the whole model is converted in memory" in "\n".join(done.notes)
    assert same_dict(hf_tensors(tmp_path / "hf"), kind().to_hf(native()))


def test_an_adapter_of_another_model_fails_in_words(tmp_path):
    save_dcp({k: v for k, v in native().items() if not k.endswith("3.wk")}, tmp_path / "dcp")
    with pytest.raises(MappingError, match=r"layers\.3\.wk"):
        go(tmp_path / "dcp", tmp_path / "hf", adapter=f"{__name__}:factory")


@pytest.mark.parametrize("name", ["no_such:thing", "tests.files:", f"{__name__}:NOT_ONE"])
def test_names_that_are_no_adapter(name, tmp_path):
    write_hf(tmp_path / "a", {"h.x": torch.ones(2)}, {})
    with pytest.raises(ConfigError, match="adapter"):
        go(tmp_path / "a", tmp_path / "b", adapter=name)
