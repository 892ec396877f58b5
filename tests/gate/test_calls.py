"""What a call may know: nothing of earlier calls, of assets, or of the process's settings."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from conformance import check
from conformance.checks._words import otherwise
from conformance.settings import SETTINGS, Setting, put_back, seeded, under
from conformance.verdict import Cell
from tests.specimens import right
from tests.specimens.edits import edited, value
from tests.specimens.right import Right, State
from tests.specimens.specimen import BLIND


def cell(adapter: Any, check_id: str) -> Cell:
    return check(right.subject("called", adapter, **BLIND), checks=[check_id]).cell(check_id)


def with_a_look(look: Callable[[], object]) -> type:
    def looked(state: State) -> State:
        look()
        return state

    return edited(export=looked)


@pytest.fixture(params=SETTINGS, ids=lambda s: s.name.replace(" ", "-"))
def setting(request: pytest.FixtureRequest) -> Setting:
    return request.param  # type: ignore[no-any-return]


def test_a_setting_that_a_call_leaves_is_told_and_put_back(setting: Setting) -> None:
    before = setting.read()
    assert setting.other != before
    found = cell(with_a_look(lambda: setting.write(setting.other)), "purity.settings")
    assert [f.what for f in found.findings] == [
        f"to_hf leaves the process with another {setting.name}"
    ]
    assert found.findings[0].actual == str(setting.other)
    assert setting.read() == before


def test_a_setting_that_the_factory_leaves_is_told_and_put_back(setting: Setting) -> None:
    class Writes(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            setting.write(setting.other)

    before = setting.read()
    (finding,) = cell(Writes, "purity.settings").findings
    assert finding.what == f"the adapter's factory leaves the process with another {setting.name}"
    assert setting.read() == before


def test_a_setting_that_a_call_follows_is_named(setting: Setting) -> None:
    def other(tensor: Any) -> Any:
        return tensor + 1 if setting.read() == setting.other else tensor

    (finding,) = cell(edited(value("embed", other)), "purity.settings").findings
    assert finding.what == f"to_hf under {setting.name} {setting.other} gives 1 tensor otherwise"
    assert finding.keys == ("model.embed_tokens.weight",)


def test_two_settings_that_are_followed_together_are_named_together() -> None:
    def other(tensor: Any) -> Any:
        both = torch.get_default_dtype() == torch.bfloat16 and not torch.is_grad_enabled()
        return tensor + 1 if both else tensor

    (finding,) = cell(edited(value("embed", other)), "purity.settings").findings
    assert "grad mode False, default dtype torch.bfloat16" in finding.what


def test_a_setting_is_put_back_when_the_call_raises(setting: Setting) -> None:
    before = setting.read()
    with pytest.raises(KeyError), put_back() as changed, under(setting):
        raise KeyError
    assert changed == {}
    with contextlib.suppress(KeyError), put_back() as changed:
        setting.write(setting.other)
        raise KeyError
    assert changed == {setting.name: (before, setting.other)}
    assert setting.read() == before


@pytest.mark.parametrize(
    ("name", "seed", "draw"),
    [
        ("torch's", torch.manual_seed, lambda: torch.rand(1)),
        ("Python's", random.seed, random.random),
        ("numpy's", numpy.random.seed, numpy.random.rand),
    ],
    ids=["torch", "python", "numpy"],
)
def test_random_numbers_may_be_drawn_and_not_seeded(
    name: str, seed: Callable[[int], object], draw: Callable[[], object]
) -> None:
    (finding,) = cell(with_a_look(lambda: seed(0)), "purity.settings").findings
    assert finding.what == f"to_hf seeds {name} random numbers"
    assert cell(with_a_look(draw), "purity.settings").verdict == "pass"


def test_random_numbers_go_on_where_they_were() -> None:
    with seeded(5):
        with seeded(3) as one:
            torch.rand(2)
        first = random.random(), torch.rand(1).item(), numpy.random.rand()
    with seeded(5):
        assert first == (random.random(), torch.rand(1).item(), numpy.random.rand())
    with seeded(3) as two:
        pass
    assert [name for name in one if one[name] != two[name]] == ["torch's"]


def test_a_second_call_that_raises_is_told_with_what_came_before() -> None:
    class Once(Right):
        """Takes no other dtype than that of its first call."""

        dtype: Any = None

        def to_hf(self, state_dict: State) -> State:
            dtypes = {v.dtype for k, v in state_dict.items() if k == "norm.weight"}
            if self.dtype and dtypes and dtypes != self.dtype:
                raise TypeError("norm.weight has another dtype")
            self.dtype = self.dtype or dtypes
            return super().to_hf(state_dict)

    (finding,) = cell(Once, "purity.repeat").findings
    assert finding.what == "to_hf after other dtypes fails"
    assert "norm.weight has another dtype" in finding.actual


def test_what_depends_on_sizes_may_be_kept() -> None:
    class Keeps(Right):
        orders: dict[int, Any] = {}  # noqa: RUF012

        def export_experts(self, prefix: str, part: str, value: Any) -> State:
            order = self.orders.setdefault(len(value), torch.arange(len(value)))
            ordered = value if value.is_meta else value[order]
            return super().export_experts(prefix, part, ordered)

    for check_id in ("purity.repeat", "purity.stateless", "purity.settings", "purity.assets"):
        assert cell(Keeps, check_id).verdict == "pass", check_id


def test_a_folder_that_an_adapter_cannot_be_built_on_is_told_once() -> None:
    class Wants(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            if hf_assets_path:
                Path(hf_assets_path, "tokenizer.json").read_text()

    report = check(right.subject("wants", Wants, **BLIND), checks=["keys.index", "purity.assets"])
    assert report.cell("keys.index").verdict == "fail"
    assert report.cell("purity.assets").reason == "by keys.index"
    assert cell(Wants, "purity.assets").verdict == "blocked"


def test_another_dtype_is_told_as_that() -> None:
    one, two = {"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.bfloat16)}
    assert otherwise(one, two) == {"a": "dtype bfloat16"}
