"""How a job is split over its ranks: the parallel degrees, their rules, and the device meshes.

The degrees multiply to the number of ranks, but for `ep` and `etp`, which borrow ranks from
`dp_shard`, `cp` and `tp`. Two meshes over the same ranks follow (torchtitan's): a dense one,
`pp, dp_replicate, fsdp, tp`, where `fsdp` is `dp_shard` and `cp` folded together, and for experts
a sparse one, `pp, dp_replicate, efsdp, ep, etp`. Which tensor lies how on a mesh is
`torchtitan_ckpt/placement.py`'s business. Imports torch only to build meshes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from torchtitan_ckpt.errors import ConfigError, Problem, nearest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The guide's option names, and the short ones used everywhere else.
OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "data_parallel_replicate_degree": "dp_replicate",
        "data_parallel_shard_degree": "dp_shard",
        "context_parallel_degree": "cp",
        "tensor_parallel_degree": "tp",
        "pipeline_parallel_degree": "pp",
        "expert_parallel_degree": "ep",
        "expert_tensor_parallel_degree": "etp",
    }
)
DENSE_AXES = ("pp", "dp_replicate", "fsdp", "tp")
SPARSE_AXES = ("pp", "dp_replicate", "efsdp", "ep", "etp")
_ALIASES = {"fsdp": "dp_shard", "dp": "dp_shard", "replicate": "dp_replicate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDegrees:
    """Parallel degrees of a job. `dp_shard=-1` means the ranks that are left, until `resolve`.

    `etp` splits each expert and is 1 or `tp`, as torch's expert-tensor parallelism has it.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @classmethod
    def from_options(cls, options: Mapping[str, int]) -> ParallelDegrees:
        """From the guide's option names (or the short ones); ConfigError names unknown ones."""
        values: dict[str, int] = {}
        problems = []
        for name, value in options.items():
            short = OPTIONS.get(name, _ALIASES.get(name, name))
            if short not in OPTIONS.values():
                known = [*OPTIONS, *OPTIONS.values()]
                close = nearest(name, known)
                problems.append(
                    Problem(
                        code="parallel.unknown",
                        what=f"there is no parallel degree {name!r}",
                        expected=f"one of {', '.join(OPTIONS)}",
                        fix=f"did you mean {close}?" if close else "",
                    )
                )
                continue
            values[short] = value
        if problems:
            raise ConfigError(*problems)
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> ParallelDegrees:
        """From words such as `fsdp2 x tp2 x pp2`, `hsdp2x4` or the options' names with `=`.

        >>> ParallelDegrees.parse("fsdp 8, tp=4")
        ParallelDegrees(dp_replicate=1, dp_shard=8, cp=1, tp=4, pp=1, ep=1, etp=1)
        """
        if text.strip() in ("", "1"):
            return cls()
        wide = re.sub(r"\bhsdp\s*=?\s*(\d+)\s*x\s*(\d+)", r"dp_replicate\1 dp_shard\2", text)
        found = re.findall(r"([a-z_]*[a-z])[\s=]*(-?\d+)", wide)
        rest = re.sub(r"([a-z_]*[a-z])[\s=]*(-?\d+)", " ", wide)
        pairs = [(name.removeprefix("x") if name[:1] == "x" else name, n) for name, n in found]
        if not found or rest.replace("x", " ").replace(",", " ").strip():
            raise ConfigError(
                Problem(
                    code="parallel.unreadable",
                    what=f"{text!r} is not a list of parallel degrees",
                    expected="'fsdp8 x tp4 x ep16', 'hsdp2x4' or 'tensor_parallel_degree=4'",
                )
            )
        return cls.from_options({name: int(number) for name, number in pairs})

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def fsdp(self) -> int:
        """Ranks over which FSDP shards dense parameters: `dp_shard` and `cp` folded together."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks over which FSDP shards each expert group: what `ep` and `etp` leave."""
        return self.fsdp * self.tp // (self.ep * self.etp)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every mesh axis, dense and sparse ones."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "fsdp": self.fsdp,
            "tp": self.tp,
            "efsdp": self.efsdp,
            "ep": self.ep,
            "etp": self.etp,
        }

    @property
    def label(self) -> str:
        """Short and readable back by `parse`: `fsdp2 x tp2`, `hsdp2x2 x ep2`, `1`."""
        parts = []
        if self.dp_replicate > 1:
            parts.append(f"hsdp{self.dp_replicate}x{self.dp_shard}")
        elif self.dp_shard != 1:
            parts.append(f"fsdp{self.dp_shard}")
        parts += [f"{n}{getattr(self, n)}" for n in ("cp", "tp", "pp", "ep", "etp")
                  if getattr(self, n) > 1]  # fmt: skip
        return " x ".join(parts) or "1"

    @property
    def options(self) -> dict[str, int]:
        """Under the guide's option names."""
        return {option: getattr(self, short) for option, short in OPTIONS.items()}

    def resolve(self, world_size: int | None = None) -> ParallelDegrees:
        """Fill in `dp_shard=-1` and check everything; ConfigError with all problems at once.

        `world_size` is the number of ranks there are; None takes what the degrees ask for.
        """
        problems = list(self._range_problems())
        if problems:
            raise ConfigError(*problems)
        degrees = self
        if self.dp_shard == -1:
            rest = -self.world_size
            if world_size is None or world_size % rest:
                raise ConfigError(self._rest_problem(rest, world_size))
            degrees = replace(self, dp_shard=world_size // rest)
        problems = list(degrees._product_problems(world_size))
        if problems:
            raise ConfigError(*problems)
        return degrees

    def _rest_problem(self, rest: int, world_size: int | None) -> Problem:
        """`data_parallel_shard_degree -1` cannot be filled in beside degrees of `rest` ranks."""
        options = {short: option for option, short in OPTIONS.items()}
        others = {n: getattr(self, n) for n in ("dp_replicate", "cp", "tp", "pp")}
        others = {n: degree for n, degree in others.items() if degree > 1}
        shown = " x ".join(f"{options[n]} {degree}" for n, degree in others.items())
        if world_size is None:
            fix = "give data_parallel_shard_degree as a number"
        else:
            start = f"start {rest} ranks or a multiple of {rest}"
            fix = f"{start}, or change {' or '.join(options[n] for n in others)}"
        return Problem(
            code="parallel.rest",
            what="data_parallel_shard_degree -1 has no whole number of ranks to take"
            + (f" beside {shown}" if shown else ""),
            expected=f"a number of ranks that {rest} divides",
            actual="no number of ranks was given"
            if world_size is None
            else f"{world_size} rank{'s' * (world_size > 1)}",
            fix=fix,
        )

    def _range_problems(self) -> Iterator[Problem]:
        for item in fields(self):
            value = getattr(self, item.name)
            if value >= 1 or (item.name == "dp_shard" and value == -1):
                continue
            option = next(o for o, short in OPTIONS.items() if short == item.name)
            yield Problem(
                code="parallel.degree",
                what=f"{option} cannot be {value}",
                expected="1 or more" + (", or -1" if item.name == "dp_shard" else ""),
                actual=str(value),
            )

    def _product_problems(self, world_size: int | None) -> Iterator[Problem]:
        if world_size is not None and self.world_size != world_size:
            shown = " x ".join(
                f"{n} {getattr(self, n)}" for n in ("dp_replicate", "dp_shard", "cp", "tp", "pp")
            )
            yield Problem(
                code="parallel.product",
                what="the parallel degrees do not multiply to the number of ranks",
                expected=f"{world_size} ranks",
                actual=f"{shown} = {self.world_size}",
                fix=f"start {self.world_size} ranks, or change a degree (-1 for "
                "data_parallel_shard_degree takes what is left)",
            )
        if self.etp not in (1, self.tp):
            yield Problem(
                code="parallel.etp",
                what="expert_tensor_parallel_degree is neither 1 nor the tensor parallel degree",
                expected=f"1 or {self.tp}",
                actual=str(self.etp),
            )
        if self.etp > 1 and self.ep == 1:
            yield Problem(
                code="parallel.etp",
                what="expert_tensor_parallel_degree does nothing without expert parallelism",
                expected="expert_parallel_degree above 1",
                actual="expert_parallel_degree 1 (experts are then split by tp as it is)",
                fix="leave expert_tensor_parallel_degree at 1",
            )
        shared, wanted = self.fsdp * self.tp, self.ep * self.etp
        if shared % wanted:
            yield Problem(
                code="parallel.experts",
                what="experts borrow the ranks of dp_shard, cp and tp, and these do not divide",
                expected=f"ep x etp to divide dp_shard x cp x tp = {shared}",
                actual=f"ep {self.ep} x etp {self.etp} = {wanted}",
                fix="lower expert_parallel_degree, or raise data_parallel_shard_degree",
            )

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis; the last axis of each mesh varies fastest."""
        out: dict[str, int] = {}
        sizes = self.sizes
        for axes in (DENSE_AXES, SPARSE_AXES):
            rest = rank
            for axis in reversed(axes):
                rest, out[axis] = divmod(rest, sizes[axis])
        return out

    def ranks_of_stage(self, stage: int) -> range:
        """The ranks of a pipeline stage: neighbours, since `pp` is the slowest axis."""
        each = self.world_size // self.pp
        return range(stage * each, (stage + 1) * each)


@dataclass(frozen=True, slots=True)
class Meshes:
    """The device meshes of a job; `sparse` is None without expert parallelism.

    Slice them by axis names: `meshes.dense["fsdp", "tp"]`. FSDP over tensor or expert parallelism
    needs both slices of one mesh, hence never a mesh of its own for each axis.
    """

    degrees: ParallelDegrees
    dense: DeviceMesh
    sparse: DeviceMesh | None

    def fsdp_axes(self, *, experts: bool = False) -> tuple[str, ...]:
        """The axes that `fully_shard` gets: with replicas two of them (HSDP)."""
        shard = "efsdp" if experts else "fsdp"
        return ("dp_replicate", shard) if self.degrees.dp_replicate > 1 else (shard,)


def build_meshes(degrees: ParallelDegrees, device_type: str = "cpu") -> Meshes:
    """The meshes of this process group; every rank calls it. Degrees must be resolved."""
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh

    degrees.resolve(get_world_size())
    sizes = degrees.sizes

    def mesh(axes: tuple[str, ...]) -> DeviceMesh:
        return init_device_mesh(
            device_type, tuple(sizes[axis] for axis in axes), mesh_dim_names=axes
        )

    return Meshes(degrees, mesh(DENSE_AXES), mesh(SPARSE_AXES) if degrees.ep > 1 else None)
