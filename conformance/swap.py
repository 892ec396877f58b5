"""A model of torchtitan-npu's SwapOptimizer, so that managers can be judged without an NPU.

Own code, from public descriptions. Between steps the moments live in host memory (pinned where an
accelerator is in use) and the optimizer's own state holds placeholders: tensors of the right shape
whose storage was resized to zero. `step` sits in the param group, `max_exp_avg_sq` is None without
amsgrad, and the copies to the host are still on their way when `step()` returns. Two generations:

- `SwapAdamW`: the one above. On a CPU the late copies are real too: the host holds old bytes until
  `finish()`, as on a device whose stream lags behind.
- `MappedAdamW`: moments in host memory that the device maps (`empty_with_swapped_memory` of
  torch_npu); nothing is emptied, the rest is the same.

Neither speaks a checkpoint protocol, as the originals do not; `speak` adds that. Updates are
bitwise those of `torch.optim.AdamW(foreach=False)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from torchtitan_ckpt import device

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, a gradient or a moment; plain tensors are their own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class MappedAdamW(Optimizer):
    """The later generation: moments that stay readable, `step` in the group, None in the state.

    `allocate(parameter)` makes a moment; on an NPU, torch_npu's swapped memory.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        allocate: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": False,
            "step": 0,
        }
        super().__init__(params, defaults)
        self.allocate = allocate

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            wanted = MOMENTS if group["amsgrad"] else MOMENTS[:2]
            state.update(dict.fromkeys(MOMENTS))
            state.update({key: self.allocate(parameter).zero_() for key in wanted})
        self.before_update(parameter)
        assert parameter.grad is not None
        adamw(
            [local(parameter)],
            [local(parameter.grad)],
            [local(state["exp_avg"])],
            [local(state["exp_avg_sq"])],
            [local(state["max_exp_avg_sq"])] if group["amsgrad"] else [],
            [torch.tensor(float(group["step"] - 1))],
            foreach=False,
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        self.after_update(parameter)

    def before_update(self, parameter: Tensor) -> None:
        """Nothing to bring in: the device maps the host's memory."""

    def after_update(self, parameter: Tensor) -> None:
        """Nothing to move out."""


class SwapAdamW(MappedAdamW):
    """The first generation: moments are copied out after each update and their storage emptied."""

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **options)
        self.host: dict[Tensor, dict[str, Tensor]] = {}
        self._pending: list[Callable[[], Any]] = []
        self._streams: dict[str, device.Stream] = {}

    def finish(self) -> None:
        """Wait for every copy that is still on its way."""
        pending, self._pending = self._pending, []
        for move in pending:
            move()

    def before_update(self, parameter: Tensor) -> None:
        self.finish()
        for key, host in self.host.get(parameter, {}).items():
            part = local(self.state[parameter][key])
            part.untyped_storage().resize_(part.numel() * part.element_size())
            part.copy_(host, non_blocking=True)

    def after_update(self, parameter: Tensor) -> None:
        held = self.host.setdefault(parameter, {})
        for key in MOMENTS:
            moment = self.state[parameter][key]
            if moment is not None:
                part = local(moment)
                if key not in held:
                    held[key] = device.of(part).host_empty(part.shape, part.dtype)
                self._move_out(part, held[key])

    def empty(self, parameter: Tensor, host: dict[str, Tensor]) -> None:
        """Hold `host` as the truth for `parameter`, with placeholders on its device."""
        self.host[parameter] = host
        state: dict[str, Any] = dict.fromkeys(MOMENTS)
        for key in host:
            state[key] = torch.zeros_like(parameter)
            local(state[key]).untyped_storage().resize_(0)
        self.state[parameter] = state

    def _move_out(self, part: Tensor, host: Tensor) -> None:
        where = device.of(part)
        if where.kind is device.DeviceKind.CPU:
            late = part.clone()
            self._pending.append(lambda: host.copy_(late))
        else:
            stream = self._streams.setdefault(where.kind.value, where.stream())
            stream.wait_stream(where.current_stream())
            with where.use(stream):
                host.copy_(part, non_blocking=True)
            self._pending.append(stream.record_event().synchronize)
            where.current_stream().wait_stream(stream)
        part.untyped_storage().resize_(0)


def required(group: Mapping[str, Any]) -> tuple[str, ...]:
    """What a checkpoint must have of a parameter that has state."""
    return ("step", *(MOMENTS if group["amsgrad"] else MOMENTS[:2]))


def step_of(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """The step of a parameter's group, as a checkpoint has it with the parameter's state."""
    return torch.tensor(float(_group_of(optimizer, parameter)["step"]))


def steps_of(optimizer: Optimizer, states: Mapping[Tensor, Mapping[str, Any]]) -> Mapping[int, int]:
    """The steps that states tell of their groups, by the group's id.

    Raises ValueError for states from which nobody could go on.
    """
    steps: dict[int, int] = {}
    for parameter, state in states.items():
        group = _group_of(optimizer, parameter)
        lacking = [key for key in required(group) if key not in state]
        if lacking:
            shape = tuple(parameter.shape)
            raise ValueError(f"the state of a parameter {shape} lacks {', '.join(lacking)}")
        if steps.setdefault(id(group), int(state["step"])) != int(state["step"]):
            raise ValueError("parameters of one group were saved at another step each")
    return steps


def take_steps(optimizer: Optimizer, steps: Mapping[int, int]) -> None:
    """Set the groups that states tell of; any other keeps its own, which came with the group."""
    for group in optimizer.param_groups:
        group["step"] = steps.get(id(group), group["step"])


def _group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    groups: Iterable[dict[str, Any]] = optimizer.param_groups
    return next(g for g in groups if any(p is parameter for p in g["params"]))


class SwapState:
    """Tells a checkpoint where a `SwapAdamW` keeps the truth (`CheckpointableState`)."""

    def __init__(self, optimizer: SwapAdamW) -> None:
        self._optimizer = optimizer

    def checkpoint_wait(self) -> None:
        self._optimizer.finish()

    def checkpoint_state(self, parameter: Tensor) -> Mapping[str, Any]:
        held = self._optimizer.host.get(parameter)
        if not held:
            return {}
        return {"step": step_of(self._optimizer, parameter), **held}

    def checkpoint_required(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return required(group)

    def checkpoint_restore(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        steps = steps_of(self._optimizer, states)
        new = {
            parameter: {
                key: self._pinned(parameter, value) for key, value in state.items() if key != "step"
            }
            for parameter, state in states.items()
        }
        self._optimizer.finish()
        self._optimizer.host.clear()
        self._optimizer.state.clear()
        take_steps(self._optimizer, steps)
        for parameter, host in new.items():
            self._optimizer.empty(parameter, host)

    def _pinned(self, parameter: Tensor, value: Tensor) -> Tensor:
        host = device.of(local(parameter)).host_empty(value.shape, value.dtype)
        return host.copy_(value)


def speak(optimizer: SwapAdamW) -> SwapAdamW:
    """Let `optimizer` tell checkpoints where its state lies, without changing its class."""
    optimizer.checkpointable = SwapState(optimizer)  # type: ignore[attr-defined]
    return optimizer
