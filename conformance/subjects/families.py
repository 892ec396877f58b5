"""Shipped subjects, one for each family of this project, and references made from families.

A family's own table judges other adapters; it does not judge itself: the shipped subjects are
compared with torchtitan's adapter where torchtitan has the family and is installed, else with a
conversion that was written down apart from the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from conformance.subject import Capabilities, Reference, Subject
from conformance.subjects import forward
from conformance.subjects.written import written
from conformance.template import FileList, Leaf, leaf_of
from torchtitan_ckpt.errors import CheckpointError

_MTP = "the hub's copies of the embedding and the head for MTP mean nothing to the trainer"


class FamilyReference:
    """The mapping of a family's adapter as the independent side of a comparison."""

    def __init__(self, adapter: Any) -> None:
        self.mapping = adapter.mapping
        self.name = f"torchtitan_ckpt family {self.mapping.name}"
        self.stored = stored_keys(adapter)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return self.mapping.to_hf(state_dict)  # type: ignore[no-any-return]

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return self.mapping.from_hf(hf_state_dict)  # type: ignore[no-any-return]


class AdapterReference:
    """Another project's adapter as the independent side of a comparison."""

    def __init__(self, name: str, make: Any) -> None:
        self.name = name
        self._make = make

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return self._make().to_hf(dict(state_dict))  # type: ignore[no-any-return]

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return self._make().from_hf(dict(hf_state_dict))  # type: ignore[no-any-return]


def subject(name: str) -> Subject:
    """The shipped subject of a family: this project's adapter on a small config."""
    from conformance.subjects import configs

    config = configs.CONFIGS[name]
    return replace(
        of_config(name, config),
        sizes=configs.sizes(config),
        resized=lambda **sizes: of_config(name, configs.resized(config, **sizes)),
    )


def of_config(
    name: str,
    config: Mapping[str, Any],
    *,
    job: str | None = None,
    files: FileList | None = None,
) -> Subject:
    """This project's adapter on a Hugging Face config.

    `job` is a folder for the chapter `job`; `files` what the model's files are known to hold.
    """
    from torchtitan_ckpt.adapter import MappingAdapter
    from torchtitan_ckpt.mapping import keys

    # No closure: rank processes are sent it.
    factory = partial(MappingAdapter, dict(config))
    made = factory()
    mapping = made.mapping
    reference = titan_reference(made.family.name, config) or written(
        made.family.name, config, made.generation
    )
    may = _capabilities(mapping)
    # Copies that the table declares; a second implementation need not write them.
    copies = {key: leaf for key, leaf in _written(mapping).items() if key in may.hf_only}
    extras = {**copies, **_extras(mapping)}

    def listed() -> FileList:
        if files is not None:
            return FileList({**extras, **files.leaves}, files.source, files.stored)
        stored = stored_keys(made)
        if reference is None:
            return FileList(
                {**_written(mapping), **extras}, f"the family's own list ({mapping.name})", stored
            )
        theirs = reference.to_hf(_meta(keys.native_entries(mapping)))
        known = {key: leaf_of(value) for key, value in theirs.items()}
        return FileList({**extras, **known}, f"reference {reference.name}", stored)

    return Subject(
        name=name,
        adapter=factory,
        native=_leaves(keys.native_entries(mapping)),
        hf=listed,
        reference=reference,
        capabilities=may,
        job=job,
        forward=forward.pair_of(config),
        notes=()
        if reference is not None
        else (
            "no second implementation of this family is installed: keys are compared with the "
            "family's own list, and values of either direction with nothing",
        ),
    )


def _written(mapping: Any) -> dict[str, Leaf]:
    from torchtitan_ckpt.mapping import keys

    return _leaves(keys.hf_entries(mapping))


def stored_keys(adapter: Any) -> tuple[str, ...]:
    """What lies in the published files of a family that is quantized; nothing for another.

    Scales, and the copies that mean nothing to the trainer: an index lists them all.
    """
    if not adapter.family.layouts_for(adapter.config):
        return ()
    return tuple(adapter.hf_entries(declared=True, stored=True))


def _extras(mapping: Any) -> dict[str, Leaf]:
    """File keys that a table declares and does not write."""
    from torchtitan_ckpt.mapping import keys

    written = keys.hf_entries(mapping)
    every = keys.hf_entries(mapping, declared=True)
    return _leaves({key: entry for key, entry in every.items() if key not in written})


def _meta(entries: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {
        key: torch.empty(tuple(e.shape), dtype=getattr(torch, e.dtype), device="meta")
        for key, e in entries.items()
    }


def _leaves(entries: Mapping[str, Any]) -> dict[str, Leaf]:
    return {key: Leaf(tuple(entry.shape), entry.dtype) for key, entry in entries.items()}


def _capabilities(mapping: Any) -> Capabilities:
    """What a family's table declares, as a subject declares it."""
    from torchtitan_ckpt.mapping import HfOnly, NativeOnly, Tied

    native_only: dict[str, str] = {}
    hf_only: dict[str, str] = {}
    tied: dict[str, str] = {}
    for entry in mapping.entries:
        if isinstance(entry, NativeOnly):
            native_only[_glob(entry.key)] = entry.why
        elif isinstance(entry, Tied) and entry.side == "native":
            tied[entry.key] = entry.to
        elif isinstance(entry, HfOnly | Tied):
            for key in _instances(entry):
                hf_only[key] = entry.why
    # The reader is every family's: it goes by dtypes, shapes and keys alone.
    return Capabilities(native_only=native_only, hf_only=hf_only, tied=tied, quantized=True)


def _instances(entry: Any) -> list[str]:
    from torchtitan_ckpt.mapping.mapping import bindings

    return [entry.template.render(b) for b in bindings(entry.template.names, entry.where)]


def _glob(key: str) -> str:
    import re

    return re.sub(r"\{[^{}]*\}", "*", key)


def titan_reference(name: str, config: Mapping[str, Any]) -> Reference | None:
    """torchtitan's adapter of a family on a Hugging Face config, or None."""
    make = {"llama3": _llama3, "qwen3": _qwen3, "qwen3_moe": _qwen3, "deepseek_v3": _deepseek_v3}
    if name not in make:
        return None
    try:
        adapter, rope = make[name]()
        from importlib.metadata import version

        titan = f"torchtitan {version('torchtitan')} {adapter.__name__}"
    except ImportError:
        return None
    model = _titan_config(config, rope)
    return AdapterReference(titan, lambda: adapter(model, None))


def _llama3() -> tuple[Any, Any]:
    from torchtitan.models.common.rope import ComplexRoPE
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    return Llama3StateDictAdapter, ComplexRoPE.Config


def _qwen3() -> tuple[Any, Any]:
    from torchtitan.models.common.rope import CosSinRoPE
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    return Qwen3StateDictAdapter, CosSinRoPE.Config


def _deepseek_v3() -> tuple[Any, Any]:
    from torchtitan.models.common.rope import ComplexRoPE
    from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter

    return DeepSeekV3StateDictAdapter, ComplexRoPE.Config


def _titan_config(config: Mapping[str, Any], rope: Any) -> Any:
    """The fields of a torchtitan model config that its adapters read."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[name] for name in names if config.get(name)), None)
    dense = set(config.get("mlp_only_layers", ())) | set(
        range(config.get("first_k_dense_replace", 0))
    )
    angles = rope(
        dim=config.get("qk_rope_head_dim") or config["head_dim"], max_seq_len=16, theta=10000.0
    )

    def layer(number: int) -> Any:
        sparse = experts is not None and number not in dense
        return SimpleNamespace(
            attention=SimpleNamespace(
                n_heads=config["num_attention_heads"],
                n_kv_heads=config["num_key_value_heads"],
                head_dim=config.get("head_dim"),
                q_lora_rank=config.get("q_lora_rank") or 0,
                rope=angles,
            ),
            moe=SimpleNamespace(num_experts=experts) if sparse else None,
        )

    return SimpleNamespace(
        dim=config["hidden_size"],
        layers=[layer(i) for i in range(config["num_hidden_layers"])],
        mtp_layers=[None] * config.get("num_nextn_predict_layers", 0),
        enable_weight_tying=config["tie_word_embeddings"],
    )


def reference_for_titan(config: Any) -> Reference | None:
    """This project's mapping for a torchtitan model config, where there is a family for it."""
    from torchtitan_ckpt.adapter import MappingAdapter

    try:
        return FamilyReference(MappingAdapter(config))
    except (CheckpointError, AttributeError, KeyError, TypeError):
        return None


def extras_of(reference: Reference | None) -> Mapping[str, str]:
    """File keys that a family declares as meaning nothing to the trainer, with reasons."""
    if not isinstance(reference, FamilyReference):
        return {}
    return _capabilities(reference.mapping).hf_only


def file_list_of_config(config: dict[str, Any]) -> FileList:
    """What the files of a Hugging Face config hold, by the family's table."""
    from torchtitan_ckpt.adapter import MappingAdapter

    mapping = MappingAdapter(config).mapping
    return FileList(_written(mapping), f"the family's own list ({mapping.name})")
