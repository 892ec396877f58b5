"""Managers that are wrong about one kind of optimizer state, for the chapter optimizer."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from conformance.swap import MappedAdamW, SwapAdamW
from tests.specimens.edited import HEAD, KEY, TABLE, Edited
from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.formats import dcp


class TorchFlattening(Edited):
    """torch's own flattening, unmodified: the guide's NotImplementedError, on save and on load."""

    def save(self, step: int, last_step: bool = False) -> Any:
        self.flattened()
        return self.inner.save(step, last_step)

    def load(self, step: int = -1) -> Any:
        self.flattened()
        return self.inner.load(step)

    def flattened(self) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for part, optimizer in zip(self.job["model_parts"], self.job["optimizers"], strict=True):
            if isinstance(optimizer, MappedAdamW) and optimizer.state:
                get_optimizer_state_dict(part, optimizer, options=options)


class NoneBecomesZeros(Edited):
    def loaded(self) -> None:
        for _, parameter, optimizer in self.parameters():
            if type(optimizer) is MappedAdamW:
                state = optimizer.state[parameter]
                state["max_exp_avg_sq"] = torch.zeros_like(parameter)


class NoneOverMoments(Edited):
    def load(self, step: int = -1) -> Any:
        try:
            return self.inner.load(step)
        except CheckpointError as error:
            keys = FileSystemReader(str(self.newest())).read_metadata().state_dict_metadata
            if "exp_avg" not in str(error) or f"optimizer.state.{KEY}.exp_avg" not in keys:
                raise
            self.state_of(KEY)["exp_avg"] = None
            return True


class LostWhereGradientsAre(Edited):
    def loaded(self) -> None:
        for _, parameter, optimizer in self.parameters():
            if parameter.grad is not None and len(optimizer.param_groups) == 1:
                optimizer.state.pop(parameter, None)


class StateMadeUp(Edited):
    def loaded(self) -> None:
        for _, parameter, optimizer in self.parameters():
            if isinstance(optimizer, torch.optim.SGD):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class StateInTheParametersDtype(Edited):
    def loaded(self) -> None:
        for _, parameter, optimizer in self.parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
                    optimizer.state[parameter][key] = value.to(parameter.dtype)


class StepAsATensor(Edited):
    def loaded(self) -> None:
        for _, parameter, optimizer in self.parameters():
            state = optimizer.state.get(parameter, {})
            if type(state.get("step")) is int:
                state["step"] = torch.tensor(float(state["step"]))


class PairedByPosition(Edited):
    def save(self, step: int, last_step: bool = False) -> Any:
        names, order = [name for name, _, _ in self.parameters()], Path(self.base, "order.json")
        if len(self.job["optimizers"][0].param_groups) == 2 and not order.is_file():
            order.write_text(json.dumps(names))
        return self.inner.save(step, last_step)

    def loaded(self) -> None:
        order = Path(self.base, "order.json")
        if not order.is_file():
            return
        states = {name: o.state.get(p) for name, p, o in self.parameters()}
        for saved, (_, parameter, optimizer) in zip(
            json.loads(order.read_text()), list(self.parameters()), strict=True
        ):
            if states.get(saved):
                optimizer.state[parameter] = states[saved]


class StateForEveryParameter(Edited):
    def loaded(self) -> None:
        for _, parameter, optimizer in self.parameters():
            stepped = isinstance(optimizer, torch.optim.AdamW) and optimizer.state
            if stepped and not optimizer.state.get(parameter):
                names = ("exp_avg", "exp_avg_sq")
                optimizer.state[parameter] = {n: torch.zeros_like(parameter) for n in names}


class FrozenIsForgotten(Edited):
    def loaded(self) -> None:
        for _, parameter, optimizer in self.parameters():
            if not parameter.requires_grad:
                optimizer.state.pop(parameter, None)


class HostMemoryForgotten(Edited):
    def loaded(self) -> None:
        for _, parameter, optimizer in self.parameters():
            if hasattr(optimizer, "checkpointable"):
                for value in optimizer.host.get(parameter, {}).values():
                    value.zero_()


class PlaceholdersOverMoments(Edited):
    """The save copies the emptied placeholders out once more, and what it saves is what it made."""

    def save(self, step: int, last_step: bool = False) -> Any:
        for _, parameter, optimizer in self.parameters():
            if hasattr(optimizer, "checkpointable"):
                optimizer.finish()
                for value in optimizer.host.get(parameter, {}).values():
                    value.zero_()
        return self.inner.save(step, last_step)


class WaitingCountForgotten(Edited):
    """Each group counts anew of which no parameter has any state."""

    def loaded(self) -> None:
        for optimizer in self.job["optimizers"]:
            if hasattr(optimizer, "checkpointable"):
                for group in optimizer.param_groups:
                    if not any(p in optimizer.host for p in group["params"]):
                        group["step"] = 0


class LeftStateForgotten(Edited):
    """What has left its group is no longer looked at, and its state is not in the file."""

    def save(self, step: int, last_step: bool = False) -> Any:
        left = {}
        for optimizer in self.job["optimizers"]:
            grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            gone = [p for p in optimizer.state if isinstance(p, torch.Tensor)]
            left[optimizer] = {p: optimizer.state.pop(p) for p in gone if id(p) not in grouped}
        saved = self.inner.save(step, last_step)
        for optimizer, states in left.items():
            optimizer.state.update(states)
        return saved


class EmptiedIsZeros(Edited):
    """Storage that was emptied is made again for the save, and holds nothing."""

    def save(self, step: int, last_step: bool = False) -> Any:
        emptied = []
        for _, parameter, optimizer in self.parameters():
            if isinstance(optimizer, SwapAdamW) and not hasattr(optimizer, "checkpointable"):
                for value in optimizer.state[parameter].values():
                    if isinstance(value, torch.Tensor):
                        storage = value.untyped_storage()
                        storage.resize_(value.numel() * value.element_size())
                        value.zero_()
                        emptied.append(storage)
        saved = self.inner.save(step, last_step)
        for storage in emptied:
            storage.resize_(0)
        return saved


class StateUnderTheFirstName(Edited):
    """A tied parameter's state belongs to it only under the name that it was saved by."""

    def loaded(self) -> None:
        for name, parameter, optimizer in self.parameters():
            if name == HEAD and self.job["model_parts"][0].get_parameter(TABLE) is parameter:
                optimizer.state.pop(parameter, None)


class TieBrokenByTheLoad(Edited):
    def loaded(self) -> None:
        part = self.job["model_parts"][0]
        named = dict(part.named_parameters(remove_duplicate=False))
        if TABLE in named and named[TABLE] is named.get(HEAD):
            part.lm_head.weight = torch.nn.Parameter(named[HEAD].detach().clone())


class EmptyGroupForgotten(Edited):
    def loaded(self) -> None:
        for optimizer in self.job["optimizers"]:
            groups = optimizer.param_groups
            groups[:] = [g if g["params"] else {"params": [], "lr": g["lr"]} for g in groups]


class FirstRateForgotten(Edited):
    def loaded(self) -> None:
        for group in self.job["optimizers"][0].param_groups:
            if group.get("label") == "flat":
                del group["initial_lr"]


class NewHyperparameterMissing(Edited):
    def load(self, step: int = -1) -> Any:
        ends: set[str] = set()
        with contextlib.suppress(CheckpointError):  # an unfinished step
            ends = {k.rpartition(".")[2] for k in dcp.read_manifest(str(self.newest())).keys}
        if "capturable" in ends and "decoupled_weight_decay" not in ends:
            raise KeyError("decoupled_weight_decay")
        return self.inner.load(step)


class MissingMomentWithoutAName(Edited):
    def load(self, step: int = -1) -> Any:
        try:
            return self.inner.load(step)
        except CheckpointError as error:
            if "exp_avg" in str(error):
                words = "float() argument must be a string or a real number, not 'dict'"
                raise TypeError(words) from error
            raise
