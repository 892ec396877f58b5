"""Which layers are of which kind, as configs say it. Functions for the `sets` of families."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torchtitan_ckpt.errors import MappingError, Problem
from torchtitan_ckpt.mapping.expression import Config


def main(config: Config) -> range:
    return range(config["num_hidden_layers"])


def sparse(config: Config) -> frozenset[int]:
    """MoE layers by `mlp_only_layers` and `decoder_sparse_step` (Qwen)."""
    only, step = set(config["mlp_only_layers"]), config["decoder_sparse_step"]
    return frozenset(i for i in main(config) if i not in only and (i + 1) % step == 0)


def sparse_complement(config: Config) -> frozenset[int]:
    """The dense layers of such a config."""
    return frozenset(main(config)) - sparse(config)


def first_dense(config: Config) -> range:
    """Dense layers by `first_k_dense_replace` (DeepSeek)."""
    return range(min(config["first_k_dense_replace"], config["num_hidden_layers"]))


def after_dense(config: Config) -> range:
    """The MoE layers of such a config, without MTP."""
    return range(config["first_k_dense_replace"], config["num_hidden_layers"])


def hashed(config: Config) -> frozenset[int]:
    """Layers that route by token id: the first `num_hash_layers`, or as `mlp_layer_types` says."""
    count, kinds = config["num_hash_layers"], config["mlp_layer_types"]
    if count is None and kinds is not None:
        return frozenset(i for i, kind in enumerate(kinds) if kind == "hash_moe")
    return frozenset(range(min(count or 0, config["num_hidden_layers"])))


def routed(config: Config) -> frozenset[int]:
    """Layers that route by score."""
    return frozenset(main(config)) - hashed(config)


# transformers replaces `compress_ratios` by `layer_types`, and `num_hash_layers` by
# `mlp_layer_types`, when it saves a DeepSeek-V4 config.
_TYPES = {"sliding_attention": 0, "full_attention": 0}
_TYPES |= {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def ratios(config: Config) -> list[int]:
    """One compress ratio a main layer; 1, as torchtitan-npu writes it, means none, as 0 does."""
    given = config["compress_ratios"]
    if given is None:
        given = [_TYPES.get(kind, -1) for kind in config["layer_types"]]
    found = [0 if ratio == 1 else int(ratio) for ratio in given][: config["num_hidden_layers"]]
    if len(found) < config["num_hidden_layers"] or set(found) - {0, 4, 128}:
        raise MappingError(
            Problem(
                code="mapping.compress-ratios",
                what="compress_ratios does not fit the layers",
                expected=f"0, 4 or 128 for each of {config['num_hidden_layers']} layers",
                actual=f"{len(found)} entries of {sorted(set(found))}",
                fix="take compress_ratios from the published config.json",
            )
        )
    return found


def with_ratio(ratio: int) -> Callable[[Config], Collection[int]]:
    """The layers of one compress ratio."""
    return lambda config: frozenset(i for i, r in enumerate(ratios(config)) if r == ratio)
