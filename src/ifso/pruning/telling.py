"""A result as a table that a person can read."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ifso.pruning.result import PruneResult

T = TypeVar("T")

MOST_STAGES = 12
"""Stages that are shown, at most."""

MOST_NAMES = 5
"""Names of groups that are shown, at most."""


Row = tuple[str, ...]


def told(result: PruneResult) -> str:
    """Costs before and after, what the network was worth at each stage, which layers can lose no more, the checks."""
    lines = [_head(result), "", *_aligned(_costs(result))]
    if result.measures:
        lines += ["", *_aligned(_measures(result))]
    if result.stages:
        rows, hidden = _stages(result)
        lines += ["", *_aligned(rows), *hidden]
    if result.floors:
        lines += ["", f"reached their floor: {_named(result.floors)}"]
    lines += [
        "",
        *(f"{'ok    ' if check.passed else 'FAILED'} {check.name}: {check.detail}" for check in result.checks),
    ]
    lines += [f"note: {note}" for note in result.notes]
    return "\n".join(line.rstrip() for line in lines)


def told_in_html(result: PruneResult) -> str:
    """The same as tables for a notebook; the stages are folded."""
    parts = [f"<p><b>{escape(_head(result))}</b></p>", _table(_costs(result))]
    if result.measures:
        parts.append(_table(_measures(result)))
    if result.stages:
        rows, hidden = _stages(result)
        more = "".join(f"<p>{escape(line)}</p>" for line in hidden)
        parts.append(f"<details><summary>{len(result.stages)} stages</summary>{_table(rows)}{more}</details>")
    lines = [f"reached their floor: {_named(result.floors)}"] if result.floors else []
    lines += [f"{'✓' if check.passed else '✗ FAILED'} {check.name}: {check.detail}" for check in result.checks]
    lines += [f"note: {note}" for note in result.notes]
    return "\n".join((*parts, f"<p>{'<br>'.join(map(escape, lines))}</p>"))


def _table(rows: Sequence[Row]) -> str:
    """The first row is the head, the first column names the others."""
    head, *body = ([escape(cell) for cell in row] for row in rows)
    names = "".join(f"<th>{cell}</th>" for cell in head)
    lines = (f"<tr><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>" for first, *rest in body)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _head(result: PruneResult) -> str:
    return (
        f"{type(result.model).__name__}: {result.removed_units} of {result.graph.num_units} units removed "
        f"in {result.seconds:.1f} s, {result.below_target:.2%} below the target"
    )


def _costs(result: PruneResult) -> list[Row]:
    from ifso.pruning.result import LABELS

    before, after = result.before.as_dict(), result.after.as_dict()
    rows: list[tuple[str, ...]] = [("", "before", "after", "kept", "asked for")]
    for kind, share in result.shares.items():
        numbers = (f"{before[kind]:,}", f"{after[kind]:,}") if kind in before else ("", "")
        asked = f"{result.targets[kind]:.2%}" if kind in result.targets else ""
        rows.append((LABELS.get(kind, kind), *numbers, f"{share:.2%}", asked))
    if result.latency is not None:
        first, last = (f"{1000 * result.latency[name]:.2f} ms" for name in ("before", "after"))
        rows.append(("latency (measured)", first, last, f"{result.latency['share']:.2%}", ""))
    return rows


def _measures(result: PruneResult) -> list[tuple[str, ...]]:
    names = list(dict.fromkeys(name for measure in result.measures for name in measure.values))
    stages = [(one.stage, *(_number(one.values.get(name)) for name in names)) for one in result.measures]
    return [("stage", *names), *stages]


def _stages(result: PruneResult) -> tuple[list[Row], list[str]]:
    """Rows of the stages; of many, the first, the last and some between them, and a line that says so."""
    from ifso.pruning.result import LABELS

    kinds = dict.fromkeys(("macs", *result.targets))
    names = list(dict.fromkeys(name for stage in result.stages for name in stage["values"]))
    shown = spread_over(result.stages, MOST_STAGES)
    head = ("stage", *(f"{LABELS.get(kind, kind)} kept" for kind in kinds), "units removed", *names, "seconds so far")
    rows = [
        (
            f"{stage['stage']}",
            *(_share(stage["shares"].get(kind)) for kind in kinds),
            f"{stage['units']}",
            *(_number(stage["values"].get(name)) for name in names),
            f"{stage['seconds']:.1f}",
        )
        for stage in shown
    ]
    hidden = len(result.stages) - len(shown)
    return [head, *rows], [f"{len(shown)} of {len(result.stages)} stages are shown"] if hidden else []


def spread_over(items: Sequence[T], most: int) -> list[T]:
    """All items, or the first, the last and evenly spaced ones between them: ``most`` in all.

    >>> spread_over(range(1, 10), 3), spread_over("ab", 3)
    ([1, 5, 9], ['a', 'b'])
    """
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _named(names: Sequence[str]) -> str:
    """The first few, and how many more there are.

    >>> _named(["a", "b"]), _named("abcdefg")
    ('a, b', 'a, b, c, d, e (and 2 more)')
    """
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" (and {more} more)" if more > 0 else "")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right.

    >>> _aligned([("", "a"), ("long", "12")])
    ['       a', 'long  12']
    """
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if not place else cell.rjust(width)
                  for place, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]  # fmt: skip
