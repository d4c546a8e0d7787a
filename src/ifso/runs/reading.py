"""All that the folder of a run tells, finished or not; what is broken is left out and told, what is no run refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ifso.common.serialization import parsed, read_lines, read_tensor_file, refuse_special
from ifso.common.text import few, one_line
from ifso.errors import IfsoError, RecipeError, RunError
from ifso.runs.arguments import FINETUNE, pruning_of, refuse_no_network
from ifso.runs.files import (
    CHECKPOINTS,
    CONFIG,
    FIRST_SCORES,
    METRICS,
    RESUMED,
    SCORES,
    STRUCTURE,
    SUMMARY,
    TRAINING,
    read_config,
    read_object,
)
from ifso.runs.structure import Structure, document_of, from_document
from ifso.runs.values import at, listing, mapping, number, numbers, objects, text, whole, wholes
from ifso.surgery.recipe import Recipe
from ifso.surgery.store import RECIPE, WEIGHTS, read_recipe


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


EVALUATION = "eval.json"
"""What ``ifso eval`` measured, if it was written there."""


def read_run(folder: Path, finetuned: Path | None = None) -> RunRecord:
    """All that is known of the run in ``folder``; RunError if there is none.

    ``finetuned`` is where its fine-tuned network is, if that is said.
    """
    tuned = finetuned
    if finetuned is not None:
        refuse_no_network(finetuned)
    config = _config(folder)
    if TRAINING in mapping(config.get("settings")):
        name = text(at(config, "about", "run"))
        if name is None and folder.resolve().name != FINETUNE:
            raise RunError(f"{folder} holds a training and no pruning; give a folder that ifso prune --out made")
        tuned, folder = finetuned or folder, pruning_of(folder, name)
        config = _config(folder)
    return _Reader(folder).read(config, tuned or folder / FINETUNE)


def _config(folder: Path) -> dict[str, Any]:
    """What stands in ``config.json``; nothing where only a network was saved."""
    if (folder / CONFIG).is_file():
        return read_config(folder / CONFIG)
    if (folder / RECIPE).is_file():
        return {}
    if not folder.is_dir():
        raise RunError(f"{folder}: there is no such folder; give one that ifso prune --out made")
    inside = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    hint = "; give a folder that ifso prune --out made"
    if inside:
        hint = f", but {one_line(few(inside, 4))} within it may: give those"
    raise RunError(f"{folder} holds no run (no {CONFIG}){hint}")


class _Reader:
    """Gathers what it cannot read in ``problems``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problems: list[str] = []

    def read(self, config: Mapping[str, Any], tuned: Path) -> RunRecord:
        """The record."""
        folder = self._folder
        summary = self._json(folder / SUMMARY, "shares", "measures", "after")
        removals = self._removals()
        recipe = self._recipe()
        document = self._json(folder / STRUCTURE, "groups")
        structure = self._structure(removals, recipe, document)
        return RunRecord(
            folder=folder,
            config=config,
            structure=structure,
            removals=tuple(removals),
            cost_before=_cost_before(summary, document, recipe, removals),
            summary=summary or (summary if config else {"after": recipe.cost_after if recipe else {}}),
            state={} if summary is not None else self._state(),
            tuning=self._tuning(tuned),
            evaluation=self._json(folder / EVALUATION, "networks"),
            scores=self._scores(structure),
            recipe=None if recipe is None else (folder / RECIPE).read_bytes(),
            weights_bytes=_size_of(folder / WEIGHTS),
            problems=tuple(self._problems),
        )

    def _json(self, path: Path, *keys: str) -> dict[str, Any] | None:
        """The object in a file; one that has none of the keys that matter is as good as damaged."""
        if not path.is_file():
            return None
        found = read_object(path)
        if found is not None and (not keys or found.keys() & set(keys)):
            return found
        self._problems.append(f"{path.name} is damaged and was left out")
        return None

    def _lines(self, path: Path, told: Callable[[Mapping[str, Any]], object]) -> list[dict[str, Any]]:
        """Whole lines that tell one thing each; the others are counted."""
        lines, broken = read_lines(path)
        whole_lines = [line for line in lines if told(line)]
        count = broken + len(lines) - len(whole_lines)
        if count:
            place = path.relative_to(self._folder) if path.is_relative_to(self._folder) else path
            words, were = ("line is", "was") if count == 1 else ("lines are", "were")
            self._problems.append(f"{place}: {count} {words} no whole JSON of a run and {were} left out")
        return whole_lines

    def _removals(self) -> list[RemovalRecord]:
        found = filter(None, map(_removal, self._lines(self._folder / METRICS, _removal)))
        by_number = {removal.number: removal for removal in found}
        return [by_number[each] for each in sorted(by_number)]

    def _recipe(self) -> Recipe | None:
        if not (self._folder / RECIPE).is_file():
            return None
        try:
            return read_recipe(self._folder)
        except RecipeError as error:
            self._problems.append(f"{RECIPE} was left out: {error}")
            return None

    def _structure(
        self, removals: list[RemovalRecord], recipe: Recipe | None, document: Mapping[str, Any] | None
    ) -> Structure:
        gone: dict[str, dict[int, int | None]] = {}
        for removal in removals:
            for name, places in removal.units.items():
                gone.setdefault(name, {}).update(dict.fromkeys(places, removal.number))
        if recipe is not None:
            last = recipe.rounds[-1].groups if recipe.rounds else ()
            lost = {group.name: sorted({*range(group.size)} - {*group.kept}) for group in last}
            gone = {name: {place: gone.get(name, {}).get(place) for place in lost[name]} for name in lost}
            document = document_of(recipe) if document is None else document
        return Structure() if document is None else from_document(document, gone, recipe)

    def _state(self) -> dict[str, Any]:
        """What the newest checkpoint that can be read says beside its tensors."""
        for path in sorted((self._folder / CHECKPOINTS).glob("*.safetensors"), reverse=True):
            state = None
            with suppress(OSError, SafetensorError, RunError):
                refuse_special(path)
                with safe_open(path, framework="pt") as file:
                    state = parsed((file.metadata() or {}).get("state", "").encode())
            if state is None:
                self._problems.append(f"{CHECKPOINTS}/{path.name} is damaged and was left out")
            else:
                return mapping(at(state, "progress"))
        return {}

    def _tuning(self, folder: Path) -> TuningRecord | None:
        config = self._json(folder / CONFIG)
        if config is None and (folder / RECIPE).is_file():
            return TuningRecord(folder, {}, (), {}, _size_of(folder / WEIGHTS))
        if config is None:
            return None
        epochs = map(numbers, self._lines(folder / METRICS, lambda line: "epoch" in numbers(line)))
        return TuningRecord(folder, config, tuple(epochs), self._json(folder / SUMMARY), _size_of(folder / WEIGHTS))

    def _scores(self, structure: Structure) -> ScoresRecord | None:
        for name in (FIRST_SCORES, SCORES):
            path = self._folder / name
            if not path.is_file():
                continue
            try:
                tensors, _ = read_tensor_file(path)
            except (IfsoError, ValueError):
                self._problems.append(f"{name} is damaged and was left out")
                continue
            sizes = {group.name: group.size for group in structure.groups}
            found = {key: tensor.double().flatten().tolist() for key, tensor in tensors.items()}
            fitting = {key: values for key, values in found.items() if sizes.get(key) == len(values)}
            return ScoresRecord(fitting, first=name == FIRST_SCORES)
        return None


def _size_of(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_size if path.is_file() else None
    return None


def _removal(line: Mapping[str, Any]) -> RemovalRecord | None:
    count = whole(line.get("removal"))
    if count is None or not isinstance(line.get("units"), dict):
        return None
    units = {name: wholes(places) for name, places in line["units"].items()}
    costs, shares = numbers(line.get("costs")), numbers(line.get("shares"))
    return RemovalRecord(
        count, units, number(line.get("score")), costs, shares, number(line.get("loss")), number(line.get("seconds"))
    )


def _cost_before(
    summary: Mapping[str, Any] | None,
    document: Mapping[str, Any] | None,
    recipe: Recipe | None,
    removals: list[RemovalRecord],
) -> dict[str, float]:
    found = numbers(mapping(summary).get("before")) or numbers(mapping(document).get("cost"))
    if found:
        return found
    if recipe is not None and recipe.rounds:
        return dict(recipe.rounds[-1].cost_before)
    if not removals:
        return {}
    first = removals[0]
    return {name: round(cost / first.shares[name]) for name, cost in first.costs.items() if first.shares.get(name)}
