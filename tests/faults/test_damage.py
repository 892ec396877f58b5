"""Bit flips and truncations of finished checkpoints: what verify and load find, and what not.

With checksums (`checksums=True`) `verify --deep` finds every flipped bit and every missing byte of
the data and of the metadata. Without them it finds what contradicts itself: sizes, the metadata's
structure, and every bit of a tensor's or object's bytes, because torch's own archives keep a CRC-32
of each member. The limit of both is a change that is consistent: whoever writes data and checksum
anew. The limit of a load is that it reads the CRC of items up to 1 MiB only; a flipped bit in a
larger tensor is loaded as it is, so files that travelled should be verified first.
"""

import random
import shutil

import pytest

from tests.faults import jobs
from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.formats.dcp_checksums import CHECKSUMS
from torchtitan_ckpt.verify import deep, structure

DATA = "__0_0.distcp"


@pytest.fixture(scope="module", params=[True, False], ids=["checksums", "bare"])
def saved(request, tmp_path_factory):
    """(a job's folder with steps 1 and 2, whether they carry checksums)."""
    folder = tmp_path_factory.mktemp("saved")
    with jobs.job(folder, wide=True, checksums=request.param) as job:
        job.train(2)
    return folder, request.param


def copy_of(saved, tmp_path):
    folder, has = saved
    shutil.copytree(folder, tmp_path / "job")
    return tmp_path / "job", tmp_path / "job" / "checkpoint" / "step-2", has


def findings(path):
    """What `verify --deep` says against a step, as text; empty when it finds it sound."""
    try:
        found = structure.check_structure(str(path))
        problems = list(found.problems)
        if found.manifest is not None:
            problems += deep.read_deep(found.manifest, threads=1).problems
    except CheckpointError as error:
        problems = list(error.problems)
    return "\n".join(map(str, problems))


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def bits_of(path):
    return range(8 * path.stat().st_size)


def test_a_sound_checkpoint_is_found_sound(saved, tmp_path):
    _, step, _ = copy_of(saved, tmp_path)
    assert findings(step) == ""


@pytest.mark.parametrize("name", [DATA, ".metadata"])
@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_verify_finds_every_flipped_bit_where_there_are_checksums(
    saved, tmp_path, seed, name, count
):
    _, step, has = copy_of(saved, tmp_path)
    if not has:
        pytest.skip("what is found without checksums is the next test's")
    rng = random.Random(f"{seed}{name}")
    missed = []
    for bit in rng.sample(bits_of(step / name), count):
        flip(step / name, bit)
        if not findings(step):
            missed.append(bit)
        flip(step / name, bit)
    assert missed == []
    assert findings(step) == ""


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_flipped_bit_never_makes_another_value_that_verify_calls_sound(
    saved, tmp_path, seed, count
):
    """Without checksums too: a bit is found, or what is loaded is what was saved.

    Undetected bits lie in what a zip archive does not need: padding, and names and times in its
    two directories of which the readers use one. Small items are made of that for the most part.
    """
    folder, step, has = copy_of(saved, tmp_path)
    if has:
        pytest.skip("the test above asks for more")
    rng = random.Random(f"{seed}bare")
    with jobs.job(folder, seed=9, wide=True, load_only=True) as job:
        job.manager.load(2)
        right = jobs.digest(job)
    wrong, unseen = [], 0
    for bit in rng.sample(bits_of(step / DATA), count):
        flip(step / DATA, bit)
        if not findings(step):
            unseen += 1
            with jobs.job(folder, seed=9, wide=True, load_only=True) as job:
                job.manager.load(2)
                wrong += [bit] if jobs.digest(job) != right else []
        flip(step / DATA, bit)
    assert wrong == []
    assert unseen < count / 2


@pytest.mark.parametrize("name", [DATA, ".metadata"])
def test_every_truncation_is_found_and_the_older_step_is_resumed(saved, tmp_path, name, seed):
    """Structurally: no checksum is wanted for that. Lengths near both ends, and in between."""
    folder, step, _ = copy_of(saved, tmp_path)
    whole = (step / name).read_bytes()
    rng = random.Random(f"{seed}{name}")
    lengths = [0, 1, len(whole) - 1, len(whole) - 8, *(rng.randrange(len(whole)) for _ in range(6))]
    for length in lengths:
        (step / name).write_bytes(whole[:length])
        assert findings(step), f"{name} cut to {length} bytes"
        with jobs.job(folder, seed=9, wide=True, load_only=True) as job:
            assert job.manager.load()
            assert job.progress.step == 1, f"{name} cut to {length} bytes"


def test_a_flipped_bit_in_a_small_tensor_is_not_loaded(saved, tmp_path):
    folder, step, _ = copy_of(saved, tmp_path)
    manifest = structure.check_structure(str(step)).manifest
    shard = manifest.tensors["up.weight"].shards[0]
    data = (step / shard.file).read_bytes()
    with jobs.job(folder, wide=True, load_only=True) as job:
        job.manager.load(2)
        value = jobs.bits(job.model.up.weight)
    at = data.index(value, shard.byte_offset)
    flip(step / shard.file, 8 * at + 3)
    with (
        jobs.job(folder, seed=9, wide=True, load_only=True) as job,
        pytest.raises(CheckpointError, match="does not fit the checksum"),
    ):
        job.manager.load(2)


def test_a_damaged_sidecar_is_said_and_stops_no_load(saved, tmp_path):
    folder, step, has = copy_of(saved, tmp_path)
    if not has:
        pytest.skip("there is no sidecar")
    text = (step / CHECKSUMS).read_bytes()
    (step / CHECKSUMS).write_bytes(text[: len(text) // 2])
    assert findings(step)
    with jobs.job(folder, seed=9, wide=True, load_only=True) as job:
        assert job.manager.load()
        assert job.progress.step == 2
