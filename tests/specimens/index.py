"""Specimens of the chapter `keys`: the map of keys to files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from conformance import codec
from tests.specimens.right import Right, State
from tests.specimens.specimen import BLIND, HEAD, Specimen


def index() -> list[Specimen]:
    class Stale(Right):
        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            if self.fqn_to_index_mapping is not None:
                self.fqn_to_index_mapping["mtp.0.head.weight"] = 3
            return out

    class Ignores(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(None)

    class FromZero(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            self.listed = {k: v - 1 for k, v in self.listed.items()}

    class AsText(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            self.listed = {k: f"{v:05}" for k, v in self.listed.items()}  # type: ignore[misc]

    class Shorter(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            self.listed.pop(HEAD, None)

    class AllInOne(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            self.listed = dict.fromkeys(self.listed, 1)

    class LastDigit(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            self.listed = {k: v % 10 for k, v in self.listed.items()}

    class FiveDigits(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            if self.listed:
                text = Path(hf_assets_path or "", codec.INDEX).read_text()
                name = r"model-\d{5}-of-\d{5}\.safetensors"
                files = json.loads(text)["weight_map"].values()
                if not all(re.fullmatch(name, file) for file in files):
                    raise ValueError(f"files are called {name}")

    class ScalesStay(Right):
        """As torchtitan's: the index is taken as it is, though scales are never written."""

        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            if self.fqn_to_index_mapping is not None:
                self.fqn_to_index_mapping = dict(self.listed)
            return out

    class CutDown(Right):
        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            self.listed = {k: v for k, v in self.listed.items() if k in out}
            return out

    class Emptied(Right):
        def from_hf(self, hf_state_dict: State) -> State:
            self.listed.clear()
            self.fqn_to_index_mapping = None
            return super().from_hf(hf_state_dict)

    class OnTheClass(Right):
        kept: dict[str, int] | None = None

        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            type(self).kept = self.fqn_to_index_mapping or self.kept
            self.fqn_to_index_mapping = self.kept

    class WantsIndex(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            if hf_assets_path:
                Path(hf_assets_path, codec.INDEX).read_text()

    class NoMember(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            if not hf_assets_path:
                del self.fqn_to_index_mapping

    def only(name: str, adapter: type, kinds: str = "", key: str = "model.") -> Specimen:
        return Specimen(name, "keys.index", key, adapter, kinds, True, BLIND)

    return [
        only("last-digit-of-a-file", LastDigit, "HFS-04"),
        only("file-names-of-fixed-widths", FiveDigits, "HFS-04"),
        only("scales-stay-in-the-index", ScalesStay, "", "weight_scale_inv"),
        only("map-cut-down-by-a-part", CutDown),
        only("map-emptied-by-import", Emptied),
        only("map-on-the-class", OnTheClass),
        only("folder-without-index-refused", WantsIndex, "HFS-05"),
        only("no-map-without-index", NoMember),
        Specimen("stale-index", "keys.index", "mtp.0.head.weight", Stale, "TIE-03", True, BLIND),
        Specimen("index-ignored", "keys.index", "model.", Ignores, "HFS-05", False, BLIND),
        Specimen("files-from-zero", "keys.index", "model.", FromZero, "HFS-04", False, BLIND),
        Specimen("files-as-text", "keys.index", "00001", AsText, "HFS-04", False, BLIND),
        Specimen("index-lacks-head", "keys.index", HEAD, Shorter, "HFS-03", False, BLIND),
        Specimen("all-in-one-file", "keys.index", "model.", AllInOne, "HFS-04", False, BLIND),
    ]
