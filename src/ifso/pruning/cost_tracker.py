"""What is left of every cost while units go, kept up to date instead of counted anew.

A cost is a weighted sum over the terms of the graph (:class:`ifso.graph.layouts.Term`). Most terms are products of
numbers of slices, so that a unit that goes changes only the sizes of the axes it stands on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ifso.costs.cost import KINDS
from ifso.graph.channel_graph import STAYS, ChannelGraph
from ifso.graph.layouts import Term

Incidence = list[list[tuple[int, int]]]
"""For each unit (row, slices): the rows of unit numbers it stands in, and how often."""


def incidence(rows: Sequence[Tensor], units: int) -> Incidence:
    """Where each unit stands in ``rows`` of unit numbers, and how often.

    >>> incidence([torch.tensor([0, 0, -1]), torch.tensor([1, 0])], 2)
    [[(0, 2), (1, 1)], [(1, 1)]]
    """
    found: Incidence = [[] for _ in range(units)]
    for number, row in enumerate(rows):
        members, counts = row[row != STAYS].unique(return_counts=True)
        for unit, count in zip(members.tolist(), counts.tolist(), strict=True):
            found[unit].append((number, count))
    return found


class Ledger:
    """Costs of what is left of a traced network.

    ``kept`` [units + 1] is where it starts, everything by default. ``extra`` adds costs: for each name a float64
    tensor [len(graph.terms) + 1] of what one surviving element of each term costs, and a constant as its last entry.

    >>> from ifso.graph.tracing import trace
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    >>> ledger = Ledger(trace(net, torch.zeros(1, 3, 8, 8)))
    >>> ledger.remove([0, 5]), ledger.costs()["params"], round(ledger.shares()["params"], 3)
    (None, 388, 0.752)
    """

    def __init__(
        self, graph: ChannelGraph, kept: Tensor | None = None, extra: Mapping[str, Tensor] | None = None
    ) -> None:
        self._terms, self._units = graph.terms, graph.num_units
        self._weights = {
            name: {place: 1 for place, term in enumerate(graph.terms) if term.kind in kinds}
            for name, kinds in KINDS.items()
        }
        self._constants: dict[str, float] = {}
        for name, weights in (extra or {}).items():
            self._add(name, weights)
        self._index_terms()
        self._kept = graph.kept(None)
        self._recount()
        self._whole = self.costs()
        self._saved: dict[str, _Savings] = {}
        if kept is not None:
            self._kept = kept.detach().to("cpu", torch.bool).clone()
            self._recount()

    def _add(self, name: str, weights: Tensor) -> None:
        if weights.shape != (len(self._terms) + 1,) or not bool(weights.isfinite().all()):
            raise ValueError(f"{name} needs {len(self._terms)} finite weights and a constant, not {weights}")
        *values, constant = weights.double().tolist()
        self._weights[name] = {place: value for place, value in enumerate(values) if value}
        self._constants[name] = constant

    def _index_terms(self) -> None:
        """The rows of unit numbers of all separable terms, and who stands where: nothing of that changes.

        ``_lines`` of each term are numbers into ``_rows``, ``_rest`` is the product of its other sizes. A term without
        lines (None) is counted by itself.
        """
        self._rows: list[Tensor] = []
        self._lines: list[list[int] | None] = []
        self._rest: list[int] = []
        self._term_of_row: list[int] = []
        whole = []
        for number, term in enumerate(self._terms):
            if term.lines is None:
                self._lines.append(None)
                self._rest.append(1)
                whole.append(torch.cat([layer.flatten() for layer in term.layers]))
                continue
            whole.append(torch.zeros(0, dtype=torch.long, device="cpu"))
            dims = {dim for dim, _ in term.lines}
            self._lines.append(list(range(len(self._rows), len(self._rows) + len(term.lines))))
            self._rest.append(math.prod(size for dim, size in enumerate(term.shape) if dim not in dims))
            self._rows += [line for _, line in term.lines]
            self._term_of_row += [number] * len(term.lines)
        self._rows_of_unit = incidence(self._rows, self._units)
        self._whole_terms_of_unit = incidence(whole, self._units)

    def _recount(self) -> None:
        self._sizes = [int(self._kept[row].sum()) for row in self._rows]
        self._counts = [term.count(self._kept) for term in self._terms]

    @property
    def kept(self) -> Tensor:
        """Which units are left [units + 1], with a last entry True; not to be written to."""
        return self._kept

    def copy(self) -> Ledger:
        """A ledger in the same state that goes its own way."""
        other = copy.copy(self)
        other._kept, other._sizes, other._counts = self._kept.clone(), list(self._sizes), list(self._counts)
        other._saved = {}
        return other

    def costs(self) -> dict[str, float]:
        """What is left of each cost: whole numbers but for ``extra`` ones."""
        return self._total(self._counts)

    def shares(self) -> dict[str, float]:
        """What is left of each cost as a share of the whole network; 1 where that costs nothing."""
        return self._share(self.costs())

    def _total(self, counts: Sequence[int]) -> dict[str, float]:
        totals: dict[str, float] = {}
        for name, weights in self._weights.items():
            if name in self._constants:
                parts = [weight * counts[place] for place, weight in weights.items()]
                totals[name] = math.fsum([*parts, self._constants[name]])
            else:
                totals[name] = sum([counts[place] for place in weights])
        return totals

    def _share(self, costs: Mapping[str, float]) -> dict[str, float]:
        return {name: cost / self._whole[name] if self._whole[name] else 1.0 for name, cost in costs.items()}

    def shares_without(self, units: Iterable[int]) -> dict[str, float]:
        """What :meth:`shares` would be if these units went too. Changes nothing."""
        gone = self._still_there(units)
        counts = list(self._counts)
        for place, count in self._recounted(gone)[1].items():
            counts[place] = count
        return self._share(self._total(counts))

    def remove(self, units: Iterable[int]) -> None:
        """Take units away; those that are gone already change nothing."""
        gone = self._still_there(units)
        sizes, counts = self._recounted(gone)
        for row, size in sizes.items():
            self._sizes[row] = size
        for place, count in counts.items():
            self._counts[place] = count
        if gone:
            self._kept[torch.tensor(gone, device="cpu")] = False
        for savings in self._saved.values():
            savings.stale.update(counts)

    def _still_there(self, units: Iterable[int]) -> list[int]:
        there = dict.fromkeys(int(unit) for unit in units)
        for unit in there:
            if not 0 <= unit < self._units:
                raise ValueError(f"no unit {unit}; units are 0 to {self._units - 1}")
        return [unit for unit in there if bool(self._kept[unit])]

    def _recounted(self, gone: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        """New sizes of the rows and new counts of the terms that these units touch."""
        sizes: dict[int, int] = {}
        touched: dict[int, None] = {}
        for unit in gone:
            for row, own in self._rows_of_unit[unit]:
                sizes[row] = sizes.get(row, self._sizes[row]) - own
                touched[self._term_of_row[row]] = None
            touched.update((place, None) for place, _ in self._whole_terms_of_unit[unit])
        counts: dict[int, int] = {}
        kept = None
        for place in touched:
            rows = self._lines[place]
            if rows is not None:
                counts[place] = self._rest[place] * math.prod([sizes.get(row, self._sizes[row]) for row in rows])
                continue
            if kept is None:
                kept = self._kept.clone()
                kept[torch.tensor(gone, device="cpu")] = False
            counts[place] = self._terms[place].count(kept)
        return sizes, counts

    def savings(self, kind: str) -> Tensor:
        """What each kept unit alone would save of a cost, float64 [units]; 0 for those that are gone."""
        if kind not in self._weights:
            raise ValueError(f"no cost named {kind!r}; costs are {', '.join(self._weights)}")
        if kind not in self._saved:
            self._saved[kind] = _Savings(self._terms, self._weights[kind], self._units)
        return self._saved[kind].of(self._kept)


class _Savings:
    """What units save of one cost, term by term; only ``stale`` terms are computed again."""

    def __init__(self, terms: Sequence[Term], weights: Mapping[int, float], units: int) -> None:
        self._terms, self._weights, self._units = terms, weights, units
        self.stale = set(weights)
        self._slices: dict[int, slice] = {}
        members, end = [torch.zeros(0, dtype=torch.long, device="cpu")], 0
        for place in weights:
            for_term = [layer.flatten() for layer in terms[place].layers]
            found = torch.cat(for_term).unique() if for_term else members[0]
            members.append(found[found != STAYS])
            self._slices[place] = slice(end, end + members[-1].numel())
            end += members[-1].numel()
        self._members = torch.cat(members)
        self._values = torch.zeros(end, dtype=torch.float64, device="cpu")

    def of(self, kept: Tensor) -> Tensor:
        for place in self.stale & set(self._weights):
            where = self._slices[place]
            saved = self._terms[place].savings(kept)[self._members[where]]
            self._values[where] = saved.double() * self._weights[place]
        self.stale.clear()
        return torch.bincount(self._members, weights=self._values, minlength=self._units)
