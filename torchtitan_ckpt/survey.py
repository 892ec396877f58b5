"""Look at the folders that a load may use, and say what each holds; decides nothing.

Steps of the output folder are looked at newest first and only as far as needed: the first full one
ends the search, because reading the metadata of every step of a large job takes minutes.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

from torchtitan_ckpt import folder as folders
from torchtitan_ckpt import formats
from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.config import MODEL, TRAINING_STATES, CheckpointConfig, is_remote
from torchtitan_ckpt.decision import OutputView, SourceView, StepFolder, StepKind
from torchtitan_ckpt.errors import CheckpointError, InputError, Problem
from torchtitan_ckpt.formats import dcp, hf
from torchtitan_ckpt.formats.quantized import is_quantized
from torchtitan_ckpt.manifest import Manifest


def look_at_output(
    folder: str, *, load_step: int = -1, states: Iterable[str] = TRAINING_STATES
) -> OutputView:
    """What the output folder holds, as far as `load_step` needs to know.

    `states` are the names of the job's states besides the model.
    """
    found = _list(folder)
    if found is None:
        return OutputView(folder)
    paths, others = found
    steps: list[StepFolder] = []
    searching = True
    for step in sorted(paths, reverse=True):
        if (load_step == -1 and searching) or step == load_step:
            steps.append(classify(paths[step], step, states))
            searching = searching and steps[-1].kind is not StepKind.FULL
        else:
            steps.append(StepFolder(step, paths[step], StepKind.UNREAD))
    return OutputView(folder, True, tuple(steps), tuple(others))


def classify(path: str, step: int, names: Iterable[str] = TRAINING_STATES) -> StepFolder:
    """What one step folder holds: its metadata is read and every file that it names is looked at.

    Whatever is wrong with the files makes it `BROKEN` with the first reason. What cannot be read is
    not known to be broken: a job that went on from an older step would train for nothing, so the
    storage's failure is raised, as an InputError.
    """
    detection = formats.detect(path)
    if detection.kind == "unreadable":
        raise _unreadable(path, step, "; ".join(dict.fromkeys(detection.refused.values())))
    try:
        if detection.format == "dcp":
            states = states_of(dcp.read_manifest(path), names)
            if step == 0:
                return StepFolder(step, path, StepKind.SEED)
            kind = StepKind.FULL if states - {MODEL} else StepKind.MODEL_ONLY
            return StepFolder(step, path, kind)
        if detection.format == "hf":
            hf.read_manifest(path)
            return StepFolder(step, path, StepKind.HF)
    except CheckpointError as error:
        first = error.problems[0]
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise _unreadable(path, step, first.what) from error
        return StepFolder(step, path, StepKind.BROKEN, _in_a_line(first, path))
    why = "; ".join(dict.fromkeys(detection.refused.values())) or "no checkpoint files"
    return StepFolder(step, path, StepKind.BROKEN, why)


def _in_a_line(problem: Problem, path: str) -> str:
    """What is wrong with a step, with the file in it that is at fault."""
    place = problem.where.removeprefix(path).strip("/") if problem.where.startswith(path) else ""
    named = re.search(r"\.(distcp|safetensors|metadata)\b", f"{problem.what} {problem.actual}")
    file = f"{place}: " if place and not named else ""
    detail = f" ({problem.actual})" if problem.actual else ""
    return f"{file}{problem.what[:160]}{detail[:160]} [{problem.code}]"


def _unreadable(path: str, step: int, why: str) -> InputError:
    return InputError(
        Problem(
            code="resolve.step-unreadable",
            what=f"step-{step} cannot be read, so nobody can tell whether it is complete.",
            where=path,
            actual=why,
            cause="permissions, or storage that fails for the moment",
            fix="correct that and start again, or name another step with --checkpoint.load_step",
        )
    )


def older_step(folder: str, step: int, names: Iterable[str], ranks: Ranks) -> Problem:
    """What to go on from when `step`, which looked whole, could not be read. A collective.

    Only metadata is looked at here too, so the older step is a proposal and never taken by itself.
    """
    found: StepFolder | None = None
    with ranks.together("looking for an older step"):
        if ranks.rank == 0:
            paths = (_list(folder) or ({}, []))[0]
            older = (classify(paths[n], n, names) for n in sorted(paths, reverse=True) if n < step)
            found = next((s for s in older if s.kind is StepKind.FULL), None)
    found = ranks.broadcast(found)
    if found is None:
        return Problem(
            code="load.no-older-step",
            what=f"step-{step} was not loaded, and no older step can be resumed.",
            where=folder,
            fix="copy the step again from where it came, or start in a new dump_folder with "
            "--checkpoint.initial_load_path",
        )
    return Problem(
        code="load.older-step",
        what=f"step-{step} was not loaded; step-{found.step} is the newest older one that a job "
        "can resume.",
        where=found.path,
        fix=f"--checkpoint.load_step {found.step}",
    )


def look_at_source(
    config: CheckpointConfig, hf_assets_path: str | None, states: Iterable[str] = TRAINING_STATES
) -> SourceView | None:
    """What `initial_load_path` (or, with `initial_load_in_hf`, `hf_assets_path`) holds.

    None when no such path is set. Raises the reader's error for a checkpoint that is damaged.
    """
    option, path = "checkpoint.initial_load_path", (config.initial_load_path or "").strip()
    if not path and config.initial_load_in_hf and hf_assets_path:
        option, path = "hf_assets_path", hf_assets_path.strip()
    if not path:
        return None
    if not is_remote(path):
        path = str(Path(path).expanduser().absolute())
        if not Path(path).exists():
            parent, near = _neighbours(Path(path))
            return SourceView(path, option, parent=parent, near=near)
    detection = formats.detect(path)
    if detection.format == "dcp":
        manifest = dcp.read_manifest(path)
        return SourceView(path, option, True, "dcp", states_of(manifest, states))
    if detection.format == "hf":
        manifest = hf.read_manifest(path)
        return SourceView(path, option, True, "hf", quantized=is_quantized(manifest))
    # A job's folder, or its folder of checkpoints, is named easily by mistake.
    steps: list[str] = []
    for below in ("", f"{config.folder}/"):
        inside = _list(f"{path}/{below}".rstrip("/"))
        steps = steps or [below + folders.step_name(n) for n in sorted(inside[0] if inside else ())]
    return SourceView(
        path,
        option,
        True,
        detection.format,
        refused=tuple(detection.refused.items()),
        steps=tuple(steps),
    )


def _neighbours(path: Path) -> tuple[str, tuple[str, ...]]:
    """The deepest folder above `path` that exists, and what in it may have been meant, best first.

    Steps are near by their number, other names by their spelling.
    """
    parent = next((folder for folder in path.parents if folder.is_dir()), None)
    if parent is None:
        return "", ()
    name, *below = path.relative_to(parent).parts
    try:
        names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
    except OSError:
        return str(parent), ()
    step = folders.step_number(name)
    if step is None:
        near = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    else:
        numbers = {n: found for n in names if (found := folders.step_number(n)) is not None}
        near = sorted(numbers, key=lambda n: abs(numbers[n] - step))[:4]
    rest = "/".join(below)
    if not rest:
        return str(parent), tuple(near)
    # Only one folder of the path is wrong, where the rest of it lies beside.
    sure = [n for n in names if (parent / n / rest).exists()]
    return str(parent), (*(f"{n}/{rest}" for n in sure[:4]), *(n for n in near if n not in sure))


def states_of(manifest: Manifest, names: Iterable[str] = TRAINING_STATES) -> frozenset[str]:
    """The top-level states that a DCP checkpoint holds, among `names` and the model."""
    known = set(names) | set(TRAINING_STATES)
    heads = {key.partition(".")[0] for key in manifest.keys}
    model = {MODEL} if any(key.partition(".")[0] not in known for key in manifest.keys) else set()
    return frozenset((heads & known) | model)


def _list(folder: str) -> tuple[dict[int, str], list[str]] | None:
    """Steps by number and names that only resemble one; None when there is no such folder."""
    if not is_remote(folder):
        path = Path(folder)
        if not path.is_dir():
            return None
        steps = {n: str(p) for n, p in folders.list_steps(path).items()}
        return steps, folders.look_alikes(path)
    import fsspec

    filesystem, inside = fsspec.core.url_to_fs(folder)
    if not filesystem.isdir(inside):
        return None
    names = [posixpath.basename(name.rstrip("/")) for name in filesystem.ls(inside, detail=False)]
    numbers = {name: folders.step_number(name) for name in names}
    return {n: posixpath.join(folder, name) for name, n in numbers.items() if n is not None}, []
