"""The parallel degrees that every save and load is tried under, as the project lists them."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_ckpt.parallel import ParallelDegrees


@dataclass(frozen=True, slots=True)
class Case:
    """One way to split a job. `chunks` is the number of pipeline stages on a rank."""

    degrees: ParallelDegrees
    chunks: int = 1

    @classmethod
    def parse(cls, name: str) -> Case:
        """The case of a `name`."""
        label, _, chunks = name.partition(" (")
        return cls(ParallelDegrees.parse(label), int(chunks.partition(" ")[0] or 1))

    @property
    def name(self) -> str:
        return self.degrees.label + (f" ({self.chunks} chunks a rank)" if self.chunks > 1 else "")

    @property
    def ranks(self) -> int:
        return self.degrees.world_size


def _case(text: str, chunks: int = 1) -> Case:
    return Case(ParallelDegrees.parse(text), chunks)


CASES: tuple[Case, ...] = (
    _case("1"),
    _case("fsdp2"),
    _case("fsdp4"),  # more shards than KV heads
    _case("fsdp8"),  # rows that do not divide, and ranks with nothing
    _case("hsdp2x2"),
    _case("tp2"),
    _case("tp4"),
    _case("fsdp2 x tp2"),  # strided shards
    _case("fsdp2 x tp2 x pp2"),
    _case("pp2"),
    _case("pp2", chunks=2),
    _case("fsdp2 x cp2"),
    _case("fsdp2 x ep2"),
    _case("fsdp4 x ep4"),
    _case("fsdp4 x ep2"),  # experts further sharded by FSDP on dimension 0
    _case("fsdp8 x ep2"),  # on dimension 1 where they are fewer than the ranks
    _case("fsdp2 x tp2 x ep2 x etp2"),
    _case("hsdp2x2 x ep2"),
)
