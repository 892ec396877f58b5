"""What checks work with: one subject's templates, fresh adapters, cached conversions.

A check asks the Lab for a conversion and gets tensors or `AdapterRaised`; it never calls an
adapter itself, except to look at the adapter's own side effects. No verdicts here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from conformance.fingerprint import Positions, State, blank, noise
from conformance.layers import part_of
from conformance.raised import AdapterRaised as AdapterRaised
from conformance.raised import AdapterReturned, Kept, not_a_dict
from conformance.raised import NotApplicable as NotApplicable
from conformance.raised import theirs as theirs
from conformance.raised import words_of as words_of
from conformance.settings import Changed, put_back
from conformance.spread import Picture
from conformance.subject import Reference, Subject, matches
from conformance.template import FileList, Leaf, file_list, native_template
from conformance.trace import Trace, traced
from torchtitan_ckpt.device import Device, DeviceKind

if TYPE_CHECKING:
    from conformance.adapter_lab import AdapterLab
    from conformance.manager_lab import ManagerLab

Direction = Literal["to_hf", "from_hf"]
Convert = Callable[[Direction, State], Any]
# Values are checked on at most this many elements; of a larger model on some layers.
MAX_ELEMENTS = 48_000_000


class Lab:
    """One subject on the bench. Everything is computed once and only when asked for."""

    def __init__(
        self,
        subject: Subject,
        *,
        seed: int,
        max_elements: int = MAX_ELEMENTS,
        device: Device | None = None,
        example: str = "",
        found: str = "",
    ) -> None:
        self.subject = subject
        self._found = found  # the word that finds the subject in another process
        self.example = example  # the one case that a search is to repeat
        self._resized: dict[tuple[tuple[str, int], ...], Lab] = {}
        self._where: dict[Direction, str] = {}  # the device of `blank`
        # What is made of nothing by right, so that a part of the model needs no closer look.
        self._constant: dict[Direction, frozenset[str]] = {
            "to_hf": frozenset(),
            "from_hf": frozenset(),
        }
        self.left: Changed = {}  # settings of the process that the last call left changed
        self.seed = seed
        self.max_elements = max_elements
        self.device = device or Device(DeviceKind.CPU)
        self.notes: list[str] = list(subject.notes)
        self.pictures: dict[str, tuple[Picture, ...]] = {}  # check -> what it shows of a reshard

    # -- what the subject supplies ------------------------------------------------------------

    @property
    def may(self) -> Any:
        """The subject's declared capabilities."""
        return self.subject.capabilities

    @functools.cached_property
    def native(self) -> dict[str, Leaf]:
        if self.subject.native is None:
            raise NotApplicable("the subject supplies no native model or state dict")
        with theirs("the subject's native", reads=True):
            return native_template(self.subject.native)

    @functools.cached_property
    def reference(self) -> Reference:
        found = self.subject.reference
        if found is not None and not hasattr(found, "to_hf"):
            with theirs("the subject's reference"):
                found = found()
        if found is None:
            raise NotApplicable("the subject names no independent reference")
        return found  # type: ignore[return-value]

    @functools.cached_property
    def hf(self) -> FileList:
        """The independent list of what the files hold."""
        with theirs("the subject's hf", reads=True):
            found = file_list(self.subject.hf)
        if found is None and self.subject.reference is not None:
            # A family knows how the files of its models are quantized.
            stored = getattr(self.reference, "stored", ())
            found = FileList(self.asked.leaves, f"reference {self.reference.name}", stored)
        if found is None:
            raise NotApplicable("the subject supplies no HF key list and no reference")
        return found

    @property
    def listed(self) -> Mapping[str, Leaf | None]:
        """The leaves of that list; none where there is no list, or none that can be read."""
        return self._files.leaves

    @property
    def stored(self) -> tuple[str, ...]:
        """The keys that lie in quantized files, scales among them, where the list tells them."""
        return self._files.stored

    @property
    def quantized(self) -> bool:
        """Whether the subject declares quantized files, or lists some."""
        return bool(self.may.quantized or self.stored)

    @property
    def _files(self) -> FileList:
        try:
            return self.hf
        except (NotApplicable, AdapterRaised):  # the latter is the finding of `keys.exact`
            return FileList({}, "")

    def resized(self, sizes: Mapping[str, int]) -> Lab:
        """The lab of the subject's model of other sizes; made once, and this one for none."""
        if not sizes:
            return self
        key = tuple(sorted(sizes.items()))
        if key not in self._resized:
            if self.subject.resized is None:
                raise NotApplicable("the subject makes no model of another size (resized)")
            with theirs("the subject's resized", reads=True):
                subject = self.subject.resized(**sizes)
            self._resized[key] = Lab(
                subject,
                seed=self.seed,
                max_elements=self.max_elements,
                device=self.device,
            )
        return self._resized[key]

    # -- calling the adapter ------------------------------------------------------------------

    def adapter(self, assets: str | None = None) -> Any:
        """A fresh adapter, built on a folder of HF assets where its factory takes one."""
        factory = self.subject.adapter
        if factory is None:
            raise NotApplicable("the subject has no adapter")
        if not callable(factory):
            raise AdapterReturned(
                "the subject's `adapter`",
                f"no adapter: it is a {type(factory).__name__}, which cannot be called",
                cause="an adapter is given where something that makes a fresh one is wanted",
                remedy="adapter=lambda hf_assets_path=None: MyAdapter(my_config, hf_assets_path)",
            )
        with theirs("the adapter's factory"), put_back() as self.left:
            if assets is not None and self.takes_assets:
                return factory(hf_assets_path=assets)
            return factory()

    @functools.cached_property
    def takes_assets(self) -> bool:
        factory = self.subject.adapter
        try:
            return factory is not None and "hf_assets_path" in inspect.signature(factory).parameters
        except (TypeError, ValueError):
            return False

    def call(self, direction: Direction, state: Mapping[str, Any], adapter: Any = None) -> Any:
        """One conversion by a fresh adapter (or the given one), of the given dict as it is."""
        wrapped = getattr(self.subject, direction)
        adapter = self.adapter() if adapter is None else adapter
        with theirs(direction), put_back() as self.left:
            if wrapped is not None:
                return wrapped(adapter, state)
            return getattr(adapter, direction)(state)

    def ask(self, direction: Direction, state: Mapping[str, Any]) -> Any:
        """The reference's conversion of a copy of the dict."""
        with theirs(f"{direction} of the reference {self.reference.name}"):
            return getattr(self.reference, direction)(dict(state))

    def blank(self, direction: Direction, part: Mapping[str, Leaf] | None = None) -> State:
        """Zeros that this direction takes: meta tensors, or real ones where those fail.

        Of a part, or of the whole model, or of what `to_hf` writes of it.
        """
        leaves = self.native if direction == "to_hf" else self.export.leaves
        if direction not in self._where:
            self._where[direction] = "meta"
            if self._affords(leaves):
                try:
                    self.call(direction, blank(leaves))
                except AdapterRaised:
                    self._where[direction] = "cpu"
        return blank(leaves if part is None else part, self._where[direction])

    def _affords(self, leaves: Mapping[str, Leaf]) -> bool:
        """Whether there is room for zeros of so many elements."""
        return sum(leaf.numel for leaf in leaves.values()) <= self.max_elements * 8

    def convert(
        self,
        direction: Direction,
        state: Mapping[str, Any],
        adapter: Any = None,
        *,
        held: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
    ) -> State:
        """As `call`, of a copy (`held` in some way), keeping what is a tensor under a str."""
        tensors = self.tensors(
            direction, self.call(direction, held(self.on_device(state)), adapter)
        )
        empty = [k for k, v in tensors.items() if v.is_meta]
        if empty and not any(isinstance(v, torch.Tensor) and v.is_meta for v in state.values()):
            raise Kept(direction, empty)
        return tensors

    @staticmethod
    def tensors(direction: Direction, out: Any) -> State:
        """What is a tensor under a str of what a call returned."""
        if not isinstance(out, Mapping):
            raise not_a_dict(direction, out)
        return {
            k: v
            for k, v in out.items()
            if isinstance(k, str) and isinstance(v, torch.Tensor) and v.layout == torch.strided
        }

    def on_device(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of `state` whose tensors lie on the device under test, as a trainer's do.

        Expected values stay on the CPU; comparisons of bits bring the other side there.
        """
        where = self.device.at(0)
        return {
            k: _copied(v, where) if isinstance(v, torch.Tensor) else v for k, v in state.items()
        }

    @functools.cached_property
    def managers(self) -> ManagerLab:
        """The subject's manager on rank processes, for the chapters about managers."""
        from conformance.manager_lab import ManagerLab

        return ManagerLab(self.subject, self.device)

    @functools.cached_property
    def ranks(self) -> AdapterLab:
        """The subject's adapter on rank processes, for the checks about models that are split."""
        from conformance.adapter_lab import AdapterLab

        return AdapterLab(self, self._found)

    # -- traces ---------------------------------------------------------------------------------

    def trace(
        self,
        direction: Direction,
        leaves: Mapping[str, Leaf],
        call: Convert | None = None,
    ) -> Trace:
        """Keys only: what each output is made from, by the adapter or by another `call`."""
        return traced(
            functools.partial(self.outputs, direction, call=call),
            leaves,
            zeros=self._affords(leaves),
            values=sum(leaf.numel for leaf in leaves.values()) <= self.max_elements,
            constant=frozenset() if call else self._constant[direction],
        )

    def outputs(
        self, direction: Direction, state: State, call: Convert | None = None
    ) -> dict[Any, Any]:
        """What one conversion returns, as a dict: a mapping may compute what it is asked for."""
        out = (call or self.call)(direction, state)
        if not isinstance(out, Mapping):
            raise not_a_dict(direction, out)
        with theirs(direction):
            return dict(out.items())

    @functools.cached_property
    def export(self) -> Trace:
        """The trace of `to_hf` on the whole native template."""
        return self._whole("to_hf", self.native)

    @functools.cached_property
    def imported(self) -> Trace:
        """The trace of `from_hf` on what `to_hf` writes."""
        return self._whole("from_hf", self.export.leaves)

    @functools.cached_property
    def asked(self) -> Trace:
        """The trace of the reference's `to_hf` on the whole native template."""
        return self.trace("to_hf", self.native, self.ask)

    def _whole(self, direction: Direction, leaves: Mapping[str, Leaf]) -> Trace:
        found = self.trace(direction, leaves)
        if found.known:
            self._constant[direction] = frozenset(k for k, v in found.sources.items() if not v)
        return found

    # -- the part that values are checked on ------------------------------------------------------

    @functools.cached_property
    def value_native(self) -> dict[str, Leaf]:
        """The native leaves of the value checks: all, or some layers of a model too large."""
        part = part_of(
            self.native,
            most=self.max_elements,
            seed=self.seed,
            layers=self.subject.values_on,
            divisible=self.may.partial,
        )
        if part.refused:
            raise NotApplicable(part.refused)
        if part.note:
            self.notes.append(part.note)
        return part.leaves

    @functools.cached_property
    def value_hf(self) -> dict[str, Leaf]:
        """What `to_hf` writes of the native leaves that values are checked on."""
        part = self.value_native
        if part is self.native:
            return dict(self.export.leaves)
        return dict(self.trace("to_hf", part).leaves)

    @functools.cached_property
    def positions(self) -> Positions:
        """Numbers of all native elements that values are checked on."""
        return Positions(self.value_native, self.may.tied)

    @functools.cached_property
    def hf_positions(self) -> Positions:
        return Positions(self.value_hf, self.hf_tied)

    @functools.cached_property
    def hf_tied(self) -> dict[str, str]:
        """File keys that hold one parameter twice because its names are tied: alias -> source."""
        first: dict[str, str] = {}
        found = {}
        tied = set(self.may.tied) | set(self.may.tied.values())
        for key, sources in self.export.sources.items():
            name = next(iter(sources)) if len(sources) == 1 else ""
            if name in tied:
                first.setdefault(self.may.tied.get(name, name), key)
                found[key] = first[self.may.tied.get(name, name)]
        return {key: source for key, source in found.items() if key != source}

    @functools.cached_property
    def exported(self) -> State:
        """Element numbers (int64) of everything `to_hf` writes, decoded."""
        return self.decoded("to_hf", self.positions)

    def decoded(self, direction: Direction, positions: Positions) -> State:
        """Convert positions digit by digit and decode the result to element numbers."""
        digits: dict[str, list[torch.Tensor]] = {}
        for which in range(positions.passes):
            for key, value in self.convert(direction, positions.state(which)).items():
                digits.setdefault(key, []).append(value)
        return {
            key: positions.decode(values)
            for key, values in digits.items()
            if len(values) == positions.passes and len({v.shape for v in values}) == 1
        }

    def noise(self, leaves: Mapping[str, Leaf], salt: int = 0) -> State:
        """Tensors of every bit pattern, from the run's seed; tied names hold equal values."""
        return noise(leaves, self.seed + salt, {**self.may.tied, **self.hf_tied})

    # -- declarations -----------------------------------------------------------------------------

    def native_only(self, key: str) -> bool:
        return matches(key, self.may.native_only) is not None

    def hf_only(self, key: str) -> bool:
        return matches(key, self.may.hf_only) is not None

    def lossy(self, key: str) -> bool:
        return matches(key, self.may.lossy) is not None

    def alias(self, key: str) -> str | None:
        """The native key that `key` is tied to, if it is declared an alias."""
        return self.may.tied.get(key)  # type: ignore[no-any-return]


def _copied(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """A copy on `where`; a meta tensor stays one."""
    return tensor.clone() if tensor.is_meta else tensor.to(where, copy=True)
