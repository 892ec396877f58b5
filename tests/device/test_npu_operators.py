"""The simulated operators against the CPU, within stated units in the last place (ULPs).

The simulator lets torch's CPU kernels do the arithmetic, so these tests look for an argument that
is misread on the way: a scale, a dimension, a stride, an order, an intermediate type. torch_npu may
split an operator differently than torch does, so some bounds are not zero. Ascend's own kernels
round as they like: nothing here says how.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.simulator_only

NPU = "npu"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ALL = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
_INT_OF = {4: torch.int32, 2: torch.int16}


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance between two floating tensors, in steps of their own type."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape

    def ordered(t: torch.Tensor) -> torch.Tensor:
        bits = t.contiguous().view(_INT_OF[t.element_size()]).to(torch.int64)
        lowest = -(1 << (8 * t.element_size() - 1))
        return torch.where(bits < 0, lowest - bits, bits)

    return int((ordered(a) - ordered(b)).abs().max())


def data(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    if dtype is torch.bool:
        return values > 0
    if not dtype.is_floating_point:
        values = values * 10
    return values.abs().to(dtype) if dtype is torch.uint8 else values.to(dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_copies_slices_and_layouts_are_exact(dtype: torch.dtype):
    x = data((5, 7, 3), dtype)
    d = x.to(NPU)
    assert torch.equal(d.cpu(), x)
    assert torch.equal(d.permute(2, 0, 1).contiguous().cpu(), x.permute(2, 0, 1))
    assert torch.equal(d[1:4, ::2].cpu(), x[1:4, ::2])
    assert torch.equal(torch.cat([d[:2], d[2:]]).cpu(), x)
    assert torch.equal(torch.stack([d, d], 1).cpu(), torch.stack([x, x], 1))
    target = torch.zeros((7, 5, 3), dtype=dtype, device=NPU)
    target.transpose(0, 1)[1:].copy_(d[1:])
    expected = torch.zeros((7, 5, 3), dtype=dtype)
    expected.transpose(0, 1)[1:].copy_(x[1:])
    assert torch.equal(target.cpu(), expected)
    y = torch.zeros((3, 7, 5), dtype=dtype)
    y.permute(2, 1, 0).copy_(d)  # to a strided host tensor
    assert torch.equal(y, x.permute(2, 1, 0))
    assert torch.equal(torch.nn.functional.pad(d, (1, 2)).cpu(), torch.nn.functional.pad(x, (1, 2)))


@pytest.mark.parametrize("source", ALL, ids=str)
@pytest.mark.parametrize(
    "target", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str
)
def test_casts_are_exact(source: torch.dtype, target: torch.dtype):
    x = data((6, 5), source)
    assert torch.equal(x.to(NPU).to(target).cpu(), x.to(target))


def test_special_values_survive_casts():
    special = [0.0, -0.0, float("inf"), float("-inf"), 1e-45, 6e-8, 65504.0, 65520.0, 3.4e38]
    x = torch.tensor(special)
    for dtype in (torch.bfloat16, torch.float16):
        got, want = x.to(NPU).to(dtype).cpu(), x.to(dtype)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16)), dtype
    assert torch.tensor([float("nan")], device=NPU).to(torch.bfloat16).isnan().all()


# Operator and its bound in ULPs of the result: 0 where both sides round once. The numbers are
# positive, so that no cancellation turns one rounding into many units.
UNARY = {
    "add_number": (lambda x: x + 1.5, 0),
    "subtract_number": (lambda x: x - 0.25, 0),
    "subtract_from_number": (lambda x: 30.5 - x, 0),
    "multiply_number": (lambda x: x * 0.3, 0),
    "divide_number": (lambda x: x / 0.7, 1),
    "sqrt": (lambda x: x.sqrt(), 1),
    "negative": (lambda x: -x, 0),
    "absolute": (lambda x: (-x).abs(), 0),
    "reciprocal": (lambda x: x.reciprocal(), 0),
    "square": (lambda x: x**2, 0),
    "sum": (lambda x: x.sum(), 1),
    "sum_of_rows": (lambda x: x.sum(0), 2),
    "mean": (lambda x: x.mean(), 1),
    "norm": (lambda x: torch.linalg.vector_norm(x), 1),
    "maximum": (lambda x: x.max(), 0),
    "minimum": (lambda x: x.min(), 0),
}
BINARY = {
    "add": (lambda x, y: x + y, 0),
    "add_alpha": (lambda x, y: torch.add(x, y, alpha=0.3), 1),
    "subtract": (lambda x, y: x - y, 0),
    "multiply": (lambda x, y: x * y, 0),
    "divide": (lambda x, y: x / y, 0),
    "broadcast": (lambda x, y: x[:, :1] * y[0], 0),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.1), 2),
    "addcmul": (lambda x, y: torch.addcmul(x, x, y, value=0.2), 2),
    "addcdiv": (lambda x, y: torch.addcdiv(x, x, y, value=0.2), 2),
    "matmul": (lambda x, y: x @ y.t(), 2),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_operators_of_one_tensor(name: str, dtype: torch.dtype):
    call, bound = UNARY[name]
    x = data((9, 13), dtype).abs()
    assert ulps(call(x.to(NPU)).cpu(), call(x)) <= bound


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_operators_of_two_tensors(name: str, dtype: torch.dtype):
    call, bound = BINARY[name]
    x, y = data((9, 13), dtype).abs(), data((9, 13), dtype, seed=1).abs()
    assert ulps(call(x.to(NPU), y.to(NPU)).cpu(), call(x, y)) <= bound


def test_the_measure_sees_one_step():
    x = torch.tensor([1.0, -1.0, 0.0])
    for dtype in FLOATS:
        a = x.to(dtype)
        assert ulps(a, a) == 0
        assert ulps(a, torch.nextafter(a.float(), torch.tensor(9.0)).to(dtype)) <= 1
    assert ulps(x, torch.nextafter(x, torch.tensor(9.0))) == 1
    assert ulps(torch.tensor([0.0]), torch.tensor([-0.0])) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_comparisons(dtype: torch.dtype):
    x = data((4, 6), dtype)
    y = x.clone()
    y[2, 3] = ~y[2, 3] if dtype is torch.bool else y[2, 3] + 1
    a, b = x.to(NPU), y.to(NPU)
    assert torch.equal((a == b).cpu(), x == y)
    assert torch.equal((a != b).cpu(), x != y)
    assert torch.equal(a, a.clone())
    assert not torch.equal(a, b)
    assert not torch.equal(a, a[:2])
    assert bool((a == b).any())
    assert not bool((a == b).all())
    if dtype is torch.float32:
        assert torch.allclose(a, b, atol=1.0)
        assert not torch.allclose(a, b)
        assert torch.equal((a > b).cpu(), x > y)
        assert torch.equal((a <= 0.5).cpu(), x <= 0.5)


def test_integers_do_not_pass_through_floats():
    big = torch.tensor([2**53 + 1, -(2**62) - 3, 7])
    assert torch.equal((big.to(NPU) + 1).cpu(), big + 1)
    assert torch.equal(big.to(NPU).clone().cpu(), big)
    assert torch.equal((big.to(NPU) == big.to(NPU) + 1).cpu(), torch.tensor([False] * 3))


def test_random_numbers_depend_on_the_seed_and_look_random():
    torch.manual_seed(5)
    a = torch.randn(4000, device=NPU)
    torch.manual_seed(5)
    assert torch.equal(a, torch.randn(4000, device=NPU))
    assert not torch.equal(a, torch.randn(4000, device=NPU))
    assert abs(a.mean().item()) < 0.1
    assert abs(torch.linalg.vector_norm(a).item() / 4000**0.5 - 1) < 0.1
    b = torch.empty(4000, device=NPU).uniform_(2, 3)
    assert 2 < b.cpu().min() < 2.1
    assert 2.9 < b.cpu().max() < 3


@pytest.mark.parametrize("how", ["for-loop", "foreach", "fused"])
def test_adamw_against_the_cpu(how: str):
    """Three steps; the bound is absolute, since the updates are small beside the weights."""
    torch.manual_seed(0)
    host = nn.Linear(11, 5)
    npu = copy.deepcopy(host).to(NPU)
    flags = {"foreach": how == "foreach", "fused": how == "fused"}
    optimizers = [torch.optim.AdamW(host.parameters(), lr=1e-2, foreach=False)]
    optimizers.append(torch.optim.AdamW(npu.parameters(), lr=1e-2, **flags))
    for step in range(3):
        gradients = [data(tuple(p.shape), torch.float32, seed=step) for p in host.parameters()]
        for model, optimizer in zip((host, npu), optimizers, strict=True):
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = g.to(p.device)
            optimizer.step()
    for p, q in zip(host.parameters(), npu.parameters(), strict=True):
        difference = (p - q.cpu()).abs().max().item()
        assert difference < (1e-6 if how == "fused" else 1e-7), difference


def test_a_small_language_model_learns_as_on_the_cpu():
    """Loss and every gradient of the reference job's Qwen3, with grouped heads and dropout."""
    from torchtitan_ckpt.train.models.config import Qwen3Config
    from torchtitan_ckpt.train.models.qwen3 import Qwen3Model, init_weights

    config = Qwen3Config(
        vocab_size=50,
        hidden_size=18,
        intermediate_size=26,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
    )
    host = Qwen3Model(config, dropout=0.1)
    init_weights(host, config, 0)
    npu = copy.deepcopy(host).to(NPU)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, 50, (2, 2, 11), generator=generator)
    losses = []
    for model in (host, npu):
        where = next(model.parameters()).device
        model.noise.manual_seed(1)
        logits = model(tokens.to(where)).reshape(-1, 50)
        loss = nn.functional.cross_entropy(logits, labels.to(where).reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-5
    for (name, p), q in zip(host.named_parameters(), npu.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.abs().max() > 0, name
        assert torch.allclose(p.grad, q.grad.cpu(), rtol=1e-3, atol=1e-6), name


def test_experts_learn_as_on_the_cpu():
    """Loss and every gradient of the reference job's Qwen3 with experts, and how it moves them."""
    from torchtitan_ckpt.train.models.config import Qwen3Config
    from torchtitan_ckpt.train.models.moe import MoE

    config = Qwen3Config(
        vocab_size=50,
        hidden_size=10,
        intermediate_size=26,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=7,
        num_experts=12,
        num_experts_per_tok=3,
        model_type="qwen3_moe",
        load_balance_coeff=0.01,
    )
    torch.manual_seed(0)
    host = MoE(config)
    for p in host.parameters():
        nn.init.normal_(p, std=0.5)
    npu = copy.deepcopy(host).to(NPU)
    x = data((2, 9, 10), torch.float32)
    for model in (host, npu):
        model(x.to(next(model.parameters()).device)).pow(2).mean().backward()
        model.move_bias()
    for (name, p), q in zip(host.named_parameters(), npu.named_parameters(), strict=True):
        assert p.grad is not None
        assert p.grad.abs().max() > 0, name
        worst = (p.grad - q[1].grad.cpu()).abs().max() / p.grad.abs().max()
        assert worst < 1e-6, name
    assert torch.allclose(host.expert_bias_E, npu.expert_bias_E.cpu())
    assert host.expert_bias_E.abs().max() > 0


BY_INDEX = {
    "rows": lambda x, i, j: x[i],
    "pairs": lambda x, i, j: x[i, j],
    "block": lambda x, i, j: x[:, i[:, None], j],
    "negative": lambda x, i, j: x[-i - 1],
    "gather": lambda x, i, j: x.gather(1, i[:, None, None].expand(-1, 2, x.shape[2])),
    "select": lambda x, i, j: x.index_select(1, j),
    "index_add": lambda x, i, j: x.index_add(1, j, x[:, : len(j)], alpha=0.5),
    "scatter_add": lambda x, i, j: x.scatter_add(
        2, j[None, :, None].expand(2, -1, 2), x[:2, : len(j), :2]
    ),
    "nonzero": lambda x, i, j: torch.stack(torch.where(x > 0)),
    "none_at_all": lambda x, i, j: torch.stack(torch.where(x > 1e9)),
    "bincount": lambda x, i, j: torch.bincount(torch.cat([i, j]), minlength=9),
    "sign": lambda x, i, j: x.sign(),
    "repeat": lambda x, i, j: x.transpose(0, 2).repeat_interleave(3, 1),
}


@pytest.mark.parametrize("name", BY_INDEX)
def test_operators_by_index_are_exact(name: str):
    """Forwards bit for bit; backwards what is chosen twice adds up."""
    call = BY_INDEX[name]
    x, i, j = data((4, 5, 7), torch.float32), torch.tensor([3, 0, 3, 1]), torch.tensor([4, 1, 0, 1])
    ours, theirs = x.to(NPU).requires_grad_(), x.clone().requires_grad_()
    out = call(ours, i.to(NPU), j.to(NPU))
    want = call(theirs, i, j)
    assert torch.equal(out.cpu(), want)
    if want.requires_grad and name != "sign":
        grad = data(tuple(want.shape), torch.float32, seed=1).abs()
        out.backward(grad.to(NPU))
        want.backward(grad)
        assert ulps(ours.grad.cpu(), theirs.grad) <= 2


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_topk(dtype: torch.dtype, largest: bool):
    x = torch.randperm(60, generator=torch.Generator().manual_seed(3)).reshape(5, 12).to(dtype)
    x[0] = 7  # equals: the first of them first
    values, places = x.to(NPU).topk(4, dim=1, largest=largest)
    want = x[1:].topk(4, dim=1, largest=largest)
    assert torch.equal(values[1:].cpu(), want.values)
    assert torch.equal(places[1:].cpu(), want.indices)
    assert places[0].tolist() == [0, 1, 2, 3]
    flipped = x.t().contiguous().to(NPU).topk(4, dim=0, largest=largest)
    assert torch.equal(flipped.values.t().cpu(), values.cpu())


def test_an_index_out_of_range_is_an_error():
    table = torch.ones(5, 3, device=NPU)
    five = torch.tensor([1, 5], device=NPU)
    for call in (
        lambda: nn.functional.embedding(five, table),
        lambda: table[five],
        lambda: table.index_add(0, five, table[:2]),
    ):
        with pytest.raises(RuntimeError, match=r"out of (range|bounds)"):
            call().cpu()


def test_arguments_that_are_often_left_out_count():
    """Weights, padding, labels to ignore: what is given changes the result as on the CPU."""
    i, labels = torch.tensor([1, 2, 1]), torch.tensor([3, -100, 0])
    x, weights = data((3, 4), torch.float32), torch.tensor([0.5, 2.0, 4.0, 1.5])
    loss = nn.functional.cross_entropy
    for call in (
        lambda to: to(x).index_put_((to(i[:2]),), to(x[:2] + 1)),
        lambda to: torch.bincount(to(i), weights=to(weights[:3])),
        lambda to: loss(to(x), to(labels), weight=to(weights)),
        lambda to: loss(to(x), to(labels), reduction="sum"),
        lambda to: to(x).clamp(min=0.25),
        lambda to: torch.linalg.vector_norm(to(x), 1, dim=1),
    ):
        assert ulps(call(lambda t: t.to(NPU)).cpu(), call(lambda t: t.clone())) <= 1


# ------------------------------------------------------------------ torch_npu's own differences


def test_float64_becomes_float32_on_the_device():
    """torch_npu casts down on arrival: a float64 entry of a checkpoint loses bits there."""
    x = torch.tensor([1.0 + 2**-40], dtype=torch.float64)
    assert x.to(NPU).dtype is torch.float64, "a plain copy keeps the type"
    assert torch.equal(x.to(NPU).cpu(), x), "and the bits"
    y = x.to(torch.float32).to(NPU)
    assert y.to(torch.float64).dtype is torch.float32, "but a cast on the device does not"


def test_a_view_is_saved_with_its_whole_storage(tmp_path):
    x = torch.arange(100, dtype=torch.float32, device=NPU)
    torch.save(x[:10], tmp_path / "view.pt")
    loaded = torch.load(tmp_path / "view.pt", map_location="cpu")
    assert loaded.untyped_storage().nbytes() == 400
    assert torch.equal(loaded, torch.arange(10, dtype=torch.float32))
