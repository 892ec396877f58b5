"""Which table or adapter a conversion goes through, and which names the source has.

The family comes from the options or from a config.json; the native generation and the expert
format come from the keys, unless the options say otherwise. Reads no tensor.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_ckpt import families
from torchtitan_ckpt.adapter import MappingAdapter, StateDictAdapter
from torchtitan_ckpt.convert.options import Options
from torchtitan_ckpt.errors import CheckpointError, ConfigError, MappingError, Problem, list_keys
from torchtitan_ckpt.families import model_config
from torchtitan_ckpt.mapping.family import Family
from torchtitan_ckpt.mapping.rule import HF, NATIVE
from torchtitan_ckpt.published import config_of


@dataclass(frozen=True, slots=True)
class Model:
    """A config, its family, and the folder that the config lies in (None for a published name)."""

    family: Family
    config: dict[str, Any]
    folder: Path | None


def find_model(options: Options, source: Path) -> Model | None:
    """The model by the options, or by a config.json in or beside the source; None without one.

    Raises ConfigError or MappingError where the options name something that is not there.
    """
    config: dict[str, Any] | None = None
    folder: Path | None = None
    if options.config is not None:
        path = Path(options.config)
        if path.exists():
            folder = path if path.is_dir() else path.parent
            config = model_config.read(path, None)
        else:
            config = config_of(options.config)
    else:
        for place in (source, source.parent) if source.is_dir() else (source.parent,):
            if (place / "config.json").is_file():
                folder, config = place, model_config.read(place, None)
                break
    if config is None:
        if options.family is not None:
            families.get(options.family)
        return None
    if options.family is not None:
        return Model(families.get(options.family), config, folder)
    try:
        return Model(families.of_config(config), config, folder)
    except MappingError:
        if options.config is not None and options.adapter is None:
            raise
        return None


def need_model(model: Model | None, options: Options, why: str) -> Model:
    """The model, or the error that says how to name it."""
    if model is not None:
        return model
    raise ConfigError(
        Problem(
            code="convert.no-config",
            what=f"{why}, and there is no config.json that says which model this is",
            where=options.src,
            expected=f"a family: {', '.join(families.names())}",
            actual=f"--family {options.family} alone has no sizes" if options.family else "",
            fix="add --config with the model's config.json, its folder, or a published name "
            "(or --adapter pkg.mod:factory)",
        )
    )


@dataclass(frozen=True, slots=True)
class Native:
    """One set of native names: the adapter of a generation and an expert format."""

    adapter: MappingAdapter
    experts: str

    def knows(self, keys: Iterable[str], side: int = NATIVE) -> int:
        """How many of these keys the table has on a side."""
        index = self.adapter.mapping.index(side)
        return sum(index.match(key) is not None for key in keys)


def native_names(keys: Iterable[str], model: Model, options: Options) -> Native:
    """The native names that these keys are written in: the candidate that knows most of them."""
    names = list(keys)
    degree = options.repair_w13_degree
    given = options.generation
    candidates = []
    for generation in model.family.generations if given is None else (given,):
        for experts in ("standard", "gmm") if generation == "npu" else ("standard",):
            if degree == 1 or experts == "gmm":
                candidates.append(named(model, options, generation, experts, w13_shards=degree))
    if not candidates:
        raise ConfigError(
            Problem(
                code="convert.repair",
                what="only fused experts (w13) of generation npu can need the repair",
                where="--repair-w13-degree",
                actual=f"generation {given}",
                fix="leave --repair-w13-degree out",
            )
        )
    return max(candidates, key=lambda one: one.knows(names))


def named(
    model: Model,
    options: Options,
    generation: str | None = None,
    experts: str = "standard",
    *,
    mtp: bool | None = None,
    w13_shards: int = 1,
) -> Native:
    """Native names as asked for."""
    adapter = MappingAdapter(
        model.config,
        family=model.family,
        generation=generation,
        experts=experts,
        mtp=False if options.no_mtp else mtp,
        w13_shards=w13_shards,
    )
    return Native(adapter, experts)


def has_hf_names(keys: Iterable[str], native: Native) -> bool:
    """Whether these keys are Hugging Face names and not native ones."""
    names = list(keys)
    return native.knows(names) < native.knows(names, HF)


def load_adapter(text: str, options: Options) -> StateDictAdapter:
    """The adapter that `pkg.mod:factory` makes; the factory gets the config's path if it takes one.

    A class with the protocol's methods is a factory too.
    """
    module_name, _, name = text.partition(":")
    try:
        if not name:
            raise ValueError("no colon in it")
        made: Any = getattr(importlib.import_module(module_name), name)
        if isinstance(made, type) or not _is_adapter(made):
            wanted = [
                p
                for p in inspect.signature(made).parameters.values()
                if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ]
            if len(wanted) > 1:
                raise ValueError(f"it wants {len(wanted)} arguments; one, the config, is passed")
            made = made(*((options.config or options.src,) if wanted else ()))
    except CheckpointError:
        raise
    except Exception as error:
        raise ConfigError(
            Problem(
                code="convert.adapter",
                what="the adapter cannot be made",
                where=text,
                expected="pkg.mod:factory, a function of no argument or of the config's path",
                actual=f"{type(error).__name__}: {error}",
                fix="check the name and PYTHONPATH",
            )
        ) from error
    if not _is_adapter(made):
        raise ConfigError(
            Problem(
                code="convert.adapter",
                what="what was made is no state-dict adapter",
                where=text,
                expected="an object with to_hf and from_hf",
                actual=type(made).__name__,
            )
        )
    found: StateDictAdapter = made
    return found


def _is_adapter(made: Any) -> bool:
    return callable(getattr(made, "to_hf", None)) and callable(getattr(made, "from_hf", None))


def refuse_lora(keys: Iterable[str], where: str) -> None:
    """LoRA and PEFT weights are not a model: refused by name, never skipped."""
    marks = ("lora_", "base_model.model.", ".lokr_", ".dora_", "modules_to_save")
    found = [key for key in keys if any(mark in key for mark in marks)]
    if found:
        raise MappingError(
            Problem(
                code="convert.lora",
                what=f"{len(found)} tensors belong to a LoRA or PEFT adapter",
                where=where,
                actual=list_keys(found),
                fix="merge the adapter into its base model first",
            )
        )
