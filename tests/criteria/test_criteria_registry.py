"""Criteria by name: what there is, and what is said of what there is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Literal

import pytest

from ifso.criteria import registry
from ifso.criteria.base import Criterion
from ifso.criteria.weights import Magnitude
from ifso.errors import ScoreError

PROMISED = (
    "ifso", "authors", "group-fisher", "taylor", "magnitude", "magnitude-average", "fpgm", "bn-scale", "hrank",
    "random",
)  # fmt: skip


def test_every_promised_name():
    assert set(registry.names()) >= set(PROMISED)


def test_every_name_is_a_frozen_dataclass_of_that_name(any_criterion):
    kind = registry.find(any_criterion)
    assert issubclass(kind, Criterion)
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert kind.name == any_criterion
    assert kind.needs in ("nothing", "weights", "activations", "gradients", "curvature")
    assert registry.create(any_criterion) == kind()


def test_options_are_fields():
    assert registry.create("magnitude", p=2) == Magnitude(p=2)


def test_an_unknown_name_lists_all_names():
    with pytest.raises(ScoreError, match=r"no criterion 'magnitud'; choose one of ifso, .*, random") as caught:
        registry.create("magnitud")
    assert all(name in str(caught.value) for name in PROMISED)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("magnitude", {"q": 2}, "criterion 'magnitude' has no option 'q'; it takes p=1"),
        ("fpgm", {"p": 1}, "criterion 'fpgm' has no option 'p'; it takes no options"),
        ("magnitude", {"p": 3}, "p must be 1 or 2, got 3"),
        ("magnitude", {"p": True}, "p must be 1 or 2, got True"),
        ("magnitude", {"p": "1"}, "p must be 1 or 2, got '1'"),
        ("random", {"seed": 0.5}, "seed must be int, got 0.5"),
        ("random", {"seed": False}, "seed must be int, got False"),
        ("group-fisher", {"reduction": "none"}, "reduction must be 'mean' or 'sum', got 'none'"),
    ],
)
def test_bad_options(name, options, words):
    with pytest.raises(ScoreError) as caught:
        registry.create(name, **options)
    assert words in str(caught.value)


def test_types_of_options():
    @dataclass(frozen=True)
    class Mine(Criterion):
        name = "mine"
        needs = "nothing"
        damping: float | None = None
        mode: Literal["a", None] = None
        on: bool = True
        more: Mapping[str, int] | None = None

        def units(self, task, batch):
            raise NotImplementedError

    globals()["Mine"] = Mine
    for good in ({"damping": 1}, {"damping": 0.5}, {"damping": None}, {"mode": "a"}, {"on": False}, {"more": {}}):
        Mine(**good)
    for bad in ({"damping": "1"}, {"damping": True}, {"mode": "b"}, {"on": 1}, {"more": 5}):
        with pytest.raises(ScoreError, match="must be"):
            Mine(**bad)


def test_a_criterion_is_imported_when_asked_for(monkeypatch):
    asked = []
    real = registry.import_module
    monkeypatch.setattr(registry, "import_module", lambda name: asked.append(name) or real(name))
    assert registry.names()
    assert asked == []
    registry.create("magnitude-average")
    assert asked == ["ifso.criteria.weights"]
    assert not [kind for kind in vars(registry).values() if isinstance(kind, type) and issubclass(kind, Criterion)]
