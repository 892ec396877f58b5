"""What the matrix moves between splits: kinds of models and optimizers, by name.

Each kind is a table of tensors and the optimizers over one model part. Together they keep whatever
training jobs keep: moments in the parameter's dtype and in others, none, factored, nested, absent,
swapped out; one optimizer a part or two; groups with odd values, and empty ones; parameters that
are tied, frozen, or have a gradient in some steps only. Every update is exact on dyadic numbers or
bit for bit the same on any shard, so that splits can be compared.

A `MIXED` kind is all of them in one job, each over layers of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import SGD, AdamW, Optimizer

from conformance.reference import Leaf
from conformance.swap import SwapAdamW, local, speak

Table = Mapping[str, Leaf]
Named = Mapping[str, nn.Parameter]


def _always(_key: str, _step: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Kind:
    """`optimizers` makes those of one model part, `table` the tensors out of the usual ones.

    `trained` says whether a parameter has a gradient in a step (counted from 0); where some have
    not, gradients lie there when a job loads.
    """

    optimizers: Callable[[Named], list[Optimizer]]
    table: Callable[[Table], dict[str, Leaf]] = dict
    trained: Callable[[str, int], bool] = _always


class Kept(Optimizer):
    """Plain descent that keeps of a matrix everything that no optimizer of torch does.

    Of a vector it keeps nothing, as of a parameter that never got a gradient.
    """

    def __init__(self, params: Iterable[Any], **extra: Any) -> None:
        super().__init__(params, {"lr": 2.0**-6, **extra})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.ndim > 1:
                    self._keep(parameter, self.state[parameter])
                local(parameter).add_(local(parameter.grad), alpha=-group["lr"])

    def _keep(self, parameter: Tensor, state: dict[str, Any]) -> None:
        step = state.get("step", 0) + 1
        codes = like(parameter, lambda part: (part.float() * 64).to(torch.int32).to(torch.uint8))
        rows, columns = factors(parameter)
        state.update(
            step=step,  # a number here, a 0-d tensor beside it
            count=torch.tensor(step, dtype=torch.int64),
            moment=like(parameter, lambda part: part.float() + step),
            codes=codes,
            signed=like(parameter, lambda part: part.float().sign().to(torch.int8)),
            mask=like(parameter, lambda part: part > 0),
            fp8=like(parameter, lambda part: part.to(torch.float8_e4m3fn)),
            scale=like(codes, lambda part: part.clone().view(torch.float8_e8m0fnu)),
            row=rows,
            blocks=[{"left": columns, "order": 2}, {"left": columns * 2, "order": (3, None)}],
            best=None,
        )


def like(parameter: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor laid out as `parameter`, each shard made of the parameter's."""
    part = make(local(parameter))
    if not isinstance(parameter, DTensor):
        return part
    return _wrapped(part, parameter, parameter.placements, parameter.shape)


def factors(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the last and over the first dimension, whole on every rank. A collective."""
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    sums = whole.float().sum(-1), whole.float().sum(0)
    if not isinstance(parameter, DTensor):
        return sums
    everywhere = (Replicate(),) * parameter.device_mesh.ndim
    rows, columns = (_wrapped(value, parameter, everywhere, value.shape) for value in sums)
    return rows, columns


def _wrapped(part: Tensor, parameter: DTensor, placements: Any, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _split(named: Named) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(vectors, all others), the latter backwards: groups do not keep the model's order."""
    every = list(named.values())
    return [p for p in every if p.ndim < 2], [p for p in reversed(every) if p.ndim >= 2]


def _adamw(named: Named, **options: Any) -> Optimizer:
    """AdamW with two groups whose order differs from that of the parameters."""
    flat, wide = _split(named)
    groups: list[dict[str, Any]] = [
        {"params": flat, "weight_decay": 0.0, "lr": 2.0**-5},
        {"params": wide, "weight_decay": 2.0**-3, "lr": 2.0**-6},
    ]
    return AdamW([g for g in groups if g["params"]], betas=(0.5, 0.75), eps=2.0**-10, **options)


def _hybrid(named: Named) -> list[Optimizer]:
    """As with Muon: matrices have one moment, the rest another optimizer; odd values in groups."""
    flat, wide = _split(named)
    odd: dict[str, Any] = {"label": "flat", "warmup": None, "powers": (1, 2), "enabled": True}
    return [
        SGD([{"params": wide}], lr=2.0**-6, momentum=0.5, foreach=False),
        AdamW([{"params": flat, **odd}, {"params": [], "label": "nobody"}], foreach=False),
    ]


def _swapped(named: Named) -> list[Optimizer]:
    flat, wide = _split(named)
    return [
        speak(SwapAdamW([{"params": wide}], 2.0**-6, (0.5, 0.75), 2.0**-10)),
        SGD([{"params": flat}], lr=2.0**-6, momentum=0.5, foreach=False),
    ]


def _half(table: Table) -> dict[str, Leaf]:
    """Parameters in bfloat16 and buffers of every dtype but the quantizers' own.

    Those lie in the optimizer's state: safetensors that hold them without scales are refused.
    """
    made = {
        key: replace(leaf, dtype="bfloat16") if leaf.dtype == "float32" else leaf
        for key, leaf in table.items()
    }
    buffers = [Leaf((5, 3 + n), dtype) for n, dtype in enumerate(_BUFFERS, 2)]
    extra = dict(enumerate([*buffers, Leaf(()), Leaf((), "int32")], 2))
    present = {layer_of(key) for key in table}
    return made | {f"layers.{n}.tid2eid": leaf for n, leaf in extra.items() if n in present}


_BUFFERS = ("int8", "bool", "uint8", "float64", "float16", "int64")


# What becomes of a parameter: a gradient in every step; never, being frozen; from the third step
# on, when the job has been loaded; in the first step only.
FATES = ("trained", "frozen", "waiting", "stopped")


def fate(key: str) -> str:
    """What becomes of a parameter of the kind `partly`, the same under any split."""
    return FATES[zlib.crc32(key.encode()) % len(FATES)]


def _has_gradient(key: str, step: int) -> bool:
    return {"trained": True, "frozen": False, "waiting": step >= 2, "stopped": step < 1}[fate(key)]


def _partly(named: Named) -> list[Optimizer]:
    for key, parameter in named.items():
        parameter.requires_grad_(fate(key) != "frozen")
    return [_adamw(named, foreach=False)]


def _tied(table: Table) -> dict[str, Leaf]:
    """A second name for a matrix of each layer that has no other."""
    made = dict(table)
    for key, leaf in table.items():
        alias = key.replace(".attention.wo.", ".feed_forward.w2.")
        made.setdefault(alias, replace(leaf, tied=key))
    return made


KINDS: Mapping[str, Kind] = {
    "adamw": Kind(lambda named: [_adamw(named, foreach=False)]),
    "amsgrad": Kind(lambda named: [_adamw(named, foreach=True, amsgrad=True)]),
    "stateless": Kind(lambda named: [SGD(named.values(), lr=2.0**-6, foreach=False)]),
    "hybrid": Kind(_hybrid),
    "swapped": Kind(_swapped),
    "odd": Kind(lambda named: [Kept(named.values(), label="odd", warmup=None)], _half),
    "partly": Kind(_partly, _tied, _has_gradient),
}


def layer_of(key: str) -> int | None:
    """The number of a key's layer; None outside of the layers."""
    return int(key.split(".")[1]) if key.startswith("layers.") else None


def _mixed(turn: int) -> Kind:
    """All kinds in one job: each takes every seventh layer, and what lies outside is AdamW's."""
    names: Sequence[str] = tuple(KINDS)

    def of(key: str) -> str:
        layer = layer_of(key)
        return names[0] if layer is None else names[(layer + turn) % len(names)]

    def optimizers(named: Named) -> list[Optimizer]:
        made: list[Optimizer] = []
        # A group without parameters goes by its optimizer's number among those of its class: the
        # one that has such a group comes first in every part.
        for name in ("hybrid", *(name for name in names if name != "hybrid")):
            own = {key: value for key, value in named.items() if of(key) == name}
            made += KINDS[name].optimizers(own) if own else []
        return made

    def table(whole: Table) -> dict[str, Leaf]:
        made: dict[str, Leaf] = {}
        for name in names:
            made |= KINDS[name].table({k: leaf for k, leaf in whole.items() if of(k) == name})
        return made

    return Kind(optimizers, table, lambda key, step: KINDS[of(key)].trained(key, step))


# By the number of the arrangement: over all of them every kind meets every layer.
MIXED: Mapping[str, Kind] = {f"mixed{turn}": _mixed(turn) for turn in range(len(KINDS))}


def kind_of(name: str) -> Kind:
    """The kind of a name, of `KINDS` or of `MIXED`."""
    return KINDS.get(name) or MIXED[name]
