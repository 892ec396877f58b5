"""A checkpoint's folder as its readers see it: names, sizes and ranges of bytes.

Local paths are read with positioned reads; strings such as `memory://job/step-5` go through fsspec.
Knows nothing of formats. `os` errors leave this module as errors of the tree.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torchtitan_ckpt.errors import DamagedError, InputError, NotFoundError, Problem, RefusedError
from torchtitan_ckpt.formats.page_cache import read_no_further
from torchtitan_ckpt.formats.strangers import open_regular
from torchtitan_ckpt.refusals import meaning_of


class File(Protocol):
    """An open file of a checkpoint. Reads raise `DamagedError` when bytes are missing."""

    size: int

    def read(self, offset: int, length: int) -> bytes: ...

    def read_into(self, offset: int, target: memoryview) -> None: ...

    def close(self) -> None: ...


class Folder(Protocol):
    """A checkpoint's folder."""

    name: str
    local: bool

    def sizes(self) -> Mapping[str, int]:
        """Every file directly inside, with its size in bytes."""

    def open(self, relative: str, *, ahead: bool = True) -> File:
        """A file; without `ahead` the system reads nothing beyond what is asked for."""
        ...

    def unsafe(self, relative: str) -> str:
        """Why a name taken from a file must not be opened, or an empty string."""


def is_url(path: str | os.PathLike[str]) -> bool:
    return isinstance(path, str) and "://" in path


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """The folder at a local path or an fsspec URL. Raises `NotFoundError` when there is none."""
    if is_url(path):
        text = str(path)
        if not text.startswith("file://"):
            return _RemoteFolder(text)
        path = text.removeprefix("file://")
    return _LocalFolder(Path(path))


def raise_for(error: OSError, where: str) -> NoReturn:
    """Turn an error of the operating system on reading into one of the tree."""
    if isinstance(error, FileNotFoundError):
        raise NotFoundError(
            Problem(code="file.missing", what="there is no such file", where=where)
        ) from error
    kind = errno.errorcode.get(error.errno or 0, type(error).__name__)
    cause, fix = meaning_of(error)
    raise InputError(
        Problem(
            code="file.unreadable",
            what=f"the file cannot be read: {error.strerror or error} ({kind})",
            where=where,
            cause=cause,
            fix=fix,
        )
    ) from error


def _cut(where: str, offset: int, wanted: int, got: int) -> NoReturn:
    raise DamagedError(
        Problem(
            code="file.cut",
            what="the file ends too early",
            where=f"{where}, byte {offset}",
            expected=f"{wanted} bytes",
            actual=f"{got} bytes",
            cause="an interrupted write or copy, or a file changed while it is read",
            fix="copy the file again, or use another step",
        )
    )


def lexically_unsafe(relative: str) -> str:
    """Why a relative path from a file is refused by its looks alone, or an empty string."""
    if not relative or "\0" in relative or "\\" in relative:
        return "it is no file name"
    if relative.startswith("/") or relative[1:2] == ":":
        return "it is an absolute path"
    if ".." in relative.split("/"):
        return "it climbs out of the folder"
    return ""


class _LocalFile:
    def __init__(self, path: Path, ahead: bool) -> None:
        self.path = path
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise_for(error, str(path))
        if not ahead:
            read_no_further(self._fd)
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        there = min(length, max(self.size - offset, 0))
        if there < length:
            _cut(str(self.path), offset, length, there)
        try:  # mostly all at once, and then there is no copy of it
            found = os.pread(self._fd, length, offset)
        except OSError as error:
            raise_for(error, str(self.path))
        if len(found) == length:
            return found
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            try:
                got = os.preadv(self._fd, [target[done:]], offset + done)
            except OSError as error:
                raise_for(error, str(self.path))
            if got == 0:
                _cut(str(self.path), offset, len(target), done)
            done += got

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _LocalFolder:
    local = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = str(root)
        if not root.exists():
            raise NotFoundError(
                Problem(code="folder.missing", what="there is no such checkpoint", where=self.name)
            )
        if not root.is_dir():
            raise RefusedError(
                Problem(
                    code="folder.is-file",
                    what="a file where the folder of a checkpoint belongs",
                    where=self.name,
                )
            )

    def sizes(self) -> Mapping[str, int]:
        try:
            with os.scandir(self.root) as entries:
                return {e.name: e.stat().st_size for e in entries if e.is_file()}
        except OSError as error:
            raise_for(error, self.name)

    def open(self, relative: str, *, ahead: bool = True) -> File:
        return _LocalFile(self.root / relative, ahead)

    def unsafe(self, relative: str) -> str:
        looks = lexically_unsafe(relative)
        if looks:
            return looks
        path = self.root / relative
        if path.is_symlink() or "/" in relative:
            inside = os.path.realpath(self.root)
            if not os.path.realpath(path).startswith(inside.rstrip("/") + "/"):
                return "it is a link out of the folder"
        return ""


class _RemoteFile:
    def __init__(self, fs: Any, path: str, where: str) -> None:
        self._fs, self._path, self._where = fs, path, where
        try:
            self.size = int(fs.size(path))
        except OSError as error:
            raise_for(error, where)
        except Exception as error:
            raise _remote(where, error) from error

    def read(self, offset: int, length: int) -> bytes:
        try:
            data = self._fs.cat_file(self._path, start=offset, end=offset + length)
        except OSError as error:
            raise_for(error, self._where)
        except Exception as error:
            raise _remote(self._where, error) from error
        if len(data) != length:
            _cut(self._where, offset, length, len(data))
        return bytes(data)

    def read_into(self, offset: int, target: memoryview) -> None:
        target[:] = self.read(offset, len(target))

    def close(self) -> None:
        return None


class _RemoteFolder:
    local = False

    def __init__(self, url: str) -> None:
        self.name = url
        self._fs, self._root = open_remote(url)
        try:
            found = self._fs.isdir(self._root)
        except Exception as error:
            raise _remote(url, error) from error
        if not found:
            raise NotFoundError(
                Problem(code="folder.missing", what="there is no such checkpoint", where=url)
            )

    def sizes(self) -> Mapping[str, int]:
        try:
            listed = self._fs.ls(self._root, detail=True)
        except Exception as error:
            raise _remote(self.name, error) from error
        return {
            str(item["name"]).rstrip("/").rsplit("/", 1)[-1]: int(item["size"] or 0)
            for item in listed
            if item["type"] == "file"
        }

    def open(self, relative: str, *, ahead: bool = True) -> File:
        path = f"{self._root.rstrip('/')}/{relative}"
        return _RemoteFile(self._fs, path, f"{self.name.rstrip('/')}/{relative}")

    def unsafe(self, relative: str) -> str:
        return lexically_unsafe(relative)


def open_remote(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL and the path inside it."""
    try:
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(url)
    except Exception as error:
        raise RefusedError(
            Problem(
                code="folder.scheme",
                what=f"this address cannot be opened: {error}",
                where=url,
                fix="install the fsspec package of its scheme (s3fs, gcsfs, ...)",
            )
        ) from error
    return fs, str(root)


def _remote(where: str, error: Exception) -> InputError:
    return InputError(
        Problem(
            code="file.unreadable",
            what=f"the remote store fails: {type(error).__name__}: {error}",
            where=where,
        )
    )
