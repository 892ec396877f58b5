"""What checks work with: one subject's templates, fresh adapters, cached conversions.

A check asks the Lab for a conversion and gets tensors or `AdapterRaised`; it never calls an
adapter itself, except to look at the adapter's own side effects. No verdicts here.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from conformance.fingerprint import Positions, State, blank, noise
from conformance.subject import Reference, Subject, matches, numbers_of, template_of
from conformance.template import FileList, Leaf, file_list, native_template
from conformance.trace import Trace, Tracer
from torchtitan_ckpt.device import Device, DeviceKind

if TYPE_CHECKING:
    from conformance.adapter_lab import AdapterLab
    from conformance.manager_lab import ManagerLab

Direction = Literal["to_hf", "from_hf"]
# Values are checked on at most this many elements, and on half as many where that still holds a
# layer of each kind; beyond it layers are left out, and said so.
MAX_ELEMENTS = 48_000_000


class NotApplicable(Exception):
    """The subject lacks what a check needs; the text is the reason."""


class AdapterRaised(Exception):
    """The subject's own code raised."""

    def __init__(self, direction: str, error: BaseException) -> None:
        self.direction, self.error = direction, error
        frames = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if "conformance" not in f.filename.replace("\\", "/").split("/")[-2:]
        ]
        where = frames[-1] if frames else None
        at = f" at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}" if where else ""
        super().__init__(f"{direction} raised {type(error).__name__}: {str(error)[:200]}{at}")


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
        self.seed = seed
        self.max_elements = max_elements
        self.device = device or Device(DeviceKind.CPU)
        self.notes: list[str] = list(subject.notes)

    # -- what the subject supplies ------------------------------------------------------------

    @property
    def may(self) -> Any:
        """The subject's declared capabilities."""
        return self.subject.capabilities

    @functools.cached_property
    def native(self) -> dict[str, Leaf]:
        if self.subject.native is None:
            raise NotApplicable("the subject supplies no native model or state dict")
        return native_template(self.subject.native)

    @functools.cached_property
    def reference(self) -> Reference:
        found = self.subject.reference
        if found is not None and not hasattr(found, "to_hf"):
            found = found()
        if found is None:
            raise NotApplicable("the subject names no independent reference")
        return found  # type: ignore[return-value]

    @functools.cached_property
    def hf(self) -> FileList:
        """The independent list of what the files hold."""
        found = file_list(self.subject.hf)
        if found is None and self.subject.reference is not None:
            trace = self.trace("to_hf", self.native, self.reference)
            found = FileList(trace.leaves, f"reference {self.reference.name}")
        if found is None:
            raise NotApplicable("the subject supplies no HF key list and no reference")
        return found

    def resized(self, sizes: Mapping[str, int]) -> Lab:
        """The lab of the subject's model of other sizes; made once, and this one for none."""
        if not sizes:
            return self
        key = tuple(sorted(sizes.items()))
        if key not in self._resized:
            if self.subject.resized is None:
                raise NotApplicable("the subject makes no model of another size (resized)")
            self._resized[key] = Lab(
                self.subject.resized(**sizes),
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
        try:
            if assets is not None and self.takes_assets:
                return factory(hf_assets_path=assets)
            return factory()
        except Exception as error:
            raise AdapterRaised("the adapter's factory", error) from error

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
        try:
            if wrapped is not None:
                return wrapped(adapter, state)
            return getattr(adapter, direction)(state)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # torch's CheckpointException is not an Exception
            raise AdapterRaised(direction, error) from error

    def convert(self, direction: Direction, state: Mapping[str, Any], adapter: Any = None) -> State:
        """As `call`, of a copy, keeping what is a tensor under a str."""
        out = self.call(direction, self.on_device(state), adapter)
        if not isinstance(out, Mapping):
            raise AdapterRaised(direction, TypeError(f"returned {type(out).__name__}, not a dict"))
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
        self, direction: Direction, leaves: Mapping[str, Leaf], other: Reference | None = None
    ) -> Trace:
        """Keys only: what each output is made from, by the adapter or by another implementation.

        Meta tensors, or zeros where those fail.
        """
        first: AdapterRaised | None = None
        known: Trace | None = None
        for device in ("meta", "cpu"):
            if device == "cpu" and sum(x.numel for x in leaves.values()) > self.max_elements * 8:
                break
            state = blank(leaves, device)
            tracer = Tracer(state)
            try:
                with tracer:
                    if other is None:
                        out = self.call(direction, dict(state))
                    else:
                        out = getattr(other, direction)(dict(state))
            except AdapterRaised as error:
                first = error
                continue
            if not isinstance(out, Mapping):
                raise AdapterRaised(direction, TypeError(f"returned {type(out).__name__}"))
            found = tracer.result(out)
            # An adapter may leave out copies on meta tensors; zeros then show what is used.
            if all(found.sources.values()) or known is not None:
                return found
            known = found
        if known is not None:
            return replace(known, known=False)
        assert first is not None
        raise first

    @functools.cached_property
    def export(self) -> Trace:
        """The trace of `to_hf` on the whole native template."""
        return self.trace("to_hf", self.native)

    @functools.cached_property
    def imported(self) -> Trace:
        """The trace of `from_hf` on what `to_hf` writes."""
        return self.trace("from_hf", self.export.leaves)

    # -- the part that values are checked on ------------------------------------------------------

    @functools.cached_property
    def value_native(self) -> dict[str, Leaf]:
        """The native leaves of the value checks: all, or some layers of a model too large."""
        total = sum(leaf.numel for leaf in self.native.values())
        if total <= self.max_elements // 2 and self.subject.values_on is None:
            return self.native
        layers: dict[tuple[str, int], set[str]] = {}
        for key in self.native:
            if numbers_of(key) and template_of(key).startswith(_layer_prefixes(self.native)):
                layers.setdefault(_layer(key), set()).add(key)
        rest = [k for k in self.native if not any(k in keys for keys in layers.values())]
        kinds: dict[object, list[tuple[str, int]]] = {}
        for layer in sorted(layers):
            kinds.setdefault(
                frozenset((template_of(k), self.native[k]) for k in layers[layer]), []
            ).append(layer)
        chosen = [at for places in kinds.values() for at in {places[0], places[-1]}]
        if self.subject.values_on is not None:
            chosen = [at for at in layers if at[1] in self.subject.values_on]
        elif self._count(rest, layers, chosen) > self.max_elements // 2:
            chosen = [places[0] for places in kinds.values()]
        count = self._count(rest, layers, chosen)
        if total <= self.max_elements and (count > self.max_elements or not self.may.partial):
            return self.native
        if count > self.max_elements or not self.may.partial:
            raise NotApplicable(
                f"{total / 1e6:.0f}M elements (one layer of each kind: {count / 1e6:.0f}M); "
                f"values are checked on up to {self.max_elements / 1e6:.0f}M"
            )
        keys = set(rest).union(*(layers[at] for at in chosen))
        names = ", ".join(f"{prefix}.{number}" for prefix, number in sorted(chosen))
        self.notes.append(
            f"values are checked on {names} and what is outside layers: "
            f"{count / 1e6:.1f}M of {total / 1e6:.0f}M elements"
        )
        return {k: v for k, v in self.native.items() if k in keys}

    def _count(
        self,
        rest: Iterable[str],
        layers: Mapping[tuple[str, int], set[str]],
        chosen: Iterable[tuple[str, int]],
    ) -> int:
        keys = [*rest, *(k for at in chosen for k in layers[at])]
        return sum(self.native[k].numel for k in keys)

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


def _layer(key: str) -> tuple[str, int]:
    parts = key.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:index]), int(part)
    raise ValueError(key)


@functools.lru_cache(maxsize=8)
def _prefixes(keys: frozenset[str]) -> tuple[str, ...]:
    found: dict[str, set[int]] = {}
    for key in keys:
        if numbers_of(key):
            prefix, number = _layer(key)
            found.setdefault(prefix, set()).add(number)
    return tuple(f"{prefix}." for prefix, numbers in found.items() if len(numbers) > 1)


def _layer_prefixes(native: Mapping[str, Leaf]) -> tuple[str, ...]:
    return _prefixes(frozenset(native)) or ("\0",)
