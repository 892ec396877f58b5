"""Drop-in for torchtitan's trainer: its `Configurable` conventions around our manager.

    from torchtitan_ckpt.titan import CheckpointManager
    checkpoint=CheckpointManager.Config(enable=True, interval=100)

`CheckpointManager.Config` is accepted wherever torchtitan wants its own, and its `build()` is
called by the trainer as it is. Needs torchtitan 0.3.0 (extra `titan`). All behaviour is in
`torchtitan_ckpt.manager`; this module only translates.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import field, fields, make_dataclass
from typing import Any, get_type_hints

from torchtitan.components.checkpointer import BaseCheckpointManager

from torchtitan_ckpt import manager
from torchtitan_ckpt.config import CheckpointConfig

_THEIRS = {f.name for f in fields(BaseCheckpointManager.Config)}
_TYPES = get_type_hints(CheckpointConfig)


def _accept_until_built(self: Any) -> None:
    """torchtitan checks its rules when a Config is made; ours are checked, all at once, when the
    manager is built, so that a registry's defaults may still be overridden."""


# torchtitan's fields come with its class; ours are added from the one place that lists them.
_Config: Any = make_dataclass(
    "Config",
    [
        (
            f.name,
            _TYPES[f.name],
            field(default_factory=f.default_factory)
            if callable(f.default_factory)
            else field(default=f.default),
        )
        for f in fields(CheckpointConfig)
        if f.name not in _THEIRS
    ],
    bases=(BaseCheckpointManager.Config,),
    namespace={"__post_init__": _accept_until_built, "__doc__": CheckpointConfig.__doc__},
    kw_only=True,
    slots=True,
)


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan has no types
    """Our `CheckpointManager` behind torchtitan's interface."""

    Config = _Config

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        ours = {f.name: getattr(config, f.name) for f in fields(CheckpointConfig)}
        self._manager = manager.CheckpointManager(
            CheckpointConfig(**ours),
            dataloader=dataloader,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states=states,
            sd_adapter=sd_adapter,
            base_folder=base_folder,
            hf_assets_path=getattr(sd_adapter, "hf_assets_path", None),
        )
        self.enable = config.enable

    @property
    def save_future(self) -> Future[Any] | None:
        """The background save in flight, if any; torchtitan asks whether it is None."""
        return self._manager.pending

    def _load(self, step: int = -1) -> bool:
        return self._manager.load(step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        return self._manager.save(curr_step, last_step)

    def _maybe_wait_for_staging(self) -> None:
        self._manager.maybe_wait_for_staging()

    def _wait_for_saving(self) -> None:
        self._manager.maybe_wait_for_saving()

    def _close(self) -> None:
        self._manager.close()


__all__: list[str] = ["CheckpointManager"]
