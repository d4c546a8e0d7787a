"""A result as a table that a person can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ifso.pruning.result import PruneResult


def told(result: PruneResult) -> str:
    """Costs before and after, what the network was worth at each stage, what was checked."""
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
    head = (
        f"{type(result.model).__name__}: {result.removed_units} of {result.graph.num_units} units removed "
        f"in {result.seconds:.1f} s, {result.below_target:.2%} below the target"
    )
    lines = [head, "", *_aligned(rows)]
    if result.measures:
        lines += ["", *_aligned(_measures(result))]
    lines += [
        "",
        *(f"{'ok    ' if check.passed else 'FAILED'} {check.name}: {check.detail}" for check in result.checks),
    ]
    lines += [f"note: {note}" for note in result.notes]
    return "\n".join(line.rstrip() for line in lines)


def _measures(result: PruneResult) -> list[tuple[str, ...]]:
    names = list(dict.fromkeys(name for measure in result.measures for name in measure.values))
    stages = [(one.stage, *(_number(one.values.get(name)) for name in names)) for one in result.measures]
    return [("stage", *names), *stages]


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
