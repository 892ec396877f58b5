"""The model's state: names, hooks, ties, parts, strictness, and what stays fp32 at export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtitan_ckpt.errors import MismatchError, SaveError
from torchtitan_ckpt.state.model import (
    export_state_dict,
    load_model_state_dict,
    model_state_dict,
    pinned_fp32,
)


class Fused(nn.Module):
    """wq, wk, wv in one parameter; split in the state dict by hook, as torchtitan's."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(5, 14, bias=False)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._merge)

    @staticmethod
    def _split(module: Any, state: dict[str, Tensor], prefix: str, _: Any) -> None:
        whole = state.pop(f"{prefix}wqkv.weight")
        for name, part in zip(("wq", "wk", "wv"), whole.split([8, 3, 3]), strict=True):
            state[f"{prefix}{name}.weight"] = part.clone()

    @staticmethod
    def _merge(module: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        parts = [state.pop(f"{prefix}{name}.weight") for name in ("wq", "wk", "wv")]
        state[f"{prefix}wqkv.weight"] = torch.cat(parts)


class Model(nn.Module):
    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.tok = nn.Embedding(17, 5)
        self.layers = nn.ModuleDict({str(i): Fused() for i in range(layers)})
        self.head = nn.Linear(5, 17, bias=False)
        self.register_buffer("count", torch.tensor([3, 1, 2]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("expert_bias_E", torch.tensor([0.1, 0.2, 0.3]))
        self.register_buffer("freqs", torch.rand(4), persistent=False)


def filled(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def copies(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() for key, value in state.items()}


def test_hooks_run_both_ways() -> None:
    model = filled(Model(), 1)
    state = copies(model_state_dict(model))
    assert {k for k in state if k.startswith("layers.11.")} == {
        f"layers.11.{n}.weight" for n in ("wq", "wk", "wv")
    }
    other = filled(Model(), 2)
    load_model_state_dict(other, state)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_dict_follows_the_model() -> None:
    """REF-04: nothing is cached; a state taken after a load or a step is the model's own."""
    model = filled(Model(), 1)
    model_state_dict(model)
    load_model_state_dict(model, copies(model_state_dict(filled(Model(), 2))))
    with torch.no_grad():
        model.layers["3"].wqkv.weight.add_(1)
    state = model_state_dict(model)
    whole = torch.cat([state[f"layers.3.{n}.weight"] for n in ("wq", "wk", "wv")])
    assert torch.equal(whole, model.layers["3"].wqkv.weight)
    assert state["tok.weight"].data_ptr() == model.tok.weight.data_ptr()


def test_buffers_persistent_ones_only() -> None:
    state = model_state_dict(Model())
    assert {"count", "mask", "expert_bias_E"} <= set(state)
    assert "freqs" not in state


def test_wrapper_segments_are_stripped() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = set(model_state_dict(Model()))
    model = Model()
    model.layers["4"] = checkpoint_wrapper(model.layers["4"])
    model.layers["5"] = torch.compile(model.layers["5"])
    compiled = torch.compile(model)
    state = copies(model_state_dict(compiled))
    assert set(state) == plain
    load_model_state_dict(compiled, {key: torch.zeros_like(v) for key, v in state.items()})
    assert all(not p.any() for p in model.parameters())


def test_a_child_called_module_keeps_its_name() -> None:
    outer = nn.Module()
    outer.module = nn.Linear(3, 2)
    assert set(model_state_dict(outer)) == {"module.weight", "module.bias"}


def test_parts_are_one_state_and_strict_together() -> None:
    whole = filled(Model(), 1)
    state = copies(model_state_dict(whole))
    first, second = Model(), Model()
    del first.head, first.layers["11"]
    first._buffers.clear()
    del second.tok
    for index in range(11):
        del second.layers[str(index)]
    assert set(model_state_dict([first, second])) == set(state)
    load_model_state_dict([first, second], state)
    assert torch.equal(second.head.weight, whole.head.weight)
    assert torch.equal(first.layers["10"].wqkv.weight, whole.layers["10"].wqkv.weight)
    with pytest.raises(MismatchError) as caught:
        load_model_state_dict([first], state)
    assert {p.code for p in caught.value.problems} == {"model.unexpected"}


def test_one_name_in_two_parts_is_refused() -> None:
    with pytest.raises(SaveError, match=r"layers\.\{0\.\.11\}\.wq\.weight \(12\)"):
        model_state_dict([filled(Model(), 1), filled(Model(), 2)])


def test_equal_buffers_of_two_stages_are_one() -> None:
    parts = [nn.Module(), nn.Module()]
    for part in parts:
        part.register_buffer("freqs", torch.tensor([0.5, float("nan")]))
    state = model_state_dict(parts)
    load_model_state_dict(parts, {"freqs": torch.tensor([1.0, 2.0])})
    assert all(torch.equal(p.freqs, torch.tensor([1.0, 2.0])) for p in parts)
    assert list(state) == ["freqs"]
    parts[1].freqs = torch.tensor([0.25, 0.5])
    with pytest.raises(SaveError, match="freqs"):
        model_state_dict(parts)


def test_everything_wrong_is_said_at_once_and_nothing_is_changed() -> None:
    model = filled(Model(), 1)
    before = copies(model_state_dict(model))
    state = copies(model_state_dict(filled(Model(), 2)))
    del state["layers.3.wq.weight"]
    state["layers.3.wq_weight"] = torch.zeros(8, 5)
    state["head.weight"] = torch.zeros(5, 17)
    state["tok.weight"] = state["tok.weight"].double()
    state["count"] = torch.tensor([1.7, 2.0, 3.0])
    with pytest.raises(MismatchError) as caught:
        load_model_state_dict(model, state)
    codes = sorted(problem.code for problem in caught.value.problems)
    assert codes == [
        "model.dtype",
        "model.dtype",
        "model.missing",
        "model.shape",
        "model.unexpected",
    ]
    assert "nearest name that it has: layers.3.wq_weight" in str(caught.value)
    after = model_state_dict(model)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_widening_is_exact_and_narrowing_is_asked_for() -> None:
    model = filled(Model(), 1)
    state = {
        k: v.bfloat16() if v.is_floating_point() else v for k, v in model_state_dict(model).items()
    }
    load_model_state_dict(model, state)
    assert torch.equal(model.tok.weight, state["tok.weight"].float())
    small = Model().bfloat16()
    wide = copies(model_state_dict(filled(Model(), 2)))
    with pytest.raises(MismatchError, match="lose digits"):
        load_model_state_dict(small, wide)
    load_model_state_dict(small, wide, cast=True)
    assert torch.equal(small.tok.weight, wide["tok.weight"].bfloat16())


def test_derived_buffers_of_old_files_are_excused_by_name() -> None:
    """BUF-03."""
    model = filled(Model(), 1)
    state = copies(model_state_dict(model)) | {"freqs": torch.zeros(4)}
    with pytest.raises(MismatchError, match="no place for freqs"):
        load_model_state_dict(model, state)
    load_model_state_dict(model, state, ignore_unexpected=("freq*",))
    assert model.freqs.any()


@pytest.mark.parametrize("what", ["parameter", "buffer", "derived"])
def test_no_meta_tensor_survives_a_load(what: str) -> None:
    """REF-02, BUF-01: copying into meta does nothing and says nothing."""
    model = filled(Model(), 1)
    state = copies(model_state_dict(model))
    if what == "parameter":
        model.layers["7"].to("meta")
    elif what == "buffer":
        model.count = model.count.to("meta")
    else:
        model.freqs = model.freqs.to("meta")
    with pytest.raises(MismatchError, match="still on the meta device") as caught:
        load_model_state_dict(model, state)
    assert caught.value.problems[0].code == "model.meta"


def tied() -> Model:
    model = filled(Model(), 1)
    model.head.weight = model.tok.weight
    return model


def test_ties_survive_save_and_load() -> None:
    """TIE-06."""
    model = tied()
    state = model_state_dict(model)
    assert state["tok.weight"].data_ptr() == state["head.weight"].data_ptr()
    fresh = tied()
    load_model_state_dict(fresh, copies(state))
    assert fresh.head.weight is fresh.tok.weight
    fresh.head(fresh.tok(torch.tensor([2]))).sum().backward()
    torch.optim.SGD(fresh.parameters(), lr=1.0).step()
    assert torch.equal(fresh.head.weight, fresh.tok.weight)


@pytest.mark.parametrize("left_out", ["tok.weight", "head.weight"])
def test_one_name_of_a_tie_is_enough(left_out: str) -> None:
    model = tied()
    state = copies(model_state_dict(model))
    del state[left_out]
    fresh = tied()
    with torch.no_grad():
        fresh.tok.weight.zero_()
    load_model_state_dict(fresh, state)
    assert torch.equal(fresh.tok.weight, model.tok.weight)
    assert fresh.head.weight is fresh.tok.weight


def test_two_values_for_a_tie_are_refused() -> None:
    state = copies(model_state_dict(filled(Model(), 1)))
    with pytest.raises(MismatchError, match=r"two values: tok\.weight, head\.weight"):
        load_model_state_dict(tied(), state)


def test_extra_state_is_kept() -> None:
    class Scaled(nn.Linear):
        history: Any = None

        def get_extra_state(self) -> Any:
            return self.history

        def set_extra_state(self, state: Any) -> None:
            self.history = state

    model = Scaled(3, 2)
    model.history = {"amax": [1.0, 2.0]}
    state = model_state_dict(model)
    other = Scaled(3, 2)
    load_model_state_dict(other, state)
    assert other.history == {"amax": [1.0, 2.0]}
    model.history = None
    assert "_extra_state" not in model_state_dict(model)
    load_model_state_dict(model, model_state_dict(model))


def test_emptied_parameters_are_refused() -> None:
    model = filled(Model(), 1)
    model.layers["2"].register_buffer("cache", torch.zeros(4))
    model.layers["2"].cache.untyped_storage().resize_(0)
    with pytest.raises(SaveError, match=r"layers\.2\.cache"):
        model_state_dict(model)


def test_export_casts_floats_and_keeps_what_is_pinned() -> None:
    model = tied()
    model.layers["3"].fp32_pinned = ["wk.*"]
    keep = pinned_fp32(model)
    assert keep == {"layers.3.wk.weight", "expert_bias_E"}
    state = model_state_dict(model)
    out = export_state_dict(state, torch.bfloat16, keep)
    assert list(out) == list(state)
    assert out["expert_bias_E"].dtype == out["layers.3.wk.weight"].dtype == torch.float32
    assert out["layers.3.wq.weight"].dtype == torch.bfloat16
    assert out["count"].dtype == torch.int64
    assert out["mask"].dtype == torch.bool
    assert out["tok.weight"] is out["head.weight"]
    assert state["tok.weight"].dtype == torch.float32


def test_fused_weights_of_torchtitan() -> None:
    pytest.importorskip("torchtitan.models.common.attention", reason="the extra 'titan' is absent")
    from torchtitan.models.common.attention import FusedQKVLinear
    from torchtitan.models.common.linear import Linear

    config = FusedQKVLinear.Config(
        head_dim=2, n_heads=6, n_kv_heads=3, wqkv=Linear.Config(in_features=5, out_features=24)
    )
    try:
        module, other = config.build(), config.build()
    except TypeError as error:  # another torchtitan: its own tests cover it
        pytest.skip(f"torchtitan's FusedQKVLinear takes other arguments: {error}")
    filled(module, 1)
    filled(other, 2)
    state = copies(model_state_dict(module))
    assert set(state) == {"wq.weight", "wk.weight", "wv.weight"}
    load_model_state_dict(other, state)
    assert torch.equal(other.wqkv.weight, module.wqkv.weight)
