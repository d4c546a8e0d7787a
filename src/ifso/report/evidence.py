"""Sections of words and tables: what is frozen, what was checked, and how the run was made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ifso.pruning.result import LABELS
from ifso.report.commands import finetune_command, prune_command
from ifso.report.markup import Markup, element, joined, table
from ifso.report.parts import folded, said, section
from ifso.runs.record import RunRecord
from ifso.runs.structure import Group
from ifso.runs.values import mapping, numbers, objects, text

FLAGS = "Flagged groups feed functions for which a masked unit is not the same as a removed one."


def frozen(run: RunRecord, number: int) -> Markup:
    """What cannot be pruned, and why."""
    title, found = "What is frozen, and why", run.structure
    inside: list[Markup] = []
    if found.frozen:
        rows = ((each.reason, f"{each.slices:,}", _names(each.parameters)) for each in found.frozen)
        inside.append(table(("reason", "channels", "parameters"), rows, caption="By reason", class_="words"))
    else:
        inside.append(said("Nothing is frozen." if found.groups else "The folder does not tell."))
    flagged = _by_flag(found.groups)
    if flagged:
        lines = ((flag, str(len(names)), _names(names)) for flag, names in flagged.items())
        inside.append(table(("flag", "groups", "names"), lines, caption=FLAGS, class_="words"))
    return section("frozen", number, title, *inside)


def _by_flag(groups: Iterable[Group]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for group in groups:
        for flag in group.flags:
            found.setdefault(flag, []).append(group.name)
    return dict(sorted(found.items()))


def _names(names: Iterable[str], few: int = 6) -> Markup:
    """Names; many of them behind the first few."""
    names = list(names)
    shown = ", ".join(names[:few])
    if len(names) <= few:
        return joined((shown,))
    rest = element("details", element("summary", f"and {len(names) - few} more"), ", ".join(names[few:]))
    return joined((shown, " ", rest))


def trust(run: RunRecord, number: int) -> Markup:
    """What was verified and measured, and what the run said of itself."""
    checks = list(objects(mapping(run.summary).get("checks")))
    inside: list[Markup] = []
    if checks:
        rows = ((text(each.get("name")) or "?", _verdict(each), text(each.get("detail")) or "") for each in checks)
        inside.append(table(("check", "result", "detail"), rows, caption="Checks of the result", class_="words"))
    else:
        inside.append(said("No checks were recorded." if run.finished else "Checks come at the end of a run."))
    if run.measures:
        inside.append(_measures(run))
    if run.stages:
        inside.append(folded("Stage by stage", _stages(run), len(run.stages)))
    if run.notes:
        inside += [element("h3", "What the run said"), element("ul", *(element("li", note) for note in run.notes))]
    return section("trust", number, "Can it be trusted?", *inside)


def _verdict(check: Mapping[str, Any]) -> Markup:
    passed = check.get("passed") is True
    return element("span", "passed" if passed else "FAILED", class_="ok" if passed else "bad")


def _measures(run: RunRecord) -> Markup:
    names = list(dict.fromkeys(name for _, values in run.measures for name in values))
    rows = ((stage, *(f"{values[n]:.4g}" if n in values else "" for n in names)) for stage, values in run.measures)
    headings = ("stage", *(name.replace("_", " ") for name in names))
    return table(headings, rows, caption="Measured between the stages", class_="numbers")


def _stages(run: RunRecord) -> Markup:
    """What each stage of a staged run left of the costs asked for, and of the measures."""
    costs = list(mapping(mapping(run.summary).get("targets"))) or ["macs"]
    worth = [numbers(stage.get("values")) for stage in run.stages]
    names = list(dict.fromkeys(name for values in worth for name in values))
    headings = ("stage", *(f"{LABELS.get(cost, cost)} kept" for cost in costs), "units removed", *names, "seconds")
    rows = []
    for stage, values in zip(run.stages, worth, strict=True):
        shares = numbers(stage.get("shares"))
        plain = numbers(stage)
        kept = (f"{shares[cost]:.1%}" if cost in shares else "" for cost in costs)
        found = (f"{values[name]:.4g}" if name in values else "" for name in names)
        units, seconds = plain.get("units", 0), plain.get("seconds", 0)
        rows.append((f"{plain.get('stage', 0):g}", *kept, f"{units:g}", *found, f"{seconds:.1f}"))
    return table(headings, rows, caption="What each stage left", class_="numbers")


def setup(run: RunRecord, number: int) -> Markup:
    """Settings, versions, and the commands that repeat it."""
    commands = {"pruning": prune_command(run)}
    settings = {"Versions": mapping(run.config.get("versions")), "Settings of the pruning": run.settings}
    if run.tuning is not None:
        commands["fine-tuning"] = finetune_command(run, run.tuning)
        settings["Settings of the fine-tuning"] = mapping(run.tuning.config.get("settings"))
        summary = mapping(run.tuning.summary)
        machine: dict[str, Any] = {name: summary[name] for name in ("hardware", "torch", "ifso") if name in summary}
        settings["Machine of the fine-tuning"] = machine
    tables = (_settings(name, values) for name, values in settings.items() if values)
    folder = said("Run folder: ", element("code", str(run.folder)))
    title, heading = "Configuration, versions and commands", element("h3", "To repeat it")
    lines = dict.fromkeys(_command(what, command) for what, command in commands.items())
    return section("setup", number, title, heading, *lines, *tables, folder)


def _command(what: str, command: str | None) -> Markup:
    if command is None:
        return said(f"The {what} was begun from Python, with the settings below.")
    return element("pre", element("code", command), tabindex="0")


def _settings(name: str, values: Mapping[str, Any]) -> Markup:
    rows = list(flattened(values))
    return folded(name, table(("setting", "value"), rows, caption=name, class_="words"), len(rows))


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings within settings, with dotted names.

    >>> list(flattened({"budget": {"macs": 0.5}, "ignore": [], "round_to": None}))
    [('budget.macs', '0.5'), ('ignore', '–'), ('round_to', '–')]
    """
    for name, value in values.items():
        only = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(only, dict):
            yield from flattened(only, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", ", ".join(map(str, value)) or "–"
        else:
            yield f"{prefix}{name}", "–" if value is None else str(value)
