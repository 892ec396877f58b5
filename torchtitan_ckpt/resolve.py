"""Decide what a job loads: a pure function from options and folder listings to a `LoadDecision`.

The manager obeys the decision and `torchtitan-ckpt explain` prints it, so that what is said and
what is done cannot differ. Nothing here touches a disk; `survey` makes the listings.

Rules, in order:

1. With `enable` off nothing is loaded.
2. `load_step=N` wants exactly that step of the output folder.
3. `load_step=-1` takes the newest full step of the output folder. It passes over newer model-only,
   Hugging Face and broken steps and says so. A model-only step counts as full when every training
   state is excluded. The seed (`step-0`) is taken when there is nothing else.
4. An output folder that holds a valid checkpoint wins over every `initial_*` option.
5. Otherwise `initial_load_path`, or `hf_assets_path` with `initial_load_in_hf`.
6. Otherwise the job starts afresh.

torchtitan takes the newest step of any kind at 3 and then fails on what is missing; the difference
is intended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchtitan_ckpt.config import CheckpointConfig, ignored_options
from torchtitan_ckpt.decision import (
    KIND_WORDS,
    Ignored,
    LoadDecision,
    OutputView,
    SourceView,
    StepFolder,
    StepKind,
)
from torchtitan_ckpt.errors import CheckpointError, NotFoundError, Problem, RefusedError


def resolve(
    config: CheckpointConfig,
    output: OutputView,
    source: SourceView | None = None,
    *,
    states: Sequence[str],
    step: int | None = None,
) -> LoadDecision:
    """Decide what is loaded.

    `states` are the non-model states that the job registered, `step` overrides `load_step`.
    Raises NotFoundError for a step or path that does not exist and RefusedError for one that
    exists and cannot be used this way; both list the remedies.
    """
    ignored = [Ignored(f"checkpoint.{name}", why) for name, why in ignored_options(config).items()]
    if not config.enable:
        return LoadDecision(
            action="disabled",
            reason="checkpoint.enable is off: nothing is loaded and nothing is saved",
            ignored=tuple(ignored),
        )
    wanted = tuple(name for name in states if name not in config.exclude_from_loading)
    load_step = config.load_step if step is None else step
    if load_step != -1:
        return _named_step(config, output, load_step, wanted, ignored)
    chosen, passed = _newest(output, wanted)
    if chosen is not None:
        return _resume(config, chosen, passed, wanted, ignored)
    return _initial(config, source, passed, wanted, ignored)


def _newest(
    output: OutputView, wanted: Sequence[str]
) -> tuple[StepFolder | None, list[StepFolder]]:
    passed: list[StepFolder] = []
    seed = None
    for folder in sorted(output.steps, key=lambda f: f.step, reverse=True):
        if folder.kind is StepKind.FULL or (folder.kind is StepKind.MODEL_ONLY and not wanted):
            return folder, passed
        if folder.kind is StepKind.SEED:
            seed = folder
        elif folder.kind is not StepKind.UNREAD:
            passed.append(folder)
    unusable = [f for f in passed if f.kind is not StepKind.BROKEN]
    if unusable:
        newest = unusable[0]
        held = "; ".join(f"step-{f.step} holds {KIND_WORDS[f.kind]}" for f in unusable[:3])
        raise RefusedError(
            Problem(
                code="resolve.nothing-resumable",
                what="The output folder holds checkpoints, but none that a job can resume.",
                where=output.path,
                expected="a full step (DCP with optimizer, scheduler, dataloader and train_state)",
                actual=held,
                cause=f"{_why_unusable(newest.kind)}; interval saved no full step before it",
                fix=_remedies(newest),
            )
        )
    return seed, passed


def _why_unusable(kind: StepKind) -> str:
    """How a step that cannot be resumed came into the output folder."""
    if kind is StepKind.HF:
        return (
            "last_save_in_hf wrote it as a last step, or Hugging Face weights were put into the "
            "output folder"
        )
    return "a last save is model only unless --checkpoint.no-last_save_model_only is given"


def _remedies(folder: StepFolder) -> str:
    start = (
        f"start in a new dump_folder with --checkpoint.initial_load_path {folder.path}"
        f"{' --checkpoint.initial_load_in_hf' if folder.kind is StepKind.HF else ''}"
    )
    name = (
        ""
        if folder.kind is StepKind.HF
        else f"; or name it and leave the training state out: --checkpoint.load_step {folder.step} "
        "--checkpoint.exclude_from_loading optimizer,lr_scheduler,dataloader,train_state"
    )
    return f"{start}{name}; and next time keep the last save full: " + (
        "--checkpoint.no-last_save_model_only"
    )


def _named_step(
    config: CheckpointConfig,
    output: OutputView,
    step: int,
    wanted: Sequence[str],
    ignored: list[Ignored],
) -> LoadDecision:
    by_step = {folder.step: folder for folder in output.steps}
    folder = by_step.get(step)
    if folder is None:
        there = ", ".join(f"step-{n}" for n in sorted(by_step)[-6:]) or "no step at all"
        raise NotFoundError(
            Problem(
                code="resolve.step-missing",
                what=f"checkpoint.load_step is {step}, and the output folder has no such step.",
                where=output.path,
                expected=f"step-{step}",
                actual=there if output.exists else "the folder does not exist",
                cause="another dump_folder or checkpoint.folder, or the step was purged "
                "(keep_latest_k)",
                fix="name a step that exists, or drop --checkpoint.load_step to take the newest",
            )
        )
    if folder.kind is StepKind.BROKEN:
        raise RefusedError(
            Problem(
                code="resolve.step-broken",
                what=f"step-{step} is not a complete checkpoint.",
                where=folder.path,
                actual=folder.why,
                cause="the save or a copy was interrupted, or the step is half deleted",
                fix="name another step, or drop --checkpoint.load_step to take the newest full one",
            )
        )
    usable = (
        folder.kind is StepKind.FULL
        or folder.kind is StepKind.SEED
        or (folder.kind is StepKind.MODEL_ONLY and not wanted)
    )
    if not usable:
        raise RefusedError(
            Problem(
                code="resolve.step-kind",
                what=f"step-{step} cannot be resumed: it holds {KIND_WORDS[folder.kind]}.",
                where=folder.path,
                expected="a full step, since these states are wanted: " + ", ".join(wanted),
                actual=KIND_WORDS[folder.kind],
                cause=_why_unusable(folder.kind),
                fix=_remedies(folder),
            )
        )
    return _resume(config, folder, [], wanted, ignored, named=True)


def _resume(
    config: CheckpointConfig,
    folder: StepFolder,
    passed: Iterable[StepFolder],
    wanted: Sequence[str],
    ignored: list[Ignored],
    *,
    named: bool = False,
) -> LoadDecision:
    passed = tuple(f for f in passed if f.step > folder.step)
    why = f"the output folder already holds step-{folder.step}, which wins over initial_* options"
    for name in (
        "initial_load_path",
        "initial_load_in_hf",
        "initial_load_in_hf_quantized",
        "initial_load_model_only",
        "allow_narrowing",
    ):
        if getattr(config, name) != getattr(CheckpointConfig(), name):
            ignored = [i for i in ignored if i.option != f"checkpoint.{name}"]
            ignored.append(Ignored(f"checkpoint.{name}", why))
    seed = folder.kind is StepKind.SEED
    if seed and config.exclude_from_loading:
        ignored.append(Ignored("checkpoint.exclude_from_loading", "a seed holds the model only"))
    how = "is named by checkpoint.load_step" if named else "is the newest"
    notices = [
        f"step-{f.step} is newer and is passed over: it holds {KIND_WORDS[f.kind]}"
        + (f" ({f.why})" if f.why else "")
        for f in passed
    ]
    return LoadDecision(
        action="resume",
        reason=f"step-{folder.step} {how} and holds {KIND_WORDS[folder.kind]}",
        path=folder.path,
        format="dcp",
        step=folder.step,
        states=("model",) if seed else ("model", *wanted),
        ignored=tuple(ignored),
        passed_over=passed,
        notices=tuple(notices),
    )


def _initial(
    config: CheckpointConfig,
    source: SourceView | None,
    passed: Sequence[StepFolder],
    wanted: Sequence[str],
    ignored: list[Ignored],
) -> LoadDecision:
    notices = tuple(
        f"step-{f.step} of the output folder is not complete and is passed over ({f.why})"
        for f in passed
    )
    if source is None:
        if config.initial_load_in_hf:
            raise NotFoundError(
                Problem(
                    code="resolve.hf-path-missing",
                    what="checkpoint.initial_load_in_hf is on, and no path says where the "
                    "weights are.",
                    expected="checkpoint.initial_load_path or the top-level hf_assets_path",
                    actual="neither is set",
                    fix="--hf_assets_path ./checkpoint/<model>",
                )
            )
        return LoadDecision(
            action="fresh",
            reason="the output folder holds no checkpoint and no initial_load_path is set",
            ignored=tuple(ignored),
            passed_over=tuple(passed),
            notices=notices,
        )
    error = _source_problem(config, source, wanted)
    if error is not None:
        raise error
    model_only = config.initial_load_model_only or source.format == "hf"
    if model_only and config.exclude_from_loading:
        ignored.append(
            Ignored(
                "checkpoint.exclude_from_loading", "an initial load takes the model only anyway"
            )
        )
    what = {"dcp": "a DCP checkpoint", "hf": "Hugging Face weights"}[source.format or ""]
    return LoadDecision(
        action="initial",
        reason=f"the output folder holds no checkpoint, so {source.option} is used: {what}"
        f"{' (quantized)' if source.quantized else ''}",
        path=source.path,
        format=source.format or "",
        states=("model",) if model_only else ("model", *wanted),
        quantized=source.quantized,
        ignored=tuple(ignored),
        passed_over=tuple(passed),
        notices=notices,
    )


def _what_is_there(source: SourceView) -> str:
    """What the nearest folder that does exist holds, of names that may have been meant."""
    if not source.parent:
        return "nothing of that name"
    held = ", ".join(source.near) if source.near else "nothing of a similar name"
    return f"{source.parent} is there, with {held}"


def _source_problem(
    config: CheckpointConfig, source: SourceView, wanted: Sequence[str]
) -> CheckpointError | None:
    """The one thing that makes `source` unusable, or None."""
    where = f"{source.option} = {source.path}"
    in_hf = config.initial_load_in_hf
    if not source.exists:
        return NotFoundError(
            Problem(
                code="resolve.path-missing",
                what=f"{source.option} names a folder that does not exist.",
                where=where,
                expected="a folder",
                actual=_what_is_there(source),
                cause="relative paths are resolved against the working directory",
                fix=f"--{source.option} {source.parent}/{source.near[0]}"
                if source.near
                else "correct the path",
            )
        )
    if source.format not in ("dcp", "hf"):
        inside = f"; it holds {', '.join(source.steps[-4:])}" if source.steps else ""
        fix = (
            f"name the step folder: --checkpoint.initial_load_path {source.path}/{source.steps[-1]}"
            if source.steps
            else "name a step folder (DCP) or a folder with model.safetensors or its index (HF)"
        )
        return RefusedError(
            Problem(
                code="resolve.no-format",
                what=f"{source.option} holds nothing that can be loaded.",
                where=where,
                expected="Hugging Face safetensors" if in_hf else "a DCP checkpoint",
                actual="; ".join(f"not {name}: {why}" for name, why in source.refused) + inside,
                fix=fix,
            )
        )
    if in_hf != (source.format == "hf"):
        flag = "initial_load_in_hf"
        return RefusedError(
            Problem(
                code="resolve.format-mismatch",
                what=f"{source.option} does not hold what checkpoint.{flag} says.",
                where=where,
                expected="Hugging Face safetensors" if in_hf else "a DCP checkpoint",
                actual="a DCP checkpoint" if in_hf else "Hugging Face safetensors",
                fix=f"{'drop' if in_hf else 'add'} --checkpoint.{flag}",
            )
        )
    if source.format == "hf" and source.quantized != config.initial_load_in_hf_quantized:
        flag = "--checkpoint.initial_load_in_hf_quantized"
        return RefusedError(
            Problem(
                code="resolve.quantized-mismatch",
                what="The weights are quantized and the flag for it is off."
                if source.quantized
                else "The weights are not quantized and the flag for it is on.",
                where=where,
                cause="loaded as they are, quantized weights are wrong by their block scale"
                if source.quantized
                else "",
                fix=f"{'add' if source.quantized else 'drop'} {flag}",
            )
        )
    if source.format == "dcp" and not config.initial_load_model_only:
        missing = sorted(set(wanted) - source.states)
        if missing:
            return RefusedError(
                Problem(
                    code="resolve.states-missing",
                    what=f"{source.option} lacks states that "
                    "checkpoint.no-initial_load_model_only asks for.",
                    where=where,
                    expected="model, " + ", ".join(wanted),
                    actual=", ".join(sorted(source.states)),
                    cause="it was saved as model only (a last save, or a seed)"
                    if source.states <= {"model"}
                    else "",
                    fix="--checkpoint.initial_load_model_only, or "
                    f"--checkpoint.exclude_from_loading {','.join(missing)}",
                )
            )
    return None
