"""What the folder of a run told, as :mod:`ifso.runs.reading` found it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ifso.runs.files import RESUMED
from ifso.runs.structure import Structure
from ifso.runs.values import at, listing, mapping, number, numbers, objects, text


@dataclass(frozen=True)
class RemovalRecord:
    """One removal, as ``metrics.jsonl`` has it."""

    number: int
    units: Mapping[str, tuple[int, ...]]
    score: float | None
    costs: Mapping[str, float]
    shares: Mapping[str, float]
    loss: float | None
    seconds: float | None


@dataclass(frozen=True)
class TuningRecord:
    """A fine-tuning: its epochs (numbers by name), the summary if it has come to its end, and bytes of its weights.

    Of a network that another program trained and ``ifso.save`` wrote, nothing but the bytes is known.
    """

    folder: Path
    config: Mapping[str, Any]
    epochs: tuple[Mapping[str, float], ...]
    summary: Mapping[str, Any] | None
    weights_bytes: int | None = None

    @property
    def planned(self) -> int | None:
        """Epochs in all."""
        value = at(self.config, "settings", "training", "epochs")
        return value if isinstance(value, int) else None

    @property
    def seconds(self) -> float:
        """How long its epochs took."""
        return sum(epoch.get("seconds", 0.0) for epoch in self.epochs)

    @property
    def split(self) -> str:
        """Where its accuracies are from."""
        if self.summary is not None:
            return text(self.summary.get("split")) or "test"
        return "validation" if at(self.config, "settings", "validation") else "test"


@dataclass(frozen=True)
class ScoresRecord:
    """Scores by group; ``first`` are those of the first step, normalised, else the last ones of what is left."""

    by_group: Mapping[str, list[float]]
    first: bool

    @property
    def are_positive(self) -> bool:
        """Whether there is one that a logarithmic scale can show."""
        return any(value > 0 for values in self.by_group.values() for value in values)


@dataclass(frozen=True)
class RunRecord:
    """A run. ``state`` is what the newest checkpoint says of an unfinished one, ``problems`` what could not be read.

    ``recipe`` is the file as it is, ``weights_bytes`` the size of the file with the pruned network.
    """

    folder: Path
    config: Mapping[str, Any]
    structure: Structure = field(default_factory=Structure)
    removals: tuple[RemovalRecord, ...] = ()
    cost_before: Mapping[str, float] = field(default_factory=dict)
    summary: Mapping[str, Any] | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    tuning: TuningRecord | None = None
    evaluation: Mapping[str, Any] | None = None
    scores: ScoresRecord | None = None
    recipe: bytes | None = None
    weights_bytes: int | None = None
    problems: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether the pruning has come to its end."""
        return self.summary is not None

    @property
    def settings(self) -> dict[str, Any]:
        """What it was asked to do."""
        return mapping(self.config.get("settings"))

    @property
    def arguments(self) -> dict[str, Any]:
        """Options of the command line; none for a run that Python began."""
        return mapping(at(self.config, "about", "arguments"))

    @property
    def criterion(self) -> str:
        """By what units were chosen."""
        return text(at(self.settings, "criterion", "name")) or "unknown criterion"

    @property
    def model(self) -> str:
        """MODEL as it was given, else the class."""
        told = text(self.arguments.get("model")) or text(at(self.config, "about", "model"))
        named = text(self.settings.get("model")) or text(mapping(self.summary).get("model")) or "network"
        return told or named.rpartition(".")[2]

    @property
    def data(self) -> str | None:
        """DATA as it was given, else what the fine-tuning says."""
        told = text(self.arguments.get("data")) or text(at(self.config, "about", "data"))
        return told or (text(at(self.tuning.config, "settings", "data")) if self.tuning else None)

    @property
    def targets(self) -> dict[str, float]:
        """Shares to keep, by the name of a cost."""
        return numbers(self.settings.get("budget")) or numbers(mapping(self.summary).get("targets"))

    @property
    def notes(self) -> list[str]:
        """What the run said of itself."""
        source = self.summary if self.summary is not None else self.state
        return [note for note in listing(source.get("notes")) if isinstance(note, str)]

    @property
    def resumes(self) -> list[str]:
        """The notes that tell of a resume."""
        return [note for note in self.notes if note.startswith(RESUMED)]

    @property
    def stages(self) -> list[Mapping[str, Any]]:
        """The stages of a staged run so far: what each left, and what the network was worth after it."""
        return list(objects((self.summary or self.state).get("stages")))

    @property
    def measures(self) -> list[tuple[str, dict[str, float]]]:
        """What the network was worth, by stage."""
        if self.summary is not None:
            return [(text(one.get("stage")) or "", numbers(one)) for one in objects(self.summary.get("measures"))]
        return [
            (text(one.get("stage")) or "", numbers(one.get("values"))) for one in objects(self.state.get("measures"))
        ]

    @property
    def seconds(self) -> float | None:
        """How long the pruning took, or has taken so far."""
        told = number(mapping(self.summary).get("seconds"))
        return self.removals[-1].seconds if told is None and self.removals else told

    @property
    def shares(self) -> dict[str, float]:
        """What is left of every cost, at the end or so far."""
        found = numbers(mapping(self.summary).get("shares"))
        if found or not self.removals:
            return found or {
                name: value / self.cost_before[name]
                for name, value in self.cost_after.items()
                if self.cost_before.get(name)
            }
        return dict(self.removals[-1].shares)

    @property
    def cost_after(self) -> dict[str, float]:
        """Every cost at the end, or so far."""
        found = numbers(mapping(self.summary).get("after"))
        if found:
            return found
        return dict(self.removals[-1].costs) if self.removals else dict(self.cost_before)
