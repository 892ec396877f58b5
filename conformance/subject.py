"""What is put to the gate: an adapter, what it is measured against, and what it declares.

A `Subject` is data. It says how to make a fresh adapter, what the native state dict looks like,
what the Hugging Face side should look like, and what the adapter is allowed to do, each with a
reason. What it does not supply makes the checks that need it n/a, never absent. Turning the loose
inputs into templates is `template.py`; running checks is `bench.py`.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Convert = Callable[..., Any]


class Reference(Protocol):
    """An independent implementation of the same conversion. Its `name` appears in findings."""

    name: str

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]: ...

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]: ...


class Codec(Protocol):
    """What writes and reads the files of a subject, for the chapter `files`."""

    name: str

    def save(self, state_dict: dict[str, Any], folder: str, files: Mapping[str, int]) -> None: ...

    def load(self, folder: str, targets: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an adapter declares it does. Patterns are `fnmatch` globs; each value is a reason.

    native_only     native keys without a counterpart in the files
    hf_only         keys that files may hold and the trainer has no use for; import accepts them
    lossy           native or file keys whose values do not survive a round trip bit for bit
    tied            alias -> source, native names: two names of one parameter
    dtypes          file keys -> dtype that `to_hf` gives them whatever the model's dtype is
    also_reads      other native or file spellings accepted on import: template -> canonical
    consumes_input  `to_hf`/`from_hf` may empty the dict they are given (tensors are never written)
    partial         False: partial dicts may be refused
    quantized       `get_hf_storage_reader(path, from_quantized=True)` is meant to dequantize
    """

    native_only: Mapping[str, str] = field(default_factory=dict)
    hf_only: Mapping[str, str] = field(default_factory=dict)
    lossy: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    also_reads: Mapping[str, str] = field(default_factory=dict)
    consumes_input: bool = False
    partial: bool = True
    quantized: bool = False


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing under test.

    adapter     makes a fresh adapter; may accept `hf_assets_path=` (a folder with an index)
    native      a model, a state dict, a `Manifest`, key -> (shape, dtype), or a factory of these
    hf          a folder, an index, a list of keys, a `Manifest`, key -> (shape, dtype), a config
    reference   an independent conversion to compare values with, or None
    codec       what writes and reads files; None is this project's own and torch's
    to_hf       `call(adapter, state_dict)`, for adapters that want more arguments; likewise from_hf
    forward     `(lab) -> (logits, logits, name of the other)`: two models, this one with native
                weights, the other with what the adapter under test writes of them
                (`lab.convert("to_hf", state)`); logits are (batch, length, vocabulary)
    manager     a class with torchtitan's interface at the top of a module, for the chapters about
                saving and resuming: see `conformance.managed.Manager`
    job         a folder of Hugging Face files that real training jobs start from
    trainer     what Python is given to run such a job; flags follow, as the guide has them
    expect      check id -> reason why it is known to fail
    degrees     parallel degrees for the chapters `reshard` and `seed`: words as "fsdp2 x tp2"
    sizes       name -> other sizes of the model that a search may draw, the simplest first
    resized     `(**some of those sizes) -> Subject`: the same adapter on a model of these sizes
    values_on   which layers values are checked on: None (the gate decides by size) or numbers
    notes       where the inputs come from, printed with the report
    """

    name: str
    adapter: Callable[..., Any] | None = None
    native: Any = None
    hf: Any = None
    reference: Reference | Callable[[], Reference | None] | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    expect: Mapping[str, str] = field(default_factory=dict)
    degrees: tuple[Any, ...] = ()
    codec: Codec | None = None
    to_hf: Convert | None = None
    from_hf: Convert | None = None
    forward: Callable[..., tuple[Any, Any, str]] | None = None
    manager: Callable[..., Any] | None = None
    job: str | None = None
    trainer: tuple[str, ...] = ("-m", "torchtitan_ckpt.train")
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    resized: Callable[..., Subject] | None = None
    values_on: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()


def place_of(subject: Subject) -> str:
    """`pkg.mod:NAME` of a subject that a command line can find from here, or an empty string."""
    if ":" in subject.name:
        return subject.name
    for name, module in list(sys.modules.items()):
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            place = _within(value, subject)
            if place is not None and _found_from_here(name, getattr(module, "__file__", None)):
                return f"{name}:{attribute}{place}"
    return ""


def _within(value: Any, subject: Subject) -> str | None:
    """What follows the name of `value` to name a subject that it is, or holds as a list."""
    if value is subject:
        return ""
    # Not isinstance, which asks other people's modules for attributes of theirs.
    if type(value) in (list, tuple) and value and type(value[0]) is Subject:
        return next((f".{n}" for n, one in enumerate(value) if one is subject), None)
    return None


def _found_from_here(module: str, file: str | None) -> bool:
    """Whether a module of this name lies in the working folder, or is installed."""
    roots = (os.getcwd(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    stems = [os.path.join(root, *module.split(".")) for root in roots]
    return file in [s + end for s in stems for end in (".py", f"{os.sep}__init__.py")]


def matches(key: str, patterns: Iterable[str]) -> str | None:
    """The first pattern that `key` matches, or None. `[` is literal: keys never use classes."""
    for pattern in patterns:
        if key == pattern or fnmatch.fnmatchcase(key, pattern.replace("[", "[[]")):
            return pattern
    return None


_NUMBER = re.compile(r"(?<![0-9A-Za-z_])[0-9]+(?![0-9A-Za-z_])")


# Checks ask the same of each key many times, and the largest models have some 100,000.
_remembered = functools.lru_cache(maxsize=1 << 18)


@_remembered
def template_of(key: str) -> str:
    """A key with its whole numbers as `{}`: keys of one template differ only in numbers.

    >>> template_of("layers.3.moe.experts.11.w1")
    'layers.{}.moe.experts.{}.w1'
    """
    return _NUMBER.sub("{}", key)


@_remembered
def numbers_of(key: str) -> tuple[int, ...]:
    """The whole numbers of a key, in order."""
    return tuple(int(number) for number in _NUMBER.findall(key))
