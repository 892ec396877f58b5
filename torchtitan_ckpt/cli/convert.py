"""`convert`: from DCP, Hugging Face safetensors or .pt to any of them, streamed and verified.

    torchtitan-ckpt convert outputs/x/checkpoint/step-1000 exported/ --config assets/Qwen3-0.6B \\
        --export-dtype bfloat16
"""

from __future__ import annotations

import json as json_module
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from torchtitan_ckpt.convert import Result


@dataclass(frozen=True, kw_only=True)
class Args:
    """Options of `torchtitan-ckpt convert`."""

    src: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A step folder (or its fsspec URL), a folder or file of safetensors, or a .pt file."""
    dst: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """Where the result goes; it must not exist yet."""
    to: Literal["dcp", "hf", "pt"] | None = None
    """The format to write. By default .pt for a name that ends so, else Hugging Face from a DCP
    and DCP from the others."""
    family: str | None = None
    """The model family; by default the one of the config's model_type."""
    adapter: str | None = None
    """A hand-written adapter instead, pkg.mod:factory; it is run in parts where that is right."""
    config: str | None = None
    """The model's config.json, its folder, or a published name. By default the one in or beside
    SRC. Config, tokenizer and generation files of its folder are copied along to Hugging Face."""
    export_dtype: str | None = None
    """float32, bfloat16, float16 or float64 for floating tensors, but for those that the family
    keeps; by default every tensor keeps the dtype it has."""
    dequantize: bool = False
    """Unpack quantized weights of SRC."""
    quantize: Literal["fp8", "fp4", "mxfp4", "family"] | None = None
    """Write quantized weights; family stores what the published files store, in their schemes."""
    save_expert_format: Literal["standard", "gmm"] | None = None
    """Native experts as w1 and w3 (standard) or fused as w13 (gmm, generation npu)."""
    generation: Literal["titan", "npu"] | None = None
    """Native names of torchtitan 0.3.0 (titan) or of torchtitan-npu (npu); by default as found in
    SRC, and titan where SRC has none."""
    to_generation: Literal["titan", "npu"] | None = None
    """Native names to write, where they are to change."""
    no_mtp: bool = False
    """The model is built without its MTP layers."""
    repair_w13_degree: int = 1
    """The number of shards in which old torchtitan-npu code fused w13 one by one; nothing in a
    file tells it."""
    max_shard_size: str = "5GB"
    """Largest Hugging Face file."""
    only: Literal["model"] | None = None
    """Convert this part of a step."""
    exclude: str = ""
    """States of a step to leave out, comma-separated: optimizer,dataloader."""
    average: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH [PATH ...]")] = ()
    """Further checkpoints; the result is the mean of SRC and these, the model only."""
    weights: Annotated[tuple[float, ...], tyro.conf.arg(metavar="W [W ...]")] = ()
    """The weight of SRC and of each of --average; by default equal ones that add up to 1."""
    flat: bool = False
    """Keep a DCP's keys flat in a .pt; by default they are nested as dcp_to_torch nests them."""
    dry_run: bool = False
    """Say what would be done, and write nothing."""
    no_verify: bool = False
    """Skip the comparison of what was written with the source."""
    no_sync: bool = False
    """Do not wait until the bytes are on the disk."""
    threads: int | None = None
    """Threads that read and convert; by default the number of CPUs, at most 4."""
    window: str = "256MiB"
    """Bytes in flight, whatever the model's size."""
    trust: bool = False
    """Unpickle whatever SRC holds. Only for files whose writer you trust with your machine."""
    json: bool = False
    """Print JSON."""


def run(args: Args) -> int:
    """0 when the result is in place."""
    from torchtitan_ckpt.convert import convert
    from torchtitan_ckpt.convert.options import Options, parse_bytes
    from torchtitan_ckpt.progress import bar

    values: dict[str, Any] = {f.name: getattr(args, f.name) for f in fields(Options)}
    values["dst"] = args.dst.removeprefix("file://")
    values["window"] = parse_bytes(args.window)
    values["exclude"] = tuple(name for name in args.exclude.split(",") if name)
    with _ranks() as main, bar(wanted=main and not args.dry_run) as shown:
        start = time.monotonic()
        told = None if shown is None else shown.told
        result = convert(Options(**values), dry_run=args.dry_run, progress=told)
        seconds = time.monotonic() - start
    if main:
        if args.json:
            print(json_module.dumps({**result.to_dict(), "seconds": round(seconds, 3)}, indent=1))
        else:
            print(text(result, seconds))
    return 0


def text(result: Result, seconds: float) -> str:
    """The result for people."""
    names = {"dcp": "DCP", "hf": "Hugging Face", "pt": ".pt"}
    rows = [
        f"{result.src}  ({names[result.source_format]}, {_size(result.bytes_in)})",
        f"{result.dst}  ({names[result.target_format]}, {_size(result.bytes_out)})",
        f"  names    {result.route}",
        f"  tensors  {result.tensors}"
        + (f", and {result.objects} objects" if result.objects else ""),
    ]
    if result.files:
        shown = ", ".join(result.files[:4]) + (" …" if len(result.files) > 4 else "")
        rows.append(f"  files    {len(result.files)}: {shown}")
    if result.assets:
        rows.append(f"  beside   {', '.join(result.assets)}")
    rows += [f"  left out {what}" for what in result.left_out]
    rows += [f"  note     {note}" for note in result.notes]
    if result.dry_run:
        rows.append(
            f"dry run: nothing was written; {_size(result.free_bytes)} are free, a window of "
            f"{_size(result.window)} on {result.threads} threads"
        )
        return "\n".join(rows)
    again = ", after an interrupted run" if result.resumed else ""
    rate = _size(int((result.bytes_in + result.bytes_out) / max(seconds, 1e-9)))
    checked = "compared with the source" if result.verified else "not compared with the source"
    rows.append(f"done{again} in {seconds:.1f} s ({rate}/s read and written); {checked}")
    return "\n".join(rows)


def _size(count: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"


@contextmanager
def _ranks() -> Iterator[bool]:
    """A process group under torchrun; yields whether this process is the one that talks."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield True
        return
    from torchtitan_ckpt.collective import own_group

    with own_group("gloo") as rank:
        yield rank == 0
