"""The options of a checkpoint manager: fields, defaults, and every rule between them.

`CheckpointConfig` is reached as `CheckpointManager.Config`. Field names, meanings and defaults are
those of torchtitan's `CheckpointManager.Config` and of torchtitan-npu's checkpoint guide; the last
group is this project's own. Rules are checked by `validate`, which the manager and `explain` call
before anything is read, so that a registry's defaults may be contradictory until they are
overridden. This module looks at no disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from torchtitan_ckpt.errors import ConfigError, Problem, nearest

MODEL = "model"
OPTIMIZER = "optimizer"
LR_SCHEDULER = "lr_scheduler"
DATALOADER = "dataloader"
TRAIN_STATE = "train_state"
TRAINING_STATES = (OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE)

EXPORT_DTYPES = ("float32", "bfloat16", "float16")
ASYNC_MODES = ("disabled", "async", "async_with_pinned_mem")
EXPERT_FORMATS = ("standard", "gmm")
HF_OWNERSHIPS = ("tensor", "bytes")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Options of `CheckpointManager`."""

    enable: bool = False
    """Load and save only if this is on; with it off every other option does nothing."""

    folder: str = "checkpoint"
    """Subfolder of the job's `dump_folder` that holds `step-N`."""

    interval: int = 500
    """Save a full DCP checkpoint every so many steps."""

    load_step: int = -1
    """The step to load; -1 is the newest full one."""

    initial_load_path: str | None = None
    """Where to start from when the output folder holds no checkpoint: a step folder of another
    job, or Hugging Face weights. Relative paths are resolved against the working directory."""

    initial_load_model_only: bool = True
    """From `initial_load_path` load the model only, not the training state."""

    initial_load_in_hf: bool = False
    """`initial_load_path` (or the top-level `hf_assets_path`) holds Hugging Face safetensors."""

    initial_load_in_hf_quantized: bool = False
    """Those weights are quantized; needs `initial_load_in_hf`."""

    last_save_model_only: bool = True
    """The last step saves the model only, in `export_dtype`: it cannot be resumed."""

    last_save_in_hf: bool = False
    """The last step saves Hugging Face safetensors; needs `last_save_model_only`."""

    export_dtype: str = "float32"
    """Dtype of the last, model-only save: float32, bfloat16 or float16. Integer and bool tensors
    and what the model pins to float32 keep their dtype."""

    load_only: bool = False
    """Load, never save."""

    keep_latest_k: int = 10
    """Keep the newest k complete checkpoints; 0 keeps all. The seed is never removed."""

    exclude_from_loading: list[str] = field(default_factory=list)
    """States left out of a DCP load: optimizer, lr_scheduler, dataloader, train_state, or any
    further state that the job registered. One comma-separated value on the command line."""

    async_mode: str = "disabled"
    """disabled, async (stage, then write in the background), or async_with_pinned_mem."""

    create_seed_checkpoint: bool = False
    """Initialise on one CPU process, save `step-0`, stop."""

    enable_first_step_checkpoint: bool = False
    """Also save at step 1, to learn early whether the path works."""

    enable_ft_dataloader_checkpoints: bool = True
    """With TorchFT: each replica saves its own dataloader state, apart from the full checkpoint."""

    sync_files: bool = True
    """fsync what was written before a checkpoint becomes visible."""

    drop_page_cache_after_save: bool = False
    """Drop the written files from the page cache after a save."""

    empty_cache_after_save: bool = True
    """Empty the device allocator's cache after a save."""

    save_expert_format: str = "standard"
    """How the experts of a model-only save are stored: standard (w1 and w3 apart) or gmm (fused
    along the rows as w13, for torchtitan-npu's grouped matmul)."""

    checksums: bool = False
    """Write xxh3-128 checksums beside a DCP checkpoint; `verify` uses them."""

    allow_narrowing: bool = False
    """An initial, model-only load may lower a float's precision (float32 file, bfloat16 model)."""

    excuse_mismatch: list[str] = field(default_factory=list)
    """Keys, with * and ?, that a load may find on one side only; each is printed."""

    keep_hyperparameters: list[str] = field(default_factory=list)
    """Hyperparameters of the optimizer that a load leaves as this run has them (weight_decay,
    betas, ...); by default what was saved wins. With amsgrad, its second maximum is dropped or
    starts from zero. A scheduler that is loaded too goes on setting lr."""

    hf_ownership: Literal["tensor", "bytes"] = "tensor"
    """How ranks share the work of an HF save: tensor (whole files, safe on NFS and object mounts)
    or bytes (several ranks write ranges of one file; POSIX file systems only)."""


def is_remote(path: str) -> bool:
    """Whether a path is a URI that fsspec serves (`memory://x`, `s3://bucket/x`)."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def validate(
    config: CheckpointConfig,
    *,
    states: Sequence[str] = TRAINING_STATES,
    dump_folder: str = "",
    hf_assets_path: str | None = None,
    ranks: int = 1,
    adapter: bool = True,
    others: Sequence[Problem] = (),
) -> None:
    """Raise one ConfigError with everything that is wrong with `config`, or return.

    `states` are the names of the non-model states that the job registered, `ranks` how many
    processes it has, `adapter` whether it has a state-dict adapter, `others` what the caller has
    found wrong besides.
    """
    if not config.enable:
        return
    problems = list(_types(config))
    if problems:  # no other rule can be asked of such values
        raise ConfigError(*problems)
    problems = [
        *_values(config),
        *_exclusions(config, states),
        *_combinations(config),
        *_remote(config, dump_folder, hf_assets_path),
        *_surroundings(config, ranks, adapter),
        *others,
    ]
    if problems:
        raise ConfigError(*problems)


def ignored_options(config: CheckpointConfig) -> dict[str, str]:
    """Options that are set and do nothing, whatever the disk holds, with the reason."""
    if not config.enable:
        off = "checkpoint.enable is off, so nothing is loaded or saved"
        return {name: off for name in changed_fields(config) if name != "enable"}
    out = {}
    if config.load_only and config.enable_first_step_checkpoint:
        out["enable_first_step_checkpoint"] = "checkpoint.load_only is on, so nothing is saved"
    if not config.initial_load_model_only and not config.initial_load_path:
        out["initial_load_model_only"] = "there is no checkpoint.initial_load_path"
    if config.keep_hyperparameters and OPTIMIZER in config.exclude_from_loading:
        out["keep_hyperparameters"] = "the optimizer is not loaded, so it keeps all of its own"
    if not config.last_save_model_only and config.export_dtype != "float32":
        out["export_dtype"] = "a full last save keeps every tensor's own dtype"
    return out


def changed_fields(config: CheckpointConfig) -> list[str]:
    """Names of the options that differ from their defaults."""
    default = CheckpointConfig()
    names = (f.name for f in fields(CheckpointConfig))
    return [name for name in names if getattr(config, name) != getattr(default, name)]


def _problem(
    name: str, value: object, rule: str, fix: str, *, code: str = "value", cause: str = ""
) -> Problem:
    return Problem(
        code=f"config.{code}",
        what=f"checkpoint.{name} cannot be {value!r}.",
        expected=rule,
        actual=repr(value),
        cause=cause,
        fix=fix,
    )


_TYPES: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: hasattr(value, "__index__")),
    "str": ("text", lambda value: isinstance(value, str)),
    "str | None": ("text, or None", lambda value: value is None or isinstance(value, str)),
    "list[str]": (
        "a list of texts",
        lambda value: isinstance(value, list | tuple) and all(isinstance(v, str) for v in value),
    ),
}


def _types(config: CheckpointConfig) -> Iterator[Problem]:
    """What a command line cannot get wrong and Python code can."""
    for item in fields(CheckpointConfig):
        wanted, fits = _TYPES.get(str(item.type), ("", lambda _: True))
        value = getattr(config, item.name)
        if not fits(value):
            kind = type(value).__name__
            yield _problem(item.name, value, wanted, f"give {wanted}, not a {kind}", code="type")


def _values(config: CheckpointConfig) -> Iterator[Problem]:
    if not config.folder.strip():
        yield _problem("folder", config.folder, "a folder name", "--checkpoint.folder checkpoint")
    if config.interval < 1:
        yield _problem(
            "interval",
            config.interval,
            "a number of steps, 1 or more",
            "to save only at the end, set an interval above training.steps",
        )
    if config.load_step < -1:
        yield _problem(
            "load_step",
            config.load_step,
            "a step, or -1 for the newest",
            "--checkpoint.load_step -1",
        )
    if config.keep_latest_k < 0:
        yield _problem(
            "keep_latest_k",
            config.keep_latest_k,
            "0 (keep all), or 2 and more",
            "--checkpoint.keep_latest_k 0 keeps every checkpoint",
        )
    if config.keep_latest_k == 1:
        yield _problem(
            "keep_latest_k",
            1,
            "0 (keep all), or 2 and more",
            "--checkpoint.keep_latest_k 2",
            cause="while the next one is being written, the only other one must not be removed",
        )
    for name, known in (
        ("export_dtype", EXPORT_DTYPES),
        ("async_mode", ASYNC_MODES),
        ("save_expert_format", EXPERT_FORMATS),
        ("hf_ownership", HF_OWNERSHIPS),
    ):
        value = getattr(config, name)
        if value not in known:
            guess = nearest(str(value), known) or known[0]
            yield _problem(
                name, value, f"one of {', '.join(known)}", f"--checkpoint.{name} {guess}"
            )


def _exclusions(config: CheckpointConfig, states: Sequence[str]) -> Iterator[Problem]:
    known = sorted(states)
    excluded = config.exclude_from_loading
    for name in excluded:
        if name == MODEL:
            yield _problem(
                "exclude_from_loading",
                name,
                f"names among {', '.join(known)}",
                "leave 'model' out; to start from fresh weights use a new dump_folder",
                code="exclude-model",
            )
        elif _is_several(name):
            yield _several("exclude_from_loading", name, "exclude-list")
        elif name not in states:
            guess = nearest(name, known)
            yield _problem(
                "exclude_from_loading",
                name,
                f"names among {', '.join(known)}",
                f"did you mean {guess!r}?" if guess else "remove it",
                code="exclude-unknown",
            )
    for name in filter(_is_several, config.keep_hyperparameters):
        yield _several("keep_hyperparameters", name, "keep-list")
    if OPTIMIZER in excluded and LR_SCHEDULER not in excluded and LR_SCHEDULER in states:
        yield _problem(
            "exclude_from_loading",
            OPTIMIZER,
            "optimizer and lr_scheduler together",
            "--checkpoint.exclude_from_loading optimizer,lr_scheduler",
            code="exclude-coupled",
            cause="a scheduler restored onto a fresh optimizer drives it with rates of another run",
        )


def _is_several(name: str) -> bool:
    return "," in name or " " in name.strip()


def _several(option: str, name: str, code: str) -> Problem:
    parts = [part for part in re.split(r"[,\s]+", name) if part]
    return _problem(
        option,
        name,
        "a list with one name an entry",
        f"in Python {parts!r}; on the command line --checkpoint.{option} {','.join(parts)}",
        code=code,
    )


def _combinations(config: CheckpointConfig) -> Iterator[Problem]:
    if config.initial_load_in_hf and not config.initial_load_model_only:
        yield _problem(
            "initial_load_model_only",
            False,
            "True with checkpoint.initial_load_in_hf",
            "drop --checkpoint.no-initial_load_model_only, or load a DCP checkpoint",
            code="hf-training-state",
            cause="Hugging Face weights hold no optimizer, scheduler or step",
        )
    if config.initial_load_in_hf_quantized and not config.initial_load_in_hf:
        yield _problem(
            "initial_load_in_hf_quantized",
            True,
            "checkpoint.initial_load_in_hf as well",
            "add --checkpoint.initial_load_in_hf",
            code="quantized-without-hf",
        )
    if config.last_save_in_hf and not config.last_save_model_only:
        yield _problem(
            "last_save_in_hf",
            True,
            "checkpoint.last_save_model_only as well",
            "drop --checkpoint.no-last_save_model_only, or convert the full step afterwards with "
            "torchtitan-ckpt convert",
            code="hf-full-save",
            cause="Hugging Face files hold the model only",
        )
    if config.load_only and config.create_seed_checkpoint:
        yield _problem(
            "create_seed_checkpoint",
            True,
            "checkpoint.load_only off",
            "add --checkpoint.no-load_only",
            code="seed-load-only",
            cause="a seed is made by saving, and load_only forbids that",
        )


def _remote(
    config: CheckpointConfig, dump_folder: str, hf_assets_path: str | None
) -> Iterator[Problem]:
    download = "copy the files to a local folder; DCP checkpoints may be remote"
    output = config.folder if is_remote(config.folder) else dump_folder
    if config.last_save_in_hf and is_remote(output):
        yield _problem("last_save_in_hf", True, "a local output folder", download, code="hf-remote")
    source = config.initial_load_path or hf_assets_path
    if config.initial_load_in_hf and source and is_remote(source):
        yield _problem(
            "initial_load_path", source, "a local folder for HF weights", download, code="hf-remote"
        )


def _surroundings(config: CheckpointConfig, ranks: int, adapter: bool) -> Iterator[Problem]:
    if config.create_seed_checkpoint and ranks > 1:
        yield Problem(
            code="config.seed-ranks",
            what="A seed checkpoint is made by one process.",
            expected="1 rank, every parallel degree 1",
            actual=f"{ranks} ranks",
            fix="NGPU=1, without other parallelism options",
        )
    wants = [n for n in ("initial_load_in_hf", "last_save_in_hf") if getattr(config, n)]
    if wants and not adapter:
        yield Problem(
            code="config.no-adapter",
            what=f"checkpoint.{' and checkpoint.'.join(wants)} need a state-dict adapter.",
            expected="an adapter that knows the Hugging Face names",
            actual="the job has none",
            fix="pass sd_adapter, for example torchtitan_ckpt.adapter.MappingAdapter",
        )
