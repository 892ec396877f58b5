"""Plain loads: in place, bitwise, only what is asked for, and refused before anything moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torchtitan_ckpt.errors import DamagedError, MismatchError
from torchtitan_ckpt.formats import hf, hf_io
from torchtitan_ckpt.formats.hf_boxes import is_dense, split_box
from torchtitan_ckpt.manifest import ITEM_SIZE, Shard, TensorEntry


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def stored() -> dict[str, torch.Tensor]:
    out = {f"layers.{i}.w": torch.randn(3 + i, 5) for i in range(12)}
    out |= {
        "half": torch.randn(7, 3).to(torch.bfloat16),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "ids": torch.arange(11) - 5,
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "complex": torch.randn(2, 2, dtype=torch.complex64),
        "u16": torch.arange(4).to(torch.uint16),
    }
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(stored() | {}, tmp_path / "model.safetensors")
    return tmp_path


def filled(like: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty_like(like, memory_format=torch.contiguous_format)
    if like.dtype == torch.bool:
        return fresh.fill_(True)
    fresh.reshape(-1).view(torch.uint8).fill_(0x5A)
    return fresh


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    state = stored()
    save_file(state, tmp_path / "model.safetensors")
    keys = list(state)
    torch.manual_seed(1)
    order = [keys[i] for i in torch.randperm(len(keys))]
    out = {key: filled(state[key]) for key in order}
    addresses = {key: out[key].data_ptr() for key in order}
    for threads in (1, 3):
        for key in order:
            out[key].copy_(filled(state[key]))
        hf.load(tmp_path, out, threads=threads)
        for key in keys:
            assert torch.equal(raw(out[key]), raw(state[key])), key
            assert out[key].data_ptr() == addresses[key], "in place"


def test_targets_of_any_kind(tmp_path: Path) -> None:
    whole = torch.arange(60.0).view(6, 10)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    base = torch.full((10, 6), 7.0)
    targets = {
        "transposed": base.t(),
        "strided": torch.full((12, 20), 7.0)[::2, ::2],
        "slice": torch.full((6, 13), 7.0)[:, 2:12],
        "parameter": torch.nn.Parameter(torch.full((6, 10), 7.0)),
    }
    for name, target in targets.items():
        hf.load(tmp_path, {"w": target})
        assert torch.equal(target, whole), name


def all_codes(state: dict, folder: Path, **options: object) -> dict[str, str]:
    with pytest.raises(MismatchError) as caught:
        hf.load(folder, state, **options)
    return {p.code: str(p) for p in caught.value.problems}


def test_every_difference_at_once_and_nothing_moves(tmp_path: Path) -> None:
    save_file(
        {f"layers.{i}.w": torch.randn(3, 5) for i in range(12)} | {"n": torch.ones(4)},
        tmp_path / "model.safetensors",
    )
    state = {f"layers.{i}.w": torch.full((3, 5), 7.0) for i in range(10)}
    state["layers.10.w"] = torch.full((5, 3), 7.0)
    state["layers.11.w1"] = torch.full((3, 5), 7.0)
    state["n"] = torch.full((4,), 7.0, dtype=torch.float64)
    found = all_codes(state, tmp_path)
    assert set(found) == {"load.missing", "load.unexpected", "load.shape", "load.dtype"}
    assert "nearest: layers.11.w" in found["load.missing"]
    assert "[3, 5] into [5, 3]" in found["load.shape"]
    assert all(bool((value == 7).all()) for value in state.values())


def test_keys_of_other_ranks_and_excused_keys(folder: Path) -> None:
    everything = set(stored())
    hf.load(folder, {"half": torch.zeros(7, 3, dtype=torch.bfloat16)}, expected_keys=everything)
    assert "load.unexpected" in all_codes({"half": torch.zeros(7, 3, dtype=torch.bfloat16)}, folder)
    state = {"half": torch.zeros(7, 3, dtype=torch.bfloat16), "absent.bias": torch.ones(2)}
    hf.load(folder, state, expected_keys=everything, excused=["absent.*"])
    assert torch.equal(state["absent.bias"], torch.ones(2))
    found = all_codes(state, folder, expected_keys=everything | {"zz"}, excused=["other.*"])
    assert set(found) == {"load.missing"}


CASTS = [
    ("bfloat16", "float32", "widen"),
    ("float16", "float32", "widen"),
    ("float32", "float64", "widen"),
    ("bfloat16", "float16", "narrow"),
    ("float16", "bfloat16", "narrow"),
    ("float32", "bfloat16", "narrow"),
    ("float64", "float32", "narrow"),
    ("float32", "int64", "never"),
    ("int64", "float32", "never"),
    ("int32", "int64", "never"),
    ("bool", "uint8", "never"),
    ("uint8", "bool", "never"),
    ("complex64", "float32", "never"),
    ("float32", "complex64", "never"),
]


@pytest.mark.parametrize(("source", "target", "needs"), CASTS)
def test_no_cast_but_the_one_allowed(tmp_path: Path, source: str, target: str, needs: str) -> None:
    value = torch.tensor([[1.7, -2.25, 0.5]]).to(getattr(torch, source))
    save_file({"w": value}, tmp_path / "model.safetensors")

    def attempt(**options: bool) -> torch.Tensor | None:
        out = torch.full((1, 3), 1).to(getattr(torch, target))
        before = raw(out).clone()
        try:
            hf.load(tmp_path, {"w": out}, **options)
        except MismatchError as error:
            codes = [p.code for p in error.problems]
        else:
            return out
        assert codes == ["load.dtype"]
        assert torch.equal(raw(out), before), "nothing moves"
        return None

    assert attempt() is None
    for option in ("widen", "narrow"):
        out = attempt(**{option: True})
        if needs == option or (needs == "widen" and option == "narrow"):
            assert out is not None
            assert torch.equal(raw(out), raw(value.to(getattr(torch, target))))
        else:
            assert out is None


@pytest.mark.parametrize("bad", ["meta", "object", "none", "sparse"])
def test_targets_that_cannot_be_filled(tmp_path: Path, bad: str) -> None:
    save_file({"w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    target = {
        "meta": torch.empty(2, 2, device="meta"),
        "object": [1, 2],
        "none": None,
        "sparse": torch.ones(2, 2).to_sparse(),
    }[bad]
    assert set(all_codes({"w": target}, tmp_path)) == {"hf.target"}


def test_a_bool_that_is_neither_is_damage(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([True, False])}, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x02")
    with pytest.raises(DamagedError, match="other than 0 and 1"):
        hf.load(tmp_path, {"w": torch.zeros(2, dtype=torch.bool)})


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1000)}, tmp_path / "model.safetensors")
    manifest = hf.read_manifest(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DamagedError, match="ended while it was read"):
        hf.load(tmp_path, {"w": torch.zeros(1000)}, manifest=manifest)
    path.unlink()
    with pytest.raises(DamagedError, match="cannot be read"):
        hf.load(tmp_path, {"w": torch.zeros(1000)}, manifest=manifest)


SHAPES = [(7, 11), (3, 1100, 5), (2, 3, 2000), (5, 7, 3, 2), (40, 3000), (9,), ()]


@pytest.mark.parametrize("shape", SHAPES)
def test_any_box_of_a_file_is_read_right_and_little_more(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """Boxes at random, with a small staging buffer so that every path is taken."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    whole = torch.arange(count, dtype=torch.int32).reshape(shape)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    entry = hf.read_manifest(tmp_path).tensors["w"]
    generator = torch.Generator().manual_seed(0)
    old = hf_io.STAGING
    try:
        for staging in (old, 6000, 64):
            hf_io.STAGING = staging
            for _ in range(12):
                offsets, sizes = [], []
                for size in shape:
                    at = int(torch.randint(size, (1,), generator=generator))
                    offsets.append(at)
                    sizes.append(1 + int(torch.randint(size - at, (1,), generator=generator)))
                out = torch.full(sizes, -1, dtype=torch.int32)
                with hf_io.Files(tmp_path) as files:
                    hf_io.read_box(files, entry, tuple(offsets), tuple(sizes), out)
                    most = out.numel() * 4 + hf_io.GAP * max(
                        out.numel() // max(sizes[-1:] or [1]), 1
                    )
                    assert out.numel() * 4 <= files.bytes_read <= most
                box = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
                assert torch.equal(out, box)
    finally:
        hf_io.STAGING = old


def test_columns_of_wide_rows_are_read_without_the_gaps(tmp_path: Path) -> None:
    whole = torch.arange(64 * 8192, dtype=torch.float32).view(64, 8192)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    entry = hf.read_manifest(tmp_path).tensors["w"]
    out = torch.zeros(64, 2048)
    with hf_io.Files(tmp_path) as files:
        hf_io.read_box(files, entry, (0, 4096), (64, 2048), out)
        assert files.bytes_read == out.numel() * 4
    assert torch.equal(out, whole[:, 4096:6144])


def test_large_and_small_ranges_are_batched_and_cut() -> None:
    parts = [(i * 100, 100, 10_000 + i * 100) for i in range(2000)]
    parts += [(10**6, 3 * hf_io.BATCH_BYTES + 5, 7), (10**9, 1, 9)]
    groups = list(hf_io.batches(list(parts)))
    flat = [part for _, group in groups for part in group]
    assert sum(n for _, n, _ in flat) == sum(n for _, n, _ in parts)
    for start, group in groups:
        assert start == group[0][0]
        assert len(group) <= hf_io.BATCH_ITEMS
        assert sum(n for _, n, _ in group) <= hf_io.BATCH_BYTES
    assert len(groups) < 12


@pytest.mark.parametrize("align", [None, (1, 1, 1), (1, 4, 1)])
@pytest.mark.parametrize("limit", [1, 7, 50, 10_000])
def test_parts_of_a_box_cover_it_once(align: tuple[int, ...] | None, limit: int) -> None:
    shape, offsets, sizes = (5, 13, 7), (1, 2, 0), (3, 9, 7)
    seen = torch.zeros(shape, dtype=torch.int32)
    for at, size in split_box(shape, offsets, sizes, limit, align):
        seen[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))] += 1
        assert align != (1, 1, 1) or torch.Size(size).numel() <= limit or max(size) == 1
    inside = torch.zeros_like(seen)
    inside[1:4, 2:11, :] = 1
    assert torch.equal(seen, inside)


def test_what_is_dense() -> None:
    assert is_dense((4, 5, 6), (1, 2, 6))
    assert not is_dense((4, 5, 6), (2, 2, 6))
    assert is_dense((4, 5, 6), (1, 1, 3))
    assert is_dense((1, 5, 1), (1, 3, 1))
    assert is_dense((), ())


def test_the_progress_is_the_bytes(folder: Path) -> None:
    state = {key: filled(value) for key, value in stored().items()}
    seen: list[int] = []
    hf.load(folder, state, progress=seen.append)
    assert sum(seen) >= sum(v.numel() * v.element_size() for v in state.values())


def test_an_entry_with_other_fields_is_not_needed() -> None:
    entry = TensorEntry("a", (2,), "float32", (Shard((0,), (2,), "f", 8, 8),))
    assert entry.nbytes == 2 * ITEM_SIZE["float32"]


def test_tensors_larger_than_a_batch_are_put_together_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_io, "BATCH_BYTES", 1000)
    tensors = {f"w{i}": torch.randn(7 + 300 * (i % 3)) for i in range(12)}
    save_file(tensors, tmp_path / "model.safetensors")
    out = {key: filled(value) for key, value in tensors.items()}
    hf.load(tmp_path, out)
    assert all(torch.equal(out[key], tensors[key]) for key in tensors)
