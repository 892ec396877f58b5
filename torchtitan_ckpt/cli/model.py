"""Options that several verbs share: which model is meant. No verb of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_ckpt.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torchtitan_ckpt.mapping.family import Family


def read_model(config: str | None, family: str | None) -> tuple[Family, dict[str, Any]]:
    """The family and the config of `--config` and `--family`.

    `config` is a published model's name, a config.json, or the folder that holds one; without it
    the first published model of `family` stands for the family. Raises ConfigError.
    """
    from torchtitan_ckpt import families
    from torchtitan_ckpt.families import model_config
    from torchtitan_ckpt.published import CONFIGS, config_of

    if config is None:
        if family is None:
            raise ConfigError(
                Problem(
                    code="cli.no-model",
                    what="neither --config nor --family says which model is meant",
                    fix=f"--family {families.names()[0]}, or --config with a config.json or one of "
                    f"{', '.join(CONFIGS)}",
                )
            )
        found = families.get(family)
        values = next(dict(c) for c in CONFIGS.values() if c["model_type"] in found.model_types)
        return found, values
    values = model_config.read(config, None) if Path(config).exists() else config_of(config)
    return families.of_config(values) if family is None else families.get(family), values
