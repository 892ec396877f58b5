"""Runs a subject's adapter on rank processes, for the checks about models that are split.

Sends the adapter and what it gave on one rank to the ranks, and keeps what they tell of each split.
What ranks do is `conformance/adapted.py`; no verdicts here.
"""

from __future__ import annotations

import functools
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path

from conformance.adapted import NotFound, RaisedAlone, Told, Truth, Wrong, convert
from conformance.degrees import Case
from conformance.fingerprint import State
from conformance.lab import Direction, Lab, NotApplicable
from conformance.manager_lab import TIMEOUT, case_of, pool_on
from conformance.ranks import RanksFailed
from conformance.subject import Subject

# More shards than KV heads, shards that divide nothing, both dimensions, strided shards, experts.
DEGREES = ("fsdp2", "fsdp3", "fsdp4", "tp2", "hsdp2x2", "fsdp2 x tp2", "fsdp2 x ep2")


class AdapterLab:
    """One subject's adapter under every split, which run once, when first asked for.

    `exported` and `imported` are the keys that one rank gives.
    """

    def __init__(self, lab: Lab, found: str) -> None:
        self.pool = pool_on(lab.device.kind)
        if self.pool.size < 2:
            raise NotApplicable("a split wants a device for each rank, and there is one")
        self.cases = _cases(lab.subject, self.pool.size)
        if not self.cases:
            raise NotApplicable("the subject's degrees split no tensors")
        self._kind = lab.device.kind.value
        self._ticket = _ticket(lab.subject, found)
        self._folder = tempfile.TemporaryDirectory(prefix="ckpt-gate-")
        self._truth = str(Path(self._folder.name, "truth.pt"))
        truth = _truth_of(lab)
        truth.write(self._truth)
        self.exported, self.imported = truth.hf.keys(), truth.back.keys()

    @functools.cached_property
    def results(self) -> list[tuple[str, list[Told]]]:
        """Each split's name, and what its ranks tell.

        Where the adapter ended its ranks, one tells for all, and no further split is tried: each
        would take as long.
        """
        out: list[tuple[str, list[Told]]] = []
        for number, case in enumerate(self.cases, 1):
            try:
                out.append((case.name, self._run(case)))
            except RanksFailed as error:
                first = error.first
                if first.kind == "raised" and not isinstance(first.error, RaisedAlone):
                    raise
                words = str(first.error or f"rank {first.rank} {first.kind}: {first.summary}")
                if number < len(self.cases):
                    words += f"; of {len(self.cases)} splits {len(self.cases) - number} not tried"
                raised = Wrong("to_hf", "", "what one rank gives", words)
                return [*out, (case.name, [Told(raised=(raised,))])]
        return out

    def _run(self, case: Case) -> list[Told]:
        arguments = (self._ticket, self._truth, case.degrees, self._kind)
        ranks = self.pool.run(convert, case.ranks, *arguments, timeout=TIMEOUT)
        lost = next((rank.why for rank in ranks if isinstance(rank, NotFound)), "")
        if lost:
            raise NotApplicable(_UNNAMED.format(f"imported by rank processes ({lost})"))
        return [rank for rank in ranks if isinstance(rank, Told)]


_UNNAMED = "the adapter cannot be {}: name it, or a Subject with it, at the top of a module"


def _cases(subject: Subject, ranks: int) -> list[Case]:
    """The subject's splits, else the usual ones that there are ranks for; stages have no say."""
    usual = [one for one in map(case_of, DEGREES) if one.ranks <= ranks]
    wanted = [case_of(one, ranks) for one in subject.degrees] or usual
    flat = [Case(replace(case.degrees, pp=1)) for case in wanted]
    return list({case.name: case for case in flat if case.ranks > 1}.values())


def _ticket(subject: Subject, found: str) -> bytes:
    """What another process makes the adapter from: itself, or the word that finds its subject."""
    bare = Subject(
        subject.name, adapter=subject.adapter, to_hf=subject.to_hf, from_hf=subject.from_hf
    )
    try:
        return pickle.dumps(bare)
    except Exception as error:
        if found:
            return pickle.dumps(found)
        raise NotApplicable(_UNNAMED.format(f"sent to rank processes ({error})")) from error


def _truth_of(lab: Lab) -> Truth:
    def converted(direction: Direction, state: State) -> State:
        return {key: value.cpu() for key, value in lab.convert(direction, state).items()}

    native, others = (lab.noise(lab.value_native, salt=salt) for salt in (7, 8))
    files = converted("to_hf", others)
    return Truth(native, converted("to_hf", native), files, converted("from_hf", files))
