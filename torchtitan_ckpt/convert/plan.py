"""What a conversion will do, decided from manifests alone: formats, names, units, what is left out.

Everything that can be refused is refused here, before anything is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_ckpt.adapter import StateDictAdapter
from torchtitan_ckpt.convert import names
from torchtitan_ckpt.convert.account import is_plain, kept_keys, missing, refuse_unfit, state_of
from torchtitan_ckpt.convert.layouts import layouts_of
from torchtitan_ckpt.convert.options import Format, Options, check, target_format
from torchtitan_ckpt.convert.probe import adapted_units
from torchtitan_ckpt.convert.source import Average, Part, Source, open_source
from torchtitan_ckpt.convert.units import Plain, Planned, Quantizing, Stored, Unit, nbytes
from torchtitan_ckpt.errors import MismatchError, Problem, RefusedError, list_keys
from torchtitan_ckpt.formats import detect
from torchtitan_ckpt.formats.quantized import is_quantized
from torchtitan_ckpt.manifest import TensorEntry, is_floating
from torchtitan_ckpt.mapping.compose import compose
from torchtitan_ckpt.mapping.mapping import Mapping as KeyMapping
from torchtitan_ckpt.mapping.plan import Plan as KeyPlan
from torchtitan_ckpt.mapping.planner import plan_to_hf
from torchtitan_ckpt.mapping.rule import HF, NATIVE

_FORMATS: Mapping[str | None, Format] = {"dcp": "dcp", "hf": "hf", "torch": "pt"}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A decided conversion. `units` make every tensor of the target; `objects` are copied.

    `ties` are pairs of source tensors of which only the second is converted: they must be equal.
    `route` says in words what the names go through, `notes` what a reader should know.
    """

    options: Options
    source: Source
    source_format: Format
    target_format: Format
    units: tuple[Unit, ...]
    objects: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    route: str = ""
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    config_folder: Path | None = None
    quantized: str = ""
    dequantized: bool = False
    raw: bool = False
    fallback_bytes: int = 0

    @property
    def entries(self) -> list[TensorEntry]:
        return [entry for unit in self.units for entry in unit.entries]

    @property
    def bytes_out(self) -> int:
        return sum(nbytes(unit) for unit in self.units)

    @property
    def bytes_in(self) -> int:
        return self.source.manifest.nbytes

    def close(self) -> None:
        self.source.close()


def decide(options: Options) -> Conversion:
    """Open the source and decide. The caller closes what is returned."""
    found = detect(options.src)
    if found.format is None:
        raise found.error()
    source_format = _FORMATS[found.format]
    target = target_format(options, source_format)
    check(options, source_format, target)
    with contextlib.ExitStack() as stack:
        source = _open(options, source_format, target, stack)
        conversion = _Decider(options, source, source_format, target).decide()
        stack.pop_all()
        return conversion


def _open(options: Options, source: Format, target: Format, stack: contextlib.ExitStack) -> Source:
    raw = source == target == "hf" and not (
        options.export_dtype or options.quantize or options.average
    )
    opened = []
    for path in (options.src, *options.average):
        one = open_source(path, dequantize=options.dequantize, raw=raw, trust=options.trust)
        stack.callback(one.close)
        names.refuse_lora(one.manifest.tensors, one.manifest.path)
        if source != "hf":
            # Averages are of models: moments of several runs have no mean that means anything.
            only = "model" if options.average else options.only
            one = Part(one, kept_keys(one.manifest, only, options.exclude))
        opened.append(one)
    if len(opened) == 1:
        return opened[0]
    weights = options.weights or (1 / len(opened),) * len(opened)
    return Average(opened, weights)


class _Decider:
    """Decides step by step; what it gathers on the way becomes the fields of a `Conversion`."""

    def __init__(
        self, options: Options, source: Source, source_format: Format, target: Format
    ) -> None:
        self.options, self.source = options, source
        self.formats = (source_format, target)
        self.to_hf = target == "hf"
        self.notes: list[str] = []
        self.left_out: list[str] = []
        self.ties: tuple[tuple[str, str], ...] = ()
        self.route = "names as they are"
        manifest = source.manifest
        self.model = names.find_model(options, Path(options.src.removeprefix("file://")))
        hf_side = source_format == "hf"
        self.model_keys = [k for k in manifest.tensors if hf_side or state_of(k) == "model"]
        self.rest = [k for k in manifest.tensors if not hf_side and state_of(k) != "model"]

    def decide(self) -> Conversion:
        options, manifest = self.options, self.source.manifest
        if options.average:
            self.notes.append(
                f"the model is the mean of {1 + len(options.average)} checkpoints, in float32"
            )
        fallback = 0
        if options.adapter is not None and self.formats[0] != "hf" and not self.to_hf:
            self.notes.append("an adapter converts to and from Hugging Face names: not used here")
        units: list[Unit]
        if options.adapter is not None and (self.formats[0] == "hf") != self.to_hf:
            units, fallback = self._adapted(names.load_adapter(options.adapter, options))
        else:
            units = list(self._mapped())
        if self.to_hf and options.quantize:
            units = self._quantized(units)
        objects: tuple[str, ...] = ()
        if self.to_hf:
            self._say_dropped()
        else:
            objects = tuple(manifest.objects)
            if self.formats[1] == "pt":
                self._say_unplain(objects)
            units += [Stored(self.source, k, manifest.tensors[k]) for k in self.rest]
        if not units:
            raise MismatchError(
                Problem(
                    code="convert.nothing", what="nothing is left to convert", where=manifest.path
                )
            )
        none_keys = manifest.info.get("none_keys")
        if none_keys and not self.to_hf:
            self.left_out.append(f"{list_keys(none_keys.split(chr(10)))}: a pickled None, absent")
        return Conversion(
            options=options,
            source=self.source,
            source_format=self.formats[0],
            target_format=self.formats[1],
            units=tuple(units),
            objects=objects,
            ties=self.ties,
            route=self.route,
            notes=tuple(self.notes),
            left_out=tuple(self.left_out),
            config_folder=self._assets(),
            quantized=options.quantize or "",
            dequantized=options.dequantize,
            raw=self.formats == ("hf", "hf") and is_quantized(manifest),
            fallback_bytes=fallback,
        )

    # Names

    def _mapped(self) -> list[Plain]:
        options, manifest = self.options, self.source.manifest
        wanted = options.to_generation or options.save_expert_format
        repairs = options.repair_w13_degree > 1
        from_hf = self.formats[0] == "hf"
        if from_hf == self.to_hf and not (not from_hf and (wanted or repairs)):
            return self._stored(None)
        why = "the names of its tensors have to be converted"
        model = names.need_model(self.model, options, why)
        tensors = {key: manifest.tensors[key] for key in self.model_keys}
        if from_hf:
            target = names.named(
                model,
                options,
                options.to_generation or options.generation,
                options.save_expert_format or "standard",
            )
            plan = target.adapter.plan_to_native(tensors, options.export_dtype)
            self.route = f"Hugging Face -> {target.adapter.mapping.name}"
            self._account(target.adapter.mapping, HF, plan, target.adapter.native_entries())
            return self._planned(plan)
        native = names.native_names(tensors, model, options)
        if names.has_hf_names(tensors, native):
            return self._stored("the source has Hugging Face names already")
        if self.to_hf:
            return self._export(model, native, tensors)
        if self.rest:
            raise RefusedError(
                Problem(
                    code="convert.optimizer-names",
                    what="the optimizer's state is kept under the old names",
                    where=list_keys(self.rest, limit=3),
                    fix="add --only model; resume with the generation that saved the step",
                )
            )
        return self._migrate(model, native, tensors)

    def _export(
        self, model: names.Model, native: names.Native, tensors: dict[str, TensorEntry]
    ) -> list[Plain]:
        adapter = native.adapter
        expected = adapter.hf_entries()
        plan = adapter.plan_to_hf(tensors, self.options.export_dtype)
        if missing(adapter.mapping, HF, plan, expected):
            shorter = names.named(
                model,
                self.options,
                adapter.generation,
                native.experts,
                mtp=False,
                w13_shards=self.options.repair_w13_degree,
            ).adapter
            fewer = shorter.hf_entries()
            try:
                without = shorter.plan_to_hf(tensors, self.options.export_dtype)
            except ValueError:  # the source has MTP layers after all
                without = None
            if without is not None and not missing(shorter.mapping, HF, without, fewer):
                adapter, plan, expected = shorter, without, fewer
                self.notes.append("the model was built without MTP layers: none are written")
        self.route = f"{adapter.mapping.name} -> Hugging Face"
        self._account(adapter.mapping, NATIVE, plan, expected)
        return self._planned(plan)

    def _migrate(
        self, model: names.Model, native: names.Native, tensors: dict[str, TensorEntry]
    ) -> list[Plain]:
        options = self.options
        generation = options.to_generation or native.adapter.generation
        stays = generation == native.adapter.generation
        experts = options.save_expert_format or (native.experts if stays else "standard")
        target = names.named(model, options, generation, experts)
        if target.adapter.mapping.name == native.adapter.mapping.name and (
            options.repair_w13_degree == 1
        ):
            return self._stored("the source has these native names already")
        table = compose(native.adapter.mapping, target.adapter.mapping)
        pinned = target.adapter.native_entries(options.export_dtype or "float32")

        def choose(key: str, given: str) -> str:
            if options.export_dtype is None or not is_floating(given):
                return given
            own = pinned.get(key)
            return options.export_dtype if own is None else own.dtype

        plan = plan_to_hf(table, tensors, dtype=choose)
        self.route = table.name
        if options.repair_w13_degree > 1:
            self.route += f", w13 repaired (fused in {options.repair_w13_degree} shards)"
        self._account(table, NATIVE, plan, target.adapter.native_entries())
        return self._planned(plan)

    def _stored(self, note: str | None) -> list[Plain]:
        if note:
            self.notes.append(note)
        out: list[Plain] = []
        pin = self._pins()
        for key in self.model_keys:
            entry = replace(self.source.manifest.tensors[key], shards=())
            wanted = self.options.export_dtype
            if wanted is not None and is_floating(entry.dtype):
                entry = replace(entry, dtype=pin.get(key, wanted))
            out.append(Stored(self.source, key, entry))
        return out

    def _pins(self) -> dict[str, str]:
        """Dtypes that an export keeps whatever is asked, by the source's own names."""
        wanted = self.options.export_dtype
        if wanted is None:
            return {}
        if self.model is None:
            self.notes.append(
                f"every floating tensor becomes {wanted}: without a config.json nothing says which "
                "ones a family keeps"
            )
            return {}
        native = names.native_names(self.model_keys, self.model, self.options)
        if not names.has_hf_names(self.model_keys, native):
            return {k: e.dtype for k, e in native.adapter.native_entries(wanted).items()}
        tensors = self.source.manifest.tensors
        return {
            key: native.adapter.export_dtype(key, tensors[key].dtype, wanted)
            for key in self.model_keys
        }

    def _planned(self, plan: KeyPlan) -> list[Plain]:
        return [
            Planned(self.source, group, entry) for group in plan.groups for entry in group.targets
        ]

    def _adapted(self, adapter: StateDictAdapter) -> tuple[list[Unit], int]:
        tensors = {key: self.source.manifest.tensors[key] for key in self.model_keys}
        found = adapted_units(
            adapter, tensors, self.source, to_hf=self.to_hf, dtype=self.options.export_dtype
        )
        self.route = f"{type(adapter).__name__} of {self.options.adapter}"
        self.notes += found.notes
        return list(found.units), found.fallback_bytes

    def _quantized(self, units: Iterable[Unit]) -> list[Unit]:
        model = names.need_model(self.model, self.options, "it is to be quantized")
        table = names.named(model, self.options).adapter.mapping
        plain = [u for u in units if isinstance(u, Planned | Stored)]
        layouts = layouts_of(self.options.quantize or "family", model, table, plain)
        self.notes.append(f"{len(layouts)} of {len(plain)} tensors are written quantized")
        return [
            Quantizing(unit, layouts[unit.entry.key]) if unit.entry.key in layouts else unit
            for unit in plain
        ]

    # Completeness and words

    def _account(
        self,
        table: KeyMapping,
        source_side: int,
        plan: KeyPlan,
        expected: Mapping[str, TensorEntry],
    ) -> None:
        """Refuse an incomplete or misshapen result; note what is left out and what is tied."""
        absent = missing(table, 1 - source_side, plan, expected)
        refuse_unfit(absent, plan, expected, self.source.manifest.path)
        self.left_out += map(str, table.left_out(self.model_keys, source_side))
        present = set(self.model_keys)
        self.ties = tuple(
            (key, target)
            for tied, key, target in table.bound_ties(source_side, self.model_keys)
            if target in present and not tied.import_loss
        )

    def _say_dropped(self) -> None:
        keys = [*self.rest, *self.source.manifest.objects]
        states: dict[str, int] = {}
        for key in keys:
            states[state_of(key)] = states.get(state_of(key), 0) + 1
        for state, count in states.items():
            self.left_out.append(
                f"{state} ({count} entries): Hugging Face files hold the model only"
            )

    def _say_unplain(self, keys: tuple[str, ...]) -> None:
        values = self.source.objects(keys)
        odd = [key for key, value in values.items() if not is_plain(value)]
        if odd:
            self.notes.append(
                f"{list_keys(odd)}: values that torch.load takes with weights_only=False only"
            )

    def _assets(self) -> Path | None:
        if not self.to_hf:
            return None
        if self.model is not None and self.model.folder is not None:
            return self.model.folder
        self.notes.append(
            "no config.json was found to copy: readers of Hugging Face files want one"
        )
        return None
