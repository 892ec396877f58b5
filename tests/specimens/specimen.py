"""What a specimen is, and the settings that many share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from conformance import Capabilities, Subject
from tests.specimens import right
from tests.specimens.right import Right, State


@dataclass(frozen=True)
class Specimen:
    name: str
    check: str
    key: str
    adapter: Any = Right
    kinds: str = ""
    alone: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], Subject] | None = None

    def subject(self) -> Subject:
        if self.make is not None:
            return self.make()
        return right.subject(self.name, self.adapter, **self.options)


BLIND = {"listed": False, "referenced": False}  # no oracle: structure and round trips only


KEYED = {"referenced": False}  # a list of keys and shapes, no second implementation


HEAD = "lm_head.weight"


class TiedRight(Right):
    """The right adapter of the model with a tied head."""

    def to_hf(self, state_dict: State) -> State:
        return super().to_hf({k: v for k, v in state_dict.items() if k != "head.weight"})

    def from_hf(self, hf_state_dict: State) -> State:
        out = super().from_hf({k: v for k, v in hf_state_dict.items() if k != HEAD})
        if "tok.weight" in out:
            out["head.weight"] = out["tok.weight"]
        return out


TIED: dict[str, Any] = {
    "referenced": False,
    "listed": False,
    "capabilities": Capabilities(tied={"head.weight": "tok.weight"}, partial=False),
}
