"""Settings of the process that a conversion may neither leave changed nor follow.

Read, changed and put back here; no verdicts.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch


@dataclass(frozen=True, slots=True)
class Setting:
    """`other` is a value that it does not have by default."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    other: Any


SETTINGS = (
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled, False),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    Setting("number of threads", torch.get_num_threads, torch.set_num_threads, 3),
    Setting(
        "matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "high",
    ),
)
Changed = dict[str, tuple[Any, Any]]


@contextmanager
def put_back() -> Iterator[Changed]:
    """What is changed inside is put back, and told in this dict: name -> before and after."""
    before = [setting.read() for setting in SETTINGS]
    changed: Changed = {}
    try:
        yield changed
    finally:
        for setting, was in zip(SETTINGS, before, strict=True):
            if (now := setting.read()) != was:
                changed[setting.name] = was, now
                setting.write(was)


@contextmanager
def under(*settings: Setting) -> Iterator[None]:
    """These settings have their other value inside."""
    with put_back():
        for setting in settings:
            setting.write(setting.other)
        yield


@dataclass(frozen=True, slots=True)
class _Generator:
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    seed: Callable[[int], object]


_GENERATORS = (
    _Generator(
        "torch's",
        lambda: torch.get_rng_state().numpy(),  # a tensor's pickle holds its address
        lambda state: torch.set_rng_state(torch.from_numpy(state)),
        torch.manual_seed,
    ),
    _Generator("Python's", random.getstate, random.setstate, random.seed),
    _Generator("numpy's", numpy.random.get_state, numpy.random.set_state, numpy.random.seed),
)


@contextmanager
def seeded(number: int) -> Iterator[dict[str, bytes]]:
    """Random numbers begin at a seed inside; their states at the end are told in this dict."""
    before = [generator.read() for generator in _GENERATORS]
    after: dict[str, bytes] = {}
    for generator in _GENERATORS:
        generator.seed(number)
    try:
        yield after
    finally:
        for generator, was in zip(_GENERATORS, before, strict=True):
            after[generator.name] = pickle.dumps(generator.read())
            generator.write(was)
