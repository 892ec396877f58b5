"""What a job may load and what it will load, as plain data.

`OutputView` and `SourceView` describe what lies on disk, `LoadDecision` what is done about it.
`survey` fills the first two, `resolve` makes the third; this module does neither.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum


class StepKind(StrEnum):
    """What a step folder holds."""

    FULL = "full"
    MODEL_ONLY = "model-only"
    HF = "hf"
    SEED = "seed"
    BROKEN = "broken"
    UNREAD = "unread"


KIND_WORDS = {
    StepKind.FULL: "a full, resumable checkpoint",
    StepKind.MODEL_ONLY: "the model only (DCP)",
    StepKind.HF: "Hugging Face weights (model only)",
    StepKind.SEED: "a seed (model only)",
    StepKind.BROKEN: "no complete checkpoint",
    StepKind.UNREAD: "a checkpoint that was not looked at",
}


@dataclass(frozen=True, slots=True)
class StepFolder:
    """One `step-N` of an output folder. `why` says what is missing from a broken one."""

    step: int
    path: str
    kind: StepKind
    why: str = ""


@dataclass(frozen=True, slots=True)
class OutputView:
    """What the output folder holds. `steps` may hold only those that had to be looked at closely;
    older ones are `UNREAD`. `others` are names that only resemble `step-N` and are left alone."""

    path: str
    exists: bool = False
    steps: tuple[StepFolder, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceView:
    """What `initial_load_path` or `hf_assets_path` holds.

    `format` is `dcp`, `hf`, another format's name, or None; `states` are the top-level states of a
    DCP checkpoint; `refused` says for each format why the folder is not of it; `steps` are step
    folders found inside, when the path names a folder of checkpoints by mistake. Where the path
    does not exist, `parent` is the deepest folder above it that does and `near` what lies in it
    under names like the missing one, the likeliest first.
    """

    path: str
    option: str
    exists: bool = False
    format: str | None = None
    states: frozenset[str] = frozenset()
    quantized: bool = False
    refused: tuple[tuple[str, str], ...] = ()
    steps: tuple[str, ...] = ()
    parent: str = ""
    near: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ignored:
    """An option that was given and does nothing this time."""

    option: str
    why: str


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """What is loaded, from where, and why. `action` is disabled, fresh, resume or initial."""

    action: str
    reason: str
    path: str = ""
    format: str = ""
    step: int | None = None
    states: tuple[str, ...] = ()
    quantized: bool = False
    ignored: tuple[Ignored, ...] = ()
    passed_over: tuple[StepFolder, ...] = ()
    notices: tuple[str, ...] = field(default=())

    @property
    def loads(self) -> bool:
        return self.action in ("resume", "initial")

    @property
    def model_only(self) -> bool:
        return self.states == ("model",)

    def to_dict(self) -> dict[str, object]:
        """The decision as JSON-ready data."""
        data = asdict(self)
        data["passed_over"] = [{**s, "kind": s["kind"].value} for s in data["passed_over"]]
        return data
