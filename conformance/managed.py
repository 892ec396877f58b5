"""A checkpoint manager under test, in a job whose every state is known: what ranks run.

`Manager` is all that a subject's manager must be. The functions here run inside rank processes: a
job is made, its checkpoints are the manager's, and what became of the job is told state by state.
What the outcome should have been is for `conformance/checks`; processes are `manager_lab`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from conformance.jobs import STATES, Job, truth
from conformance.lab import words_of
from conformance.reference import Leaf, Table
from conformance.verdict import Finding
from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.parallel import ParallelDegrees


class Manager(Protocol):
    """torchtitan's interface: what the chapters about managers call.

    A subject's `manager` is a class, named at the top of a module, that makes these:

        config = manager.Config(enable=True, interval=2, ...)    # torchtitan's option names
        manager(config, model_parts=..., optimizers=..., lr_schedulers=..., dataloader=...,
                states=..., sd_adapter=..., base_folder=...)

    `optimizers` and `lr_schedulers` are lists of torch's own. Refusing is raising, from `Config`,
    the constructor or a method. `maybe_wait_for_staging` and `maybe_wait_for_saving` are called
    where a trainer calls them, if the manager has them. A constructor with an argument `replica`
    is given, for one clause, a replica of the job as TorchFT runs them: its `id`, a word, and
    `participating_rank()`, which is 0 for the one that saves full checkpoints.
    """

    def save(self, curr_step: int, last_step: bool = False) -> Any: ...

    def load(self, step: int = -1) -> Any: ...

    def close(self) -> None: ...


class ManagerRaised(Exception):
    """The manager raised: while doing what, and its own words."""

    def __init__(self, doing: str, words: str) -> None:
        super().__init__(doing, words)
        self.doing, self.words = doing, words

    def __str__(self) -> str:
        return f"{self.doing} raised {self.words}"


@contextmanager
def acting(doing: str) -> Iterator[None]:
    """The subject's own code runs: what it raises is `ManagerRaised`, an exit from Python too."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # DCP's CheckpointException is not an Exception
        raise ManagerRaised(doing, words_of(error)[:600]) from error


class Opened:
    """A manager at work; every call of it is `acting`."""

    def __init__(self, manager: Any, parts: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        with acting("its configuration"):
            config = manager.Config(enable=True, **options)
        with acting("the constructor"):
            self._manager = manager(config, **parts)

    def save(self, step: int, *, last_step: bool = False) -> None:
        with acting(f"save({step})"):
            self._manager.save(step, last_step)

    def load(self, step: int = -1) -> bool:
        with acting(f"load({step})"):
            return bool(self._manager.load(step))

    def wait(self, what: str) -> None:
        """Wait for `staging` or `saving`, where the manager has a name for it."""
        with acting(f"maybe_wait_for_{what}"):
            getattr(self._manager, f"maybe_wait_for_{what}", lambda: None)()

    def close(self) -> None:
        with acting("close"):
            self._manager.close()


@contextmanager
def opened(
    manager: Any,
    job: Job,
    folder: str,
    *,
    adapter: Any = None,
    states: Any = None,
    dataloader: Any = None,
    replica: Any = None,
    **options: Any,
) -> Iterator[Opened]:
    """The manager over a job, closed at the end, what it still writes finished before.

    `states` are further ones, and `dataloader` one in place of the job's.
    """
    parts = job.for_manager(folder, sd_adapter=adapter, states=states)
    if replica is not None:
        parts["replica"] = replica
    if dataloader is not None:
        parts["dataloader"] = dataloader
    found = Opened(manager, parts, options)
    try:
        yield found
        found.wait("saving")
    finally:
        found.close()


def tiny_table() -> dict[str, Leaf]:
    """A model for what needs one rank: 12 layers, sizes pairwise different, integers among them."""
    dim, inner, vocab = 6, 5, 19
    table = {
        "tok_embeddings.weight": Leaf((vocab, dim)),
        "norm.weight": Leaf((dim,)),
        "lm_head.weight": Leaf((vocab, dim)),
        "layers.0.tid2eid": Leaf((vocab, 3), "int64"),
    }
    return table | {f"layers.{n}.attention.wo.weight": Leaf((dim, inner)) for n in range(12)}


def start(steps: int = 0, table: Table | None = None) -> Job:
    """A small job on this one rank after `steps` steps."""
    job = Job.start(table or tiny_table(), ParallelDegrees())
    job.train(steps)
    return job


@dataclass(frozen=True)
class Try:
    """One attempt to load: from which output folder, which step, under which options."""

    folder: str
    step: int = -1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a job that tried to load.

    `words` are those of a refusal, and empty without one. `at` says for each state after how many
    steps a job that was never stopped has it, bit for bit; None for a state that it never has.
    """

    loaded: bool
    words: str
    at: Mapping[str, int | None]

    def __str__(self) -> str:
        if self.words:
            return f"refused: {self.words[:240]}"
        return "loaded" if self.loaded else "nothing was loaded"


def try_loads(manager: Any, tries: Sequence[Try], own: int, steps: Sequence[int]) -> list[Outcome]:
    """Each try in a job of its own, after `own` steps; states are compared at `steps` too."""
    out = []
    for one in tries:
        job = start(own)
        loaded, words = False, ""
        try:
            with opened(manager, job, one.folder, **{"load_only": True, **one.options}) as found:
                loaded = found.load(one.step)
        except ManagerRaised as error:
            words = str(error)
        out.append(Outcome(loaded, words, known(job, (own, *steps))))
    return out


def known(job: Job, steps: Iterable[int]) -> dict[str, int | None]:
    """For each state, after which of `steps` a job that was never stopped has it; else None."""
    return {name: next((n for n in steps if not differing(job, name, n)), None) for name in STATES}


def differing(job: Job, name: str, steps: int) -> list[str]:
    """The keys of one state that are not those of a job after `steps` steps, never stopped."""
    if name == "dataloader":
        key = f"dataloader.dp_rank_{job.dp_rank}"
        return [] if job.position == steps * (3 + job.dp_rank) else [key]
    expected = truth(job.table, steps)
    keys = due(job, name, expected)
    return job.differences(expected, keys) if _state(job) is not None else keys


def _state(job: Job) -> dict[str, Any] | None:
    """The job's state; None where a load has left something in it that is none."""
    try:
        return job.state()
    except CheckpointError:
        return None


def due(job: Job, name: str, expected: Mapping[str, Any]) -> list[str]:
    """The truth's keys of one state that this rank should have, whether it has them or not."""
    own = job.state("model").keys()
    if name == "model":
        return [key for key in expected if key in own]
    keys = [key for key in expected if key.partition(".")[0] == name]
    if name != "optimizer":
        return keys
    # optimizer.state.<name of the parameter>.<key>
    return [key for key in keys if key.split(".", 2)[2].rpartition(".")[0] in own]


def differences(
    job: Job,
    at: Mapping[str, int],
    *,
    remedy: str,
    cause: str = "",
    coordinate: str = "",
    what: str = "",
) -> list[Finding]:
    """A finding for each state that is not what `at` says it should be."""
    out = []
    for name, steps in at.items():
        wrong = differing(job, name, steps)
        if not wrong:
            continue
        expected, state = truth(job.table, steps), _state(job) or {}
        total = 1 if name == "dataloader" else len(due(job, name, expected))
        first = wrong[0].partition(":")[0]
        out.append(
            Finding(
                what=f"{what or 'after the load'} {len(wrong)} of {total} values of the {name} "
                "are wrong",
                keys=tuple(key.partition(":")[0] for key in wrong),
                coordinate=coordinate,
                expected=str(steps * (3 + job.dp_rank))
                if name == "dataloader"
                else brief(expected[first]),
                actual=str(job.position) if name == "dataloader" else brief(state.get(first)),
                cause=cause,
                remedy=remedy,
                oracle=f"the same job, never split and never stopped, after {steps} steps",
            )
        )
    return out


def brief(value: Any) -> str:
    """A value in a few words: dtype, shape and the first elements of this rank's part."""
    if value is None:
        return "nothing"
    if not isinstance(value, Tensor):
        return repr(value)
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    head = ", ".join(f"{x:g}" for x in local.detach().flatten()[:3].tolist())
    dots = ", …" if local.numel() > 3 else ""
    return f"{str(local.dtype).removeprefix('torch.')} {list(value.shape)}: {head}{dots}"


class Held:
    """A state that holds one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


class PlainAdapter:
    """A state-dict adapter that puts `model.` before each name, over two files."""

    hf_assets_path: str | None = None

    def __init__(self, table: Mapping[str, Leaf]) -> None:
        self.fqn_to_index_mapping = {f"model.{k}": 1 + n % 2 for n, k in enumerate(table)}

    def to_hf(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        return {f"model.{key}": value for key, value in state_dict.items()}

    def from_hf(self, hf_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        return {key.removeprefix("model."): value for key, value in hf_state_dict.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        return HuggingFaceStorageReader(path)
