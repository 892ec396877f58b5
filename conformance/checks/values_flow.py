"""Chapter `values`, second part: ties, the trainer's load, and DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from conformance.checks._words import by_words, count, differences, unfilled
from conformance.checks.keys_listed import copies
from conformance.fingerprint import State, same_bits
from conformance.lab import AdapterRaised, Direction, Lab, NotApplicable
from conformance.verdict import Finding, Told


def tied(lab: Lab) -> Iterator[Finding | Told]:
    """A declared pair comes back equal; other equal-shaped pairs are not copied over each other."""
    pairs = {a: s for a, s in lab.may.tied.items() if a in lab.native and s in lab.native}
    if not pairs:
        raise NotApplicable("no tied names are declared")
    aliases = {a: lab.export.targets().get(a, []) for a in pairs}
    files = lab.noise(lab.value_hf, salt=3)
    for alias, source in pairs.items():
        alone = {k: v for k, v in files.items() if k not in aliases[alias]}
        try:
            back = lab.convert("from_hf", alone)
        except AdapterRaised as error:
            yield Finding(
                what="from_hf refuses files that hold a tied parameter once",
                keys=(alias, source),
                expected=f"{alias} filled from {source}",
                actual=str(error),
                cause="the alias is asked of the files, which need not hold it",
                remedy="fill the alias from its source",
            )
            continue
        if alias not in back or source not in back or not same_bits(back[alias], back[source]):
            finding = Finding(
                what="a tied parameter is not filled when files hold it once",
                keys=(alias, source),
                expected=f"{alias} equal to {source}",
                actual="left out" if alias not in back else "another value",
                cause="the model keeps the alias at its initial value",
                remedy="fill the alias from its source",
            )
            never = alias not in lab.imported.leaves
            yield Told(finding, by="keys.import") if never else finding
    held = {copy: files[key].clone() for copy, key in copies(lab).items() if key in files}
    if held:
        yield from _twice(lab, files, held)


def _twice(lab: Lab, files: State, held: State) -> Iterator[Finding]:
    """What import makes of files that hold a tied parameter under a second name too."""
    try:
        back = lab.convert("from_hf", files | held)
    except AdapterRaised as error:
        yield Finding(
            what="from_hf refuses files that hold a tied parameter twice",
            keys=tuple(held),
            expected="what it makes of files that hold it once: the list has this key",
            actual=str(error),
            cause="a second name of a tied parameter is taken for an unknown key",
            remedy="skip it",
        )
        return
    for one in differences(lab.convert("from_hf", files), back):
        yield Finding(
            what="from_hf makes something else of files that hold a tied parameter twice",
            keys=(*held, *one.keys),
            coordinate=one.coordinate,
            expected="what it makes of files that hold it once",
            actual=one.actual,
            cause="the second name is read as another parameter",
            remedy="skip it",
        )


def load(lab: Lab) -> Iterator[Finding]:
    """What a trainer does: export a model full of NaN, fill those tensors in place, import."""
    leaves = lab.value_native
    hole: State = {}
    for key, leaf in leaves.items():
        value = lab.noise({key: leaf})[key]
        floating = value.is_floating_point() and value.element_size() > 1
        hole[key] = torch.full_like(value, float("nan")) if floating else torch.zeros_like(value)
    expected = lab.noise(leaves, salt=4)
    files = lab.convert("to_hf", expected)
    fresh = lab.convert("from_hf", files)
    held = [*_held("to_hf", files), *_held("from_hf", fresh)]
    if held:
        yield from held
        return
    adapter = lab.adapter()
    targets = lab.convert("to_hf", hole, adapter)
    lost = [k for k in files if k not in targets]
    if lost:
        yield Finding(
            what=f"to_hf does not ask for {count(len(lost), 'key')} when the model is full of NaN",
            keys=tuple(lost),
            expected="the same keys whatever the values are",
            actual=f"{len(targets)} of {count(len(files), 'key')}",
            cause="keys are chosen by value",
            remedy="choose keys by name",
        )
        return
    for key, target in targets.items():
        if key not in files or target.shape != files[key].shape:
            continue
        try:
            with torch.no_grad():
                target.copy_(files[key])
        except RuntimeError as error:
            yield Finding(
                what="a reader cannot fill what to_hf returned",
                keys=(key,),
                expected="a tensor that can be written in place",
                actual=str(error).splitlines()[0],
                cause="an expanded tensor: several elements share one place",
                remedy="return a tensor of its own memory",
            )
            return
    back = lab.convert("from_hf", targets, adapter)
    bad = {}
    for key, value in fresh.items():
        if key in back and back[key].shape == value.shape and not same_bits(back[key], value):
            nan = unfilled(value, back[key])
            bad[key] = "NaN is left: nobody wrote there" if nan else "another value"
    for words, keys in by_words(bad):
        yield Finding(
            what=f"a load in place leaves {count(len(keys), 'tensor')} wrong",
            keys=tuple(keys),
            expected="the values of the files",
            actual=words,
            cause="from_hf returns what to_hf saw, or two targets share memory",
            remedy="make from_hf depend on its argument only",
        )


def _held(direction: Direction, out: State) -> Iterator[Finding]:
    """What is no plain tensor, one finding for each way of not being one."""
    for is_so, actual, cause, remedy in _HELD:
        if keys := tuple(key for key, value in out.items() if is_so(value)):
            yield Finding(
                what=f"{direction} returns {count(len(keys), 'tensor')} that {actual}",
                keys=keys,
                expected="plain tensors, as in a model's state dict: they can be written in place",
                actual=actual,
                cause=cause,
                remedy=remedy,
            )


_HELD: tuple[tuple[Callable[[torch.Tensor], bool], str, str, str], ...] = (
    (
        lambda value: value.requires_grad,
        "autograd follows",
        "a Parameter, or a result that keeps what it was made from",
        "return detached tensors",
    ),
    (
        torch.Tensor.is_inference,
        "were made in inference mode",
        "torch.inference_mode: a model that takes them over cannot be trained",
        "use torch.no_grad",
    ),
)


def dtensor(lab: Lab) -> Iterator[Finding]:
    """On a mesh of one rank, DTensors give the values that plain tensors give."""
    state = lab.noise(lab.value_native, salt=5)
    plain = lab.convert("to_hf", state)
    plain_back = lab.convert("from_hf", plain)
    with _one_rank(lab.device.backend):
        for name, placements, mesh in _placements(lab.device.kind.value):
            placed = lab.on_device(state)
            sharded = {k: _distribute(v, mesh, placements) for k, v in placed.items()}
            adapter = lab.adapter()
            given: Mapping[str, Any] = sharded
            try:
                out = lab.call("to_hf", dict(sharded), adapter)
                yield from _same(lab, "to_hf", name, plain, out)
                given = out
                back = lab.call("from_hf", dict(out), adapter)
                yield from _same(lab, "from_hf", name, plain_back, back)
            except AdapterRaised as error:
                yield Finding(
                    what=f"{error.direction} refuses DTensors ({name})",
                    keys=_blamed(lab, error, given),
                    expected="what plain tensors give",
                    actual=str(error),
                    cause="a path that only DTensors take",
                    remedy="run each rule on DTensors too",
                )


def _blamed(lab: Lab, error: AdapterRaised, given: Mapping[str, Any]) -> tuple[str, ...]:
    """The first key that makes a conversion of DTensors raise by itself, and what it is made of."""
    export = error.direction == "to_hf"
    made = lab.export.targets() if export else lab.imported.sources
    for key, others in made.items():
        part = (key,) if export else tuple(sorted(others))
        try:
            lab.call("to_hf" if export else "from_hf", {k: given[k] for k in part if k in given})
        except AdapterRaised as again:
            if type(again.error) is type(error.error):
                return (key,) if export else (key, *part[:1])
    return tuple(given)[:1]


def _distribute(value: torch.Tensor, mesh: Any, placements: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    if value.dim() == 0:
        placements = [Replicate()] * len(placements)
    # One rank: the local tensor is the whole one, so no communication and no copy.
    return DTensor.from_local(value, mesh, list(placements), run_check=False)


def _placements(kind: str) -> Iterator[tuple[str, Any, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    fsdp = init_device_mesh(kind, (1,), mesh_dim_names=("shard",))
    yield "Shard(0)", (Shard(0),), fsdp
    hsdp = init_device_mesh(kind, (1, 1), mesh_dim_names=("replicate", "shard"))
    yield "Replicate, Shard(0)", (Replicate(), Shard(0)), hsdp


def _same(
    lab: Lab, direction: Direction, name: str, plain: State, out: Mapping[str, Any]
) -> Iterator[Finding]:
    from torch.distributed.tensor import DTensor

    wrong: dict[str, tuple[str, str]] = {}
    for key, value in plain.items():
        got = out.get(key)
        full = got.full_tensor() if isinstance(got, DTensor) else got
        if not isinstance(full, torch.Tensor):
            wrong[key] = ("a tensor", type(got).__name__ if key in out else "left out")
        elif full.layout != torch.strided:
            wrong[key] = ("a dense tensor", str(full.layout))
        elif tuple(full.shape) != tuple(value.shape):
            wrong[key] = (f"shape {tuple(value.shape)}", f"shape {tuple(full.shape)}")
        elif not same_bits(full, value):
            wrong[key] = ("the value of the plain tensor", "another value")
    new = [
        k
        for k, v in out.items()
        if k not in plain and isinstance(v, torch.Tensor) and v.layout == torch.strided
    ]
    wrong.update(dict.fromkeys(new, ("no such key", "a new key")))
    for (expected, actual), keys in by_words(wrong):
        yield Finding(
            what=f"{direction} gives {count(len(keys), 'DTensor')} otherwise ({name})",
            keys=tuple(keys),
            expected=expected,
            actual=actual,
            cause="a path that only DTensors take",
            remedy="run each rule on DTensors too",
        )


@contextmanager
def _one_rank(backend: str) -> Iterator[None]:
    """A process group of one, unless a group is there already; that one is left as it is."""
    import torch.distributed as dist

    if not dist.is_available():
        raise NotApplicable("this torch has no torch.distributed")
    if dist.is_initialized():
        if dist.get_world_size() != 1:
            raise NotApplicable("a process group of several ranks is already there")
        yield
        return
    dist.init_process_group(
        backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
