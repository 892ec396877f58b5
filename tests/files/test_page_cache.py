"""Files that do not fill the page cache: the same bytes, the same failures, nothing left."""

from __future__ import annotations

import errno
import mmap
import os
import random

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


def write(path, data, mode="w", at=0):
    with page_cache.open_file(path, mode) as file:
        file.seek(at)
        for piece in pieces(data):
            file.write(piece)
        assert file.tell() == at + len(data)
        file.flush()
        os.fsync(file.fileno())


def test_a_file_holds_what_was_written(tmp_path, data):
    write(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == data


def test_a_file_goes_on_where_one_seeks_to(tmp_path, data):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    write(tmp_path / "a", data, "r+", at=777)
    assert (tmp_path / "a").read_bytes() == b"x" * 777 + data


def test_a_full_disk_is_said(tmp_path, data, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path / "a", data)


def test_short_writes_lose_nothing(tmp_path, data, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:70_001]))
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


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="a call that this system lacks")
def test_a_synced_file_leaves_nothing_in_the_page_cache(tmp_path, data):
    (tmp_path / "plain").write_bytes(data)
    assert resident(tmp_path / "plain") == 1
    write(tmp_path / "a", data)
    assert resident(tmp_path / "a") < 0.1


def test_only_the_last_of_a_growing_file_stays(monkeypatch):
    asked = []
    monkeypatch.setattr(page_cache, "let_go", lambda descriptor, end: asked.append(end))
    monkeypatch.setattr(page_cache, "_STRIDE", 100)
    monkeypatch.setattr(page_cache, "_TRAIL", 250)
    trail = page_cache.Trail(-1)
    for end in range(30, 601, 30):
        trail.written(end)
    assert asked == [110, 230, 350]


def test_what_fits_is_a_part_of_the_memory_that_is_available(monkeypatch):
    text = "MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable:     400 kB\n"
    monkeypatch.setattr(page_cache.Path, "read_text", lambda *_, **__: text)
    assert page_cache.fits(100 * 1024)
    assert not page_cache.fits(100 * 1024 + 1)
