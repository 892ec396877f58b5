"""Chapter `resume`, the data: a resumed job goes on in the middle of the sample that it was at.

A part of `conformance/checks/resume.py`; on one rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from conformance.lab import Lab
from conformance.managed import opened, start
from conformance.manager_lab import takes
from conformance.verdict import Finding

DRAWN = 10  # in the second epoch, with a part of a sample still in the buffer


class Stream:
    """A small data set, cut into batches of three tokens; each epoch begins at another sample.

    Tokens of a sample that no batch has had yet wait in a list that is empty in a new stream. What
    `state_dict` gives is the live state, which goes on changing.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"epoch": 0, "sample": 0, "buffer": []}

    def draw(self) -> tuple[int, ...]:
        buffer = self.state["buffer"]
        while len(buffer) < 3:
            buffer += self._sample()
        return tuple(buffer.pop(0)["token"] for _ in range(3))

    def _sample(self) -> list[dict[str, int]]:
        epoch, number = self.state["epoch"], self.state["sample"]
        self.state["epoch"], self.state["sample"] = (epoch + (number == 4), (number + 1) % 5)
        size = 2 + (number + epoch) % 5
        return [{"token": 100 * epoch + 10 * number + place} for place in range(size)]

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": self.state, "world_size": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = copy.deepcopy(state["dp_rank_0"])


def stream(lab: Lab) -> Iterator[Finding]:
    """Saved in the second epoch and within a sample, the stream is the one never stopped."""
    options = {"async_mode": "async"} if takes(lab.managers.manager, "async_mode") else {}
    (drawn,) = lab.managers.run(_stop_and_go_on, 1, lab.managers.folder(), options)
    whole = Stream()
    due = [whole.draw() for _ in range(2 * DRAWN)][DRAWN:]
    wrong = next(
        (n for n, pair in enumerate(zip(due, drawn, strict=True)) if len(set(pair)) > 1), None
    )
    if wrong is not None:
        yield Finding(
            what="a resumed job gets other data than the one never stopped",
            keys=("dataloader.dp_rank_0",),
            coordinate=f"batch {wrong} after the load",
            expected=str(due[wrong]),
            actual=str(drawn[wrong]),
            cause="epoch, sample or the tokens that no batch has had yet are not those of the save",
            remedy="store the loader's state as one value, and copy it at the call",
        )


# --- on the ranks -------------------------------------------------------------------------------


def _stop_and_go_on(manager: Any, folder: str, options: Mapping[str, Any]) -> list[Any]:
    first, second = Stream(), Stream()
    with opened(manager, start(1), folder, dataloader=first, interval=1, **options) as found:
        for _ in range(DRAWN):
            first.draw()
        found.save(1)
        found.wait("staging")
        first.draw()
    with opened(manager, start(), folder, dataloader=second, load_only=True) as found:
        found.load()
    return [second.draw() for _ in range(DRAWN)]
