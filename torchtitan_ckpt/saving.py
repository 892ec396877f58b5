"""Write one step: a place of its own, the writer of a format, then its final name; or nothing.

Returns on every rank or fails on every rank with the first cause. This module decides neither what
nor when to save.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan_ckpt import folder as folders
from torchtitan_ckpt import owner, progress
from torchtitan_ckpt.agree import agree
from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.config import CheckpointConfig, is_remote
from torchtitan_ckpt.errors import Problem, RankError, SaveError
from torchtitan_ckpt.formats import dcp
from torchtitan_ckpt.refusals import meaning_of
from torchtitan_ckpt.state.tensors import local_bytes

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def os_errors_as_save_error(where: str, folder: Path | None = None) -> Iterator[None]:
    """Turn an OSError inside the block into a SaveError that names cause and remedy.

    `folder` is the output folder, whose steps the message calls untouched where there are any.
    """
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "OSError")
        cause, fix = meaning_of(error)
        raise SaveError(
            Problem(
                code="save.os",
                what="The checkpoint could not be written.",
                where=str(error.filename or where),
                expected="a folder in which this process can create and write files",
                actual=f"{name}: {error.strerror or error}",
                cause=cause,
                fix=f"{fix}{_untouched(folder)}",
            )
        ) from error


def _untouched(folder: Path | None) -> str:
    """What to say of the steps that a folder holds already; nothing where it holds none."""
    try:
        steps = folders.list_steps(folder) if folder is not None else {}
        whole = [step for step, path in steps.items() if folders.has_marker(path)]
    except OSError:
        return ""
    return f"; {folders.step_name(max(whole))} is untouched" if whole else ""


def claim(folder: Path) -> None:
    """Make the output folder this process's: say so when another job saves there, bring back what
    a dead one was replacing, sign. Raises SaveError where nothing can be written."""
    with os_errors_as_save_error(str(folder), folder):
        _no_lost_link(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _no_files_for_steps(folder)
        other = owner.read(folder)
        if other is not None and owner.is_me(other):
            logger.warning(
                "another manager of this process saves into %s: steps of the two will replace each "
                "other; close it first, or give each its checkpoint.folder",
                folder,
            )
        elif other is not None and owner.is_alive(other):
            logger.warning(
                "another job saves into %s (process %d on %s): steps of the two will replace "
                "each other; use another dump_folder",
                folder,
                other.pid,
                other.host,
            )
        else:
            _recover(folder)
        owner.write(folder)


def _no_lost_link(folder: Path) -> None:
    """A link whose end is away is often a file system that is not mounted: nothing to remove."""
    if folder.is_symlink() and not folder.exists():
        raise SaveError(
            Problem(
                code="save.lost-link",
                what="The output folder is a link to a place that is not there.",
                where=str(folder),
                actual=f"a link to {os.readlink(folder)}",
                cause="a file system that is not mounted, or a folder that was moved",
                fix="mount it, make the folder that the link names, or use another dump_folder",
            )
        )


def _no_files_for_steps(folder: Path) -> None:
    """A file that is called like a step would be in the way at the end of hours of training."""
    files = [path for path in folders.list_steps(folder).values() if not path.is_dir()]
    if files:
        raise SaveError(
            *(
                Problem(
                    code="save.step-is-file",
                    what=f"{path.name} is a file, where a step folder would have to be.",
                    where=str(path),
                    expected="a folder, or nothing",
                    actual="a file",
                    fix="move it away",
                )
                for path in files
            )
        )


def renew(folder: Path) -> None:
    """Sign again, and say so when another job has signed meanwhile: that job was told when it
    started, and this one learns it here. The record is advice: without it a complete checkpoint is
    as good."""
    try:
        other = owner.read(folder)
        if other is not None and not owner.is_me(other) and not owner.is_gone(other):
            logger.warning(
                "another job (process %d on %s) has begun to save into %s: steps of the two "
                "replace each other; stop one of them",
                other.pid,
                other.host,
                folder,
            )
        owner.write(folder)
    except OSError as error:
        logger.warning("could not renew the owner record in %s: %s", folder, error)


def _recover(folder: Path) -> None:
    for path in folders.recover(folder):
        logger.warning("%s is back: its replacement had not been finished", path)


def write_dcp(
    ranks: Ranks,
    folder: str,
    step: int,
    flat: Mapping[str, Any],
    config: CheckpointConfig,
    *,
    watched: bool,
) -> str:
    """Write `flat` as step N in DCP, after all ranks were found to agree; returns its final path.

    `watched`: somebody waits for it, so a bar may be drawn. A save in the background has none, for
    the lines of the training would run into it.
    """
    agree(flat, ranks)

    def write(path: str) -> None:
        shown = watched and ranks.rank == 0
        with progress.bar(f"saving step-{step}", local_bytes(flat), wanted=shown) as bar:
            dcp.save(
                dict(flat),
                path,
                process_group=ranks.group,
                sync_files=config.sync_files,
                drop_page_cache=config.drop_page_cache_after_save,
                checksums=config.checksums,
                progress=None if bar is None else bar.advance,
            )

    return write_step(ranks, folder, step, write, sync=config.sync_files)


def closed(step: int) -> SaveError:
    """A save after `close`: nobody would wait for it, sign the folder or remove older steps."""
    return SaveError(
        Problem(
            code="save.closed",
            what=f"step {step} was to be saved by a manager that is closed",
            fix="call close() after the last save, or make a new manager",
        )
    )


@contextlib.contextmanager
def in_background(ranks: Ranks, step: int) -> Iterator[None]:
    """Say at once what makes a save in the background fail: whoever waits for it hears of it hours
    later, and a job that ends without `close` never.

    A process group that went before the save did is told in words.
    """
    try:
        yield
    except BaseException as error:
        failure = _destroyed(step) if ranks.are_gone else error
        if ranks.rank == 0:
            logger.error("step %d could not be saved in the background: %s", step, failure)
        raise failure from (error if failure is not error else error.__cause__)


def _destroyed(step: int) -> RankError:
    return RankError(
        Problem(
            code="ranks.destroyed",
            what=f"The process group was destroyed while step {step} was being saved.",
            cause="destroy_process_group() was called before the manager's close()",
            fix="call close() first: it waits for the save in the background",
        )
    )


def write_step(
    ranks: Ranks, folder: str, step: int, write: Callable[[str], None], *, sync: bool
) -> str:
    """Write `step-N` into `folder`; returns its final path.

    `write(path)` is called on every rank with the same empty folder and must leave a marker file
    last; it returns or raises on all ranks together. Raises SaveError or RankError.
    """
    if is_remote(folder):
        return _write_remote(ranks, folder, step, write)
    path = ""
    with ranks.together(f"making the folder of step {step}"):
        if ranks.rank == 0:
            with os_errors_as_save_error(folder, Path(folder)):
                _recover(Path(folder))
                path = str(folders.begin(Path(folder), step))
    path = ranks.broadcast(path)
    try:
        with ranks.together(f"finding the folder of step {step}"):
            _see(path, ranks.rank)
        write(path)
        final = str(Path(folder) / folders.step_name(step))
        with ranks.together(f"publishing step {step}"):
            if ranks.rank == 0:
                with os_errors_as_save_error(path, Path(folder)):
                    folders.publish(Path(path), Path(folder), step, sync=sync)
    except BaseException:
        if ranks.rank == 0:
            folders.abandon(Path(path))
        raise
    return final


def _see(path: str, rank: int) -> None:
    """Raise unless this rank sees what rank 0 made; listing refreshes an NFS client's cache."""
    with contextlib.suppress(OSError):
        list(Path(path).iterdir())
    if not folders.is_ours(Path(path)):
        raise RankError(
            Problem(
                code="save.not-shared",
                what=f"Rank {rank} does not see the folder that rank 0 made.",
                where=f"{path} on {folders.this_host()}",
                cause="the dump_folder is not on a file system that all nodes share",
                fix="put dump_folder on shared storage",
            )
        )


def _write_remote(ranks: Ranks, folder: str, step: int, write: Callable[[str], None]) -> str:
    """Object stores rename nothing: the old marker goes first, the new one comes last."""
    import fsspec

    final = posixpath.join(folder, folders.step_name(step))
    with ranks.together(f"clearing the place of step {step}"):
        if ranks.rank == 0:
            filesystem, inside = fsspec.core.url_to_fs(final)
            with os_errors_as_save_error(final):
                marker = posixpath.join(inside, ".metadata")
                if filesystem.exists(marker):
                    filesystem.rm_file(marker)
                if filesystem.isdir(inside):
                    filesystem.rm(inside, recursive=True)
    write(final)
    return final
