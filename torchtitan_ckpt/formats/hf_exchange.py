"""Moving parts of tensors to the ranks that write them, in steps that all ranks take together.

In one step every rank sends at most one message to another and receives at most one from it: the
parts, as dense bytes, one after the other. A rank that fails keeps the step's appointments - what
it sends is then worthless - and says so at the end of it, so that all ranks stop together.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.device_failures import lost_rank
from torchtitan_ckpt.formats.hf_boxes import Box, Ints, local_boxes, local_tensor, split_box
from torchtitan_ckpt.formats.hf_file import FileWriter, dense_bytes
from torchtitan_ckpt.formats.hf_plan import Segment


class Source:
    """Parts of this rank's own tensors, on the CPU."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def part(self, key: str, offsets: Ints, sizes: Ints) -> torch.Tensor:
        """A dense CPU tensor of a box that this rank holds; shares memory where it can."""
        value = self._tensors[key]
        local = local_tensor(value)
        for box in local_boxes(value):
            if _within(box, offsets, sizes):
                rows = zip(offsets, box.offsets, box.local, sizes, strict=True)
                view = local[tuple(slice(o - b + at, o - b + at + n) for o, b, at, n in rows)]
                return view.detach().cpu().contiguous()
        raise RuntimeError(f"this rank does not hold {key!r} at {offsets} of {sizes}")

    def parts(
        self, key: str, offsets: Ints, sizes: Ints, window: int
    ) -> Iterator[tuple[Ints, Ints, torch.Tensor]]:
        """The same in parts whose bytes fit into a window."""
        width = self._tensors[key].element_size()
        align = (1,) * len(sizes)
        for at, size in split_box(sizes, offsets, sizes, max(window // width, 1), align):
            yield at, size, self.part(key, at, size)


class Exchange:
    """The steps of one save. `file_of` gives the file of a tensor that this rank owns."""

    def __init__(self, ranks: Ranks, sources: Source, file_of: Callable[[str], FileWriter]) -> None:
        self._ranks, self._sources, self._file_of = ranks, sources, file_of
        self._error: Exception | None = None

    def step(self, todo: Sequence[Segment]) -> bool:
        """Send, receive and write the segments of one step; True when some rank has failed."""
        me = self._ranks.rank
        incoming: dict[int, int] = {}
        outgoing: dict[int, list[tuple[str, Ints, Ints]]] = {}
        lengths: dict[int, int] = {}
        for segment in todo:
            width = segment.nbytes // math.prod(segment.sizes)
            for giver, offsets, sizes in segment.pieces:
                if giver == segment.owner:
                    continue
                nbytes = math.prod(sizes) * width
                if segment.owner == me:
                    incoming[giver] = incoming.get(giver, 0) + nbytes
                elif giver == me:
                    outgoing.setdefault(segment.owner, []).append((segment.key, offsets, sizes))
                    lengths[segment.owner] = lengths.get(segment.owner, 0) + nbytes
        received = {r: torch.empty(n, dtype=torch.uint8) for r, n in incoming.items()}
        sent = {r: torch.empty(n, dtype=torch.uint8) for r, n in lengths.items()}
        if self._error is None:
            try:
                for rank, rows in outgoing.items():
                    self._pack(rows, sent[rank])
            except Exception as error:
                self._error = error
        self._move(sent, received)
        if self._error is None:
            try:
                self._write([s for s in todo if s.owner == me], received)
            except Exception as error:
                self._error = error
        return self._any_failed()

    def finish(self) -> None:
        """Raise on every rank what any of them met."""
        with self._ranks.together("writing their files"):
            if self._error is not None:
                raise self._error

    def _pack(self, rows: Sequence[tuple[str, Ints, Ints]], buffer: torch.Tensor) -> None:
        at = 0
        for key, offsets, sizes in rows:
            part = self._sources.part(key, offsets, sizes)
            count = part.numel() * part.element_size()
            ctypes.memmove(buffer.data_ptr() + at, part.data_ptr(), count)
            at += count

    def _move(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        group = self._ranks.group
        if group is None:
            return
        try:
            waiting = [
                dist.irecv(buffer, group=group, group_src=rank) for rank, buffer in received.items()
            ]
            waiting += [
                dist.isend(buffer, group=group, group_dst=rank) for rank, buffer in sent.items()
            ]
            for work in waiting:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise lost_rank(error) from error

    def _any_failed(self) -> bool:
        if self._ranks.group is None:
            return self._error is not None
        flag = torch.tensor([int(self._error is not None)])
        try:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._ranks.group)
        except RuntimeError as error:
            raise lost_rank(error) from error
        return bool(flag.item())

    def _write(self, mine: Sequence[Segment], received: Mapping[int, torch.Tensor]) -> None:
        at = dict.fromkeys(received, 0)
        for segment in mine:
            file = self._file_of(segment.key)
            item = file.items[segment.key]
            width = segment.nbytes // math.prod(segment.sizes)
            parts = []
            for giver, offsets, sizes in segment.pieces:
                if giver == self._ranks.rank:
                    data = self._sources.part(segment.key, offsets, sizes)
                    parts.append((offsets, sizes, _as_bytes(data, sizes, width)))
                else:
                    count = math.prod(sizes) * width
                    data = received[giver][at[giver] : at[giver] + count]
                    parts.append((offsets, sizes, data.view(*sizes, width)))
                    at[giver] += count
            if len(parts) == 1:
                whole = parts[0][2]
            else:
                whole = torch.empty((*segment.sizes, width), dtype=torch.uint8)
                for offsets, sizes, data in parts:
                    rows = zip(offsets, segment.offsets, sizes, strict=True)
                    whole[tuple(slice(o - s, o - s + n) for o, s, n in rows)] = data
            file.write_box(item, segment.offsets, segment.sizes, dense_bytes(whole))


def _as_bytes(data: torch.Tensor, sizes: Ints, width: int) -> torch.Tensor:
    """The same memory with one more dimension: the bytes of each element."""
    if not sizes:
        return data.reshape(1).view(torch.uint8)
    return data.view(torch.uint8).view(*sizes, width)


def _within(box: Box, offsets: Ints, sizes: Ints) -> bool:
    return all(
        b <= o and o + n <= b + m
        for o, n, b, m in zip(offsets, sizes, box.offsets, box.sizes, strict=True)
    )
