"""Convert checkpoints between DCP, Hugging Face and `.pt`: streamed, resumable, all or nothing.

`convert(options)` decides (`plan`), writes beside the target (`sink`), compares what
was written with the source, and only then gives the result its name. Under an initialised process
group every rank calls it: files of Hugging Face and data files of DCP are shared out, rank 0 writes
the index or the metadata last; a `.pt` is rank 0's work alone.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from torchtitan_ckpt.assets import assets_of, config_changes, copy_assets
from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.convert import run
from torchtitan_ckpt.convert import sink as sinks
from torchtitan_ckpt.convert.account import flat_objects, room
from torchtitan_ckpt.convert.behind import Behind
from torchtitan_ckpt.convert.options import Options
from torchtitan_ckpt.convert.plan import Conversion, decide
from torchtitan_ckpt.convert.source import Source, open_source
from torchtitan_ckpt.convert.units import Quantizing, Unit, nbytes
from torchtitan_ckpt.convert.workspace import Workspace
from torchtitan_ckpt.errors import CheckpointError, ConfigError, Problem, SaveError
from torchtitan_ckpt.formats.dcp_stream import DcpStreamWriter, planner_paths, write_metadata
from torchtitan_ckpt.formats.dcp_stream_read import DcpReader

# Told what is being done and how many bytes of how many are: `converting`, `comparing`.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a conversion did, or with `dry_run` would do. Bytes are those of tensors."""

    src: str
    dst: str
    source_format: str
    target_format: str
    route: str
    tensors: int
    objects: int
    bytes_in: int
    bytes_out: int
    files: tuple[str, ...]
    assets: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    window: int
    threads: int
    free_bytes: int
    dry_run: bool
    resumed: bool = False
    verified: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def convert(options: Options, *, dry_run: bool = False, progress: Progress | None = None) -> Result:
    """Convert; the target exists completely afterwards, or not at all.

    Raises ConfigError, InputError, MappingError, MismatchError or SaveError, on every rank.
    """
    ranks = Ranks.current()
    with ranks.together("deciding on the conversion"):
        conversion = decide(options)
    try:
        return _Job(conversion, ranks, progress).run(dry_run)
    finally:
        conversion.close()


class _Job:
    def __init__(self, conversion: Conversion, ranks: Ranks, progress: Progress | None) -> None:
        self.conversion, self.options, self.ranks = conversion, conversion.options, ranks
        self.progress = progress
        self.threads = run.threads_of(self.options.threads)
        target_format = conversion.target_format
        self.piece = run.piece_bytes(self.options.window, self.threads, target_format)
        target = Path(self.options.dst.removeprefix("file://"))
        self.place = Workspace(target, self._word())
        self.sync = not self.options.no_sync
        self.files: tuple[str, ...] = ()
        self.behind = None if self.options.no_verify else Behind()
        entries, objects = conversion.entries, len(conversion.objects)
        self.room = room(target_format, entries, objects, self.piece)
        if target_format == "hf":
            size = self.options.max_shard_size
            self.layout, self.by_file = sinks.layout_of(conversion.units, size)
            self.files = tuple(self.layout.files)

    def run(self, dry_run: bool) -> Result:
        with self.ranks.together("looking at the target"):
            self._refuse_inside()
            self.place.refuse_taken()
            if self.ranks.rank == 0 and not dry_run:
                self.place.refuse_full(self.room)
        if dry_run:
            return self._result(dry_run=True)
        main = self.ranks.rank == 0
        with self.place.locked() if main else nullcontext():
            resumed = False
            with self.ranks.together("preparing a place to write"):
                if main:
                    resumed = self.place.open()
            with self.ranks.together("comparing tied tensors"):
                if main:
                    run.compare_ties(self.conversion.ties, self.conversion.source, self.piece)
            write = {"hf": self._hf, "dcp": self._dcp, "pt": self._pt}
            single = write[self.conversion.target_format]()
            if self.behind is not None:
                try:
                    self._verify(single, self.behind)
                except CheckpointError:
                    if main:
                        self.place.remove()  # nothing of it can be trusted to go on from
                    raise
            assets: list[str] = []
            with self.ranks.together("putting the result in place"):
                if main:
                    assets = self._assets()
                    if single:
                        self.files = (self.place.target.name,)
                    elif not self.files:
                        listed = self.place.out.iterdir()
                        self.files = tuple(sorted(p.name for p in listed if p.is_file()))
                    self.place.publish(single, sync_files=self.sync)
        return self._result(assets=tuple(assets), resumed=resumed)

    # Writing

    def _hf(self) -> None:
        mine = self._share(
            [(name, sum(map(nbytes, units))) for name, units in self.by_file.items()]
        )
        count = self._counter("converting", [u for name in mine for u in self.by_file[name]])
        with self.ranks.together("writing their files"):
            for name in mine:
                places = self.place.files, self.place.out
                sink = sinks.HfFileSink(*places, self.layout, name, sync=self.sync)
                if sink.complete:
                    count(sum(map(nbytes, self.by_file[name])))
                    continue
                with sink:
                    run.write(
                        self.by_file[name], sink, self.piece, self.threads, count, self.behind
                    )
        with self.ranks.together("writing the index"):
            if self.ranks.rank == 0:
                sinks.gather(self.place.files, self.place.out, self.layout, sync_files=self.sync)

    def _dcp(self) -> None:
        conversion, ranks = self.conversion, self.ranks
        units = self._my_units()
        count = self._counter("converting", units)
        with (
            ranks.together("writing their files"),
            DcpStreamWriter(
                self.place.out,
                rank=ranks.rank,
                journal=self.place.journal,
                word=self.place.word,
                sync_files=self.sync,
            ) as writer,
        ):
            sink = sinks.DcpSink(self.place.out, writer)
            run.write(units, sink, self.piece, self.threads, count, self.behind)
            if ranks.rank == 0:
                self._dcp_objects(sink)
            items = sink.finish()
        everyone = ranks.gather(items)
        with ranks.together("writing the metadata"):
            if ranks.rank == 0:
                write_metadata(
                    self.place.out,
                    conversion.entries,
                    [item for group in everyone for item in group],
                    sync_files=self.sync,
                )

    def _dcp_objects(self, sink: sinks.DcpSink) -> None:
        source, keys = self.conversion.source, self.conversion.objects
        if self.conversion.source_format == "dcp":
            reader = DcpReader(self.options.src, manifest=source.manifest, trust=self.options.trust)
            with reader:
                reader.objects(keys)  # refuses what must not be passed on
                for key in keys:
                    sink.write_object(key, reader.object_bytes(key))
            return
        for key, value in flat_objects(source.objects(keys)).items():
            stream = io.BytesIO()
            torch.save(value, stream)
            sink.write_object(key, stream.getvalue())

    def _pt(self) -> str:
        name = "checkpoint.pt"
        path = self.place.out / name
        conversion = self.conversion
        with self.ranks.together("writing the file"):
            if self.ranks.rank == 0 and not path.exists():
                count = self._counter("converting", conversion.units)
                journal = self.place.journal / name
                with sinks.torch_sink(
                    path, conversion.units, sync=self.sync, journal=journal
                ) as sink:
                    run.write(conversion.units, sink, self.piece, self.threads, count, self.behind)
                    paths = None
                    if conversion.source_format == "dcp" and not self.options.flat:
                        paths = planner_paths(self.options.src, trust=self.options.trust)
                    sink.finish(conversion.source.objects(conversion.objects), paths)
        return name

    # Verifying

    def _verify(self, single: str | None, behind: Behind) -> None:
        conversion = self.conversion
        if conversion.target_format == "pt":
            units = list(conversion.units) if self.ranks.rank == 0 else []
        elif conversion.target_format == "hf":
            units = [u for name in self._share_names() for u in self.by_file[name]]
        else:
            units = self._my_units()
        count = self._counter("comparing", units)
        with self.ranks.together("comparing what they wrote"):
            path = self.place.out / single if single else self.place.out
            target: Source = open_source(path, raw=True)
            try:
                if self.ranks.rank == 0:
                    self._verify_manifest(target)
                run.compare(units, target, self.piece, self.threads, count, behind)
            finally:
                target.close()

    def _verify_manifest(self, target: Source) -> None:
        run.compare_manifest(self.conversion.entries, target)
        wanted = self.conversion.source.objects(self.conversion.objects)
        if self.conversion.target_format == "dcp" and self.conversion.source_format != "dcp":
            wanted = flat_objects(wanted)
        if self.conversion.target_format == "dcp":
            lost = sorted(set(wanted) - set(target.manifest.objects))
            if lost:
                raise SaveError(
                    Problem(code="convert.verify", what="objects were lost", where=lost[0])
                )

    # Ranks

    def _share(self, sizes: list[tuple[str, int]]) -> list[str]:
        """This rank's names: the largest first, each to the rank with the least so far."""
        load = [0] * self.ranks.size
        mine = []
        for name, size in sorted(sizes, key=lambda pair: -pair[1]):
            rank = load.index(min(load))
            load[rank] += size
            if rank == self.ranks.rank:
                mine.append(name)
        return sorted(mine)

    def _share_names(self) -> list[str]:
        return self._share([(n, sum(map(nbytes, units))) for n, units in self.by_file.items()])

    def _my_units(self) -> list[Unit]:
        """A stretch of the units with about an equal part of the bytes."""
        total, done, mine = self.conversion.bytes_out, 0, []
        for unit in self.conversion.units:
            rank = min(done * self.ranks.size // max(total, 1), self.ranks.size - 1)
            if rank == self.ranks.rank:
                mine.append(unit)
            done += nbytes(unit)
        return mine

    # The rest

    def _refuse_inside(self) -> None:
        source = Path(self.options.src.removeprefix("file://"))
        if "://" in self.options.src or not source.is_dir():
            return
        target = self.place.target.absolute()
        if source.absolute() in (target, *target.parents):
            raise ConfigError(
                Problem(
                    code="convert.inside",
                    what="the target lies inside the source",
                    where=str(target),
                    fix="name a target elsewhere",
                )
            )

    def _assets(self) -> list[str]:
        conversion = self.conversion
        folder = conversion.config_folder
        if folder is None or conversion.target_format != "hf":
            return []
        return copy_assets(folder, self.place.out, self._config_changes())

    def _config_changes(self) -> dict[str, Any]:
        quantized = ""
        scale = ""
        for unit in self.conversion.units:
            if isinstance(unit, Quantizing):
                quantized = "mxfp4" if unit.layout.grouped else "fp8"
                scale = "ue8m0" if "e8m0" in unit.layout.scale_dtype else ""
        return config_changes(
            dtype=self.options.export_dtype,
            quantized=quantized,
            dequantized=self.conversion.dequantized,
            scale=scale,
        )

    def _counter(self, what: str, units: Any) -> Callable[[int], None]:
        total = sum(map(nbytes, units))
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            if self.progress is not None:
                self.progress(what, done, total)

        return count

    def _word(self) -> str:
        """Stands for the source as it lies there, the options and the cut into pieces."""
        manifest = self.conversion.source.manifest
        digest = xxhash.xxh3_128()
        for path in (self.options.src, *self.options.average):
            digest.update(repr(_stat(path)).encode())
        for entry in manifest.tensors.values():
            digest.update(repr(entry).encode())
        free = ("no_verify", "no_sync", "trust", "dst")
        chosen = {k: v for k, v in asdict(self.options).items() if k not in free}
        digest.update(repr((sorted(chosen.items()), self.threads, self.ranks.size)).encode())
        for entry in self.conversion.entries:
            digest.update(repr(entry).encode())
        return digest.hexdigest()

    def _result(
        self, *, assets: tuple[str, ...] = (), resumed: bool = False, dry_run: bool = False
    ) -> Result:
        conversion = self.conversion
        folder = conversion.config_folder
        if dry_run and folder is not None:
            assets = tuple(path.name for path in assets_of(folder))
        return Result(
            src=self.options.src,
            dst=self.options.dst,
            source_format=conversion.source_format,
            target_format=conversion.target_format,
            route=conversion.route,
            tensors=len(conversion.entries),
            objects=len(conversion.objects),
            bytes_in=conversion.bytes_in,
            bytes_out=conversion.bytes_out,
            files=self.files,
            assets=assets,
            left_out=conversion.left_out,
            notes=conversion.notes,
            window=self.options.window,
            threads=self.threads,
            free_bytes=self.place.free_bytes(),
            dry_run=dry_run,
            resumed=resumed,
            verified=not dry_run and not self.options.no_verify,
        )


def _stat(path: str) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a source's files, so that a changed source begins anew."""
    root = Path(path.removeprefix("file://"))
    if "://" in path or not root.exists():
        return []
    files = [root] if root.is_file() else sorted(p for p in root.iterdir() if p.is_file())
    stats = [(file.name, os.stat(file)) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


__all__ = ["CheckpointError", "Options", "Progress", "Result", "convert"]
