"""Subjects from an installed torchtitan: `titan:<model>[/<flavor>][?mtp=N]`.

The model is built on the meta device, so its size does not matter; the adapter is the one that
its model spec names, unchanged. What an adapter may do is declared here, with reasons.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from conformance.lab import MAX_ELEMENTS
from conformance.subject import Capabilities, Subject
from conformance.template import Leaf, native_template
from torchtitan_ckpt.errors import ConfigError, NotFoundError, Problem, nearest

_BIAS = "load-balancing state of the trainer; the published files have no such tensor"
_ROPE = "old files carry the rotary frequencies; models compute them"


def subject(name: str) -> Subject:
    """The Subject of a `titan:` name."""
    model, _, rest = name.removeprefix("titan:").partition("/")
    flavor, _, options = rest.partition("?")
    arguments: dict[str, Any] = {}
    for option in filter(None, options.split("&")):
        key, _, value = option.partition("=")
        if key != "mtp" or not value.isdigit():
            raise ConfigError(
                Problem(
                    code="check.bad-subject",
                    what=f"unknown option {option!r}",
                    where=name,
                    expected="?mtp=<number of MTP layers>",
                )
            )
        arguments["num_mtp_layers"] = int(value)
    spec = _spec(name, model, flavor, arguments)
    return of_spec(name, spec)


def of_spec(name: str, spec: Any) -> Subject:
    """A Subject of a torchtitan ModelSpec."""
    config, adapter = spec.model, spec.state_dict_adapter
    if adapter is None:
        raise ConfigError(
            Problem(
                code="check.no-adapter",
                where=name,
                what="this torchtitan model has no state-dict adapter",
            )
        )
    native = functools.lru_cache(maxsize=1)(lambda: _native(config))
    leaves = native()

    def factory(hf_assets_path: str | None = None) -> Any:
        return adapter(config, hf_assets_path)

    from conformance.subjects import families

    return Subject(
        name=name,
        adapter=factory,
        native=dict(leaves),
        hf=None,
        reference=families.reference_for_titan(config),
        capabilities=_capabilities(spec.name, config, leaves),
        forward=_forward(config),
        sizes=_sizes(config, leaves),
        resized=lambda layers: of_spec(name, _of_layers(spec, layers)),
    )


def _sizes(config: Any, leaves: Mapping[str, Leaf]) -> Mapping[str, tuple[int, ...]]:
    """Other numbers of layers that a search may draw: those whose models are small."""
    layers = getattr(config, "layers", ())
    last = sum(leaf.numel for k, leaf in leaves.items() if f"layers.{len(layers) - 1}." in k)
    whole = sum(leaf.numel for leaf in leaves.values())
    most = len(layers) + (MAX_ELEMENTS // 2 - whole) // max(1, last)
    # One layer has no experts, and the adapter of DeepSeek-V3 looks for one that has.
    found = tuple(n for n in (2, 3, 13) if n <= most) if len(layers) > 1 else ()
    return {"layers": found} if found else {}


def _of_layers(spec: Any, number: int) -> Any:
    """The spec of a model of so many layers: the first ones, or the last once more and again."""
    layers = spec.model.layers
    changed, changed.model = copy.copy(spec), copy.copy(spec.model)
    changed.model.layers = [*layers[:number], *layers[-1:] * (number - len(layers))]
    return changed


def _forward(config: Any) -> Callable[[Any], Any]:
    """torchtitan's own model against transformers', with the same numbers in both."""
    from conformance.lab import NotApplicable
    from conformance.subjects import forward, forward_titan
    from torchtitan_ckpt.families.model_config import from_titan

    try:
        sizes = from_titan(config)
    except ConfigError as error:
        why = f"{error.problems[0].what}, so none of transformers' models is known to be the same"

        def refuse(_: Any) -> Any:
            raise NotApplicable(why)

        return refuse
    sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    return forward.pair_of(sizes, functools.partial(forward_titan.run, config))


def _native(config: Any) -> Mapping[str, Leaf]:
    import torch

    with torch.device("meta"):
        model = config.build()
    return native_template(model)


def _capabilities(model: str, config: Any, leaves: Mapping[str, Leaf]) -> Capabilities:
    biased = any(key.endswith("expert_bias_E") for key in leaves)
    tied = bool(getattr(config, "enable_weight_tying", False))
    return Capabilities(
        native_only={"*.moe.expert_bias_E": _BIAS}
        if biased and model in ("qwen3", "gpt_oss", "qwen3_5")
        else {},
        hf_only={"model.layers.*.self_attn.rotary_emb.inv_freq": _ROPE}
        if model in ("llama3", "qwen3")
        else {},
        tied={"lm_head.weight": "tok_embeddings.weight"} if tied else {},
        # The trainer refuses tied weights with pipelines, so no stage comes alone.
        partial=not tied,
        quantized=model in ("deepseek_v3", "gpt_oss"),
    )


def _spec(name: str, model: str, flavor: str, arguments: Mapping[str, Any]) -> Any:
    try:
        import torchtitan.models
    except ImportError as error:
        raise NotFoundError(
            Problem(
                code="check.no-torchtitan",
                what="torchtitan is not installed",
                where=name,
                cause=str(error),
                fix="pip install 'torchtitan-ckpt[titan]'",
            )
        ) from error
    models = _model_names(torchtitan.models)
    if model not in models:
        near = nearest(model, models)
        raise NotFoundError(
            Problem(
                code="check.no-subject",
                what=f"torchtitan has no model {model!r}",
                expected=", ".join(sorted(models)),
                fix=f"did you mean {near}?" if near else "name one of them",
            )
        )
    try:
        module = importlib.import_module(f"torchtitan.models.{model}")
    except ImportError as error:
        raise NotFoundError(
            Problem(
                code="check.no-subject",
                what=f"torchtitan's {model} cannot be imported",
                cause=str(error),
                fix=f"install the package that provides {error.name!r}, or name another model"
                if error.name
                else "name another model",
            )
        ) from error
    registry = module.model_registry
    unknown = arguments.keys() - inspect.signature(registry).parameters.keys()
    if unknown:
        raise ConfigError(
            Problem(
                code="check.bad-subject",
                where=name,
                what=f"torchtitan's {model} takes no {', '.join(unknown)}",
            )
        )
    tables = [v for k, v in vars(module).items() if k.endswith("_configs") and isinstance(v, dict)]
    flavors = sorted(tables[0]) if tables else []
    debug = ("debugmodel", *(one for one in flavors if "debug" in one))
    flavor = flavor or next((one for one in debug if one in flavors), debug[0])
    try:
        return registry(flavor, **arguments)
    except KeyError as error:
        near = nearest(flavor, flavors)
        raise NotFoundError(
            Problem(
                code="check.no-subject",
                what=f"torchtitan's {model} has no flavor {flavor!r}",
                expected=", ".join(flavors),
                fix=f"did you mean {near}?" if near else "name one of them",
            )
        ) from error


def _model_names(package: Any) -> set[str]:
    import pkgutil

    return {m.name for m in pkgutil.iter_modules(package.__path__) if m.ispkg} - {"common"}
