"""Files past the page cache: the same bytes, the same failures, and nothing left in it."""

from __future__ import annotations

import errno
import mmap
import os
import random
import sys

import pytest

from torchtitan_ckpt.formats import page_cache

SIZE = 8 * 2**20 + 321


@pytest.fixture
def data() -> bytes:
    return random.Random(1).randbytes(SIZE)


def pieces(data):
    """Odd pieces, some below the buffer's size and some above."""
    at, sizes = 0, [1, 300, 2**20 - 1, 2**20 + 1, 64, 3 * 2**20]
    while at < len(data):
        size = sizes[at % len(sizes)]
        yield memoryview(data)[at : at + size]
        at += size


def write(path, data, mode="w", at=0, kept=False):
    with page_cache.open_file(path, mode, kept=kept) as file:
        file.seek(at)
        for piece in pieces(data):
            file.write(piece)
        assert file.tell() == at + len(data)
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("kept", [False, True])
def test_a_file_holds_what_was_written(tmp_path, data, kept):
    write(tmp_path / "a", data, kept=kept)
    assert (tmp_path / "a").read_bytes() == data


def test_a_file_goes_on_where_one_seeks_to(tmp_path, data):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    write(tmp_path / "a", data, "r+", at=777)
    assert (tmp_path / "a").read_bytes() == b"x" * 777 + data


@pytest.mark.parametrize("how", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, None])
def test_where_the_flag_is_unknown_it_is_an_ordinary_write(tmp_path, data, monkeypatch, how):
    def refuses(*_):
        raise NotImplementedError if how is None else OSError(how, os.strerror(how))

    monkeypatch.setattr(os, "pwritev", refuses)
    write(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == data
    with open(tmp_path / "a", "r+b") as file:
        assert page_cache.pwrite(file.fileno(), b"end", 5, kept=False) == 3
    assert (tmp_path / "a").read_bytes() == data[:5] + b"end" + data[8:]


def test_a_full_disk_is_said(tmp_path, data, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path / "a", data)


def test_short_writes_lose_nothing(tmp_path, data, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda f, b, at, how: real(f, [b[0][:70_001]], at, how))
    write(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == data


def resident(path):
    """The share of a file's pages that lie in memory, asked with mincore."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        view = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | 2)
        hold = (ctypes.c_char * size).from_buffer(view)
        pages = -(-size // mmap.PAGESIZE)
        there = (ctypes.c_ubyte * pages)()
        assert libc.mincore(ctypes.byref(hold), ctypes.c_size_t(size), there) == 0
        del hold
        view.close()
    return sum(byte & 1 for byte in there) / pages


@pytest.mark.skipif(sys.platform != "linux", reason="uncached writes are Linux's")
def test_nothing_is_left_in_the_page_cache(tmp_path, data):
    file = tmp_path / "probe"
    with open(file, "wb") as probe:
        try:
            os.pwritev(probe.fileno(), [b"x"], 0, page_cache._RWF_DONTCACHE)
        except (OSError, NotImplementedError):
            pytest.skip("this kernel or file system knows no uncached writes")
    file.write_bytes(data)
    assert resident(file) == 1
    write(tmp_path / "a", data)
    assert resident(tmp_path / "a") < 0.1
    write(tmp_path / "b", data, kept=True)
    assert resident(tmp_path / "b") == 1


def test_what_fits_is_a_part_of_the_memory_that_is_available(monkeypatch):
    text = "MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable:     400 kB\n"
    monkeypatch.setattr(page_cache.Path, "read_text", lambda *_, **__: text)
    assert page_cache.fits(100 * 1024)
    assert not page_cache.fits(100 * 1024 + 1)
