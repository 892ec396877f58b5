"""What a conversion is asked for: options, and the contradictions among them. Reads nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from torchtitan_ckpt.errors import ConfigError, Problem

Format = Literal["dcp", "hf", "pt"]
Quantize = Literal["fp8", "fp4", "mxfp4", "family"]
EXPORT_DTYPES = ("float32", "bfloat16", "float16", "float64")
WINDOW = 256 * 2**20
_SMALLEST_WINDOW = 2**16
_UNITS = {"": 1, "K": 1, "M": 2, "G": 3}


@dataclass(frozen=True, kw_only=True)
class Options:
    """A conversion of `src` into `dst`; the command line explains each field."""

    src: str
    dst: str
    to: Format | None = None
    family: str | None = None
    adapter: str | None = None
    config: str | None = None
    export_dtype: str | None = None
    dequantize: bool = False
    quantize: Quantize | None = None
    save_expert_format: Literal["standard", "gmm"] | None = None
    generation: str | None = None
    to_generation: str | None = None
    no_mtp: bool = False
    repair_w13_degree: int = 1
    max_shard_size: str = "5GB"
    only: str | None = None
    exclude: tuple[str, ...] = ()
    average: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    flat: bool = False
    no_verify: bool = False
    no_sync: bool = False
    threads: int | None = None
    window: int = WINDOW
    trust: bool = False


def parse_bytes(text: str | int) -> int:
    """`268435456`, `256MB` (1000s) or `256MiB` (1024s) in bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)(i?)B?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise ConfigError(
            Problem(
                code="convert.size",
                what="a size is not understood",
                where="--window",
                expected="bytes, or a number with KB, MB, GB, KiB, MiB or GiB",
                actual=repr(text),
                fix="write for example --window 256MiB",
            )
        )
    unit = match[2].upper()
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * (base ** _UNITS[unit] if unit else 1))


def check(options: Options, source: str, target: Format) -> None:
    """Raise one ConfigError with every contradiction. `source` is the source's format."""
    faults: list[tuple[str, str, str, str]] = []

    def fault(code: str, what: str, where: str, fix: str) -> None:
        faults.append((code, what, where, fix))

    if options.export_dtype is not None and options.export_dtype not in EXPORT_DTYPES:
        fault(
            "convert.dtype",
            f"{options.export_dtype!r} is no dtype to convert to",
            "--export-dtype",
            f"use one of {', '.join(EXPORT_DTYPES)}; --quantize makes smaller ones",
        )
    if options.family and options.adapter:
        fault(
            "convert.two-tables", "both a family and an adapter", "--family, --adapter", "name one"
        )
    if options.dequantize and source != "hf":
        fault(
            "convert.dequantize", "only Hugging Face files are quantized here", "--dequantize",
            "leave it out",
        )  # fmt: skip
    if options.quantize and target != "hf":
        fault(
            "convert.quantize", "only Hugging Face files are written quantized", "--quantize",
            "leave it out, or convert --to hf",
        )  # fmt: skip
    if options.quantize and options.adapter:
        fault(
            "convert.quantize", "an adapter does not say which weights are quantized",
            "--quantize, --adapter", "name the family instead",
        )  # fmt: skip
    if target == "hf" and options.save_expert_format == "gmm":
        fault(
            "convert.expert-format", "Hugging Face files hold w1 and w3 apart, never w13",
            "--save-expert-format", "leave it out; the native side may be either",
        )  # fmt: skip
    if options.to_generation and target == "hf":
        fault(
            "convert.generation", "Hugging Face files have one set of names", "--to-generation",
            "leave it out, or convert --to dcp",
        )  # fmt: skip
    if options.exclude and source == "hf":
        fault(
            "convert.exclude", "Hugging Face files hold the model alone, and no other state",
            "--exclude", "leave it out",
        )  # fmt: skip
    if options.only not in (None, "model"):
        fault("convert.only", f"no part {options.only!r}", "--only", "the one part is: model")
    if options.weights and len(options.weights) != 1 + len(options.average):
        fault(
            "convert.weights",
            f"{len(options.weights)} weights for {1 + len(options.average)} checkpoints",
            "--weights", "give one for the source and one for each of --average, in this order",
        )  # fmt: skip
    if options.weights and not options.average:
        fault("convert.weights", "weights without --average", "--weights", "name the checkpoints")
    if options.repair_w13_degree < 1:
        fault("convert.degree", "no sharding degree", "--repair-w13-degree", "give 1 or more")
    if options.window < _SMALLEST_WINDOW:
        fault(
            "convert.window",
            f"{options.window} bytes are too few",
            "--window",
            "give 64 KiB or more",
        )
    if options.threads is not None and options.threads < 1:
        fault("convert.threads", "no thread", "--threads", "give 1 or more")
    if "://" in options.dst:
        fault(
            "convert.remote", "conversions are written to local folders only", options.dst,
            "write locally, then copy the result there",
        )  # fmt: skip
    if faults:
        raise ConfigError(
            *(Problem(code=c, what=what, where=where, fix=fix) for c, what, where, fix in faults)
        )


def target_format(options: Options, source: str) -> Format:
    """The format to write: as asked, by the name of DST, else the one that the source is not.

    A DCP stays one where an option concerns native names or states; only Hugging Face files are
    written quantized.
    """
    if options.to is not None:
        return options.to
    if options.dst.endswith((".pt", ".pth", ".bin")):
        return "pt"
    if options.quantize:
        return "hf"
    native = options.to_generation or options.exclude or options.average
    if source == "dcp":
        return "dcp" if native or options.save_expert_format else "hf"
    return "dcp"
