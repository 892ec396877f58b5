"""The shipped subjects: every family of this project passes, with torchtitan as the other side."""

from __future__ import annotations

import pytest

from conformance import check
from conformance.subjects import families, names, resolve
from conformance.subjects.configs import CONFIGS

QUICK = ("qwen3", "llama3")


def test_every_family_has_a_config_that_shows_faults() -> None:
    assert set(CONFIGS) == set(names())
    for config in CONFIGS.values():
        assert config["num_hidden_layers"] > 10
        experts = [
            v
            for k, v in config.items()
            if k in ("num_experts", "n_routed_experts", "num_local_experts")
        ]
        assert all(count > 10 for count in experts)
        assert config["hidden_size"] not in (
            config.get("intermediate_size"),
            config.get("moe_intermediate_size"),
        )


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS]
)
def test_a_family_passes_everything(name: str) -> None:
    report = check(name)
    assert report.ok, report.text()


@pytest.mark.parametrize("name", CONFIGS)
def test_keys_and_shapes_of_every_family(name: str) -> None:
    report = check(name, level=1)
    assert report.ok, report.text()


@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_torchtitan_is_the_independent_side_where_it_has_the_family(name: str) -> None:
    pytest.importorskip("torchtitan", reason="wants the extra 'titan'")
    report = check(name, checks=["values.pinned-*", "keys.exact", "shapes.exact"])
    assert {c.verdict for c in report.cells} == {"pass"}
    reference = resolve(name).reference
    assert reference is not None
    assert "torchtitan" in reference.name  # type: ignore[union-attr]


def test_a_family_without_a_second_implementation_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an installed package, where the list that was written apart is not there."""
    monkeypatch.setattr(families, "written", lambda *_: None)
    report = check("deepseek_v4", checks=["values.pinned-export"])
    assert report.cells[0].verdict == "n/a"
    assert "no second implementation" in report.text()
