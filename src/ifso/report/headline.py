"""The first section: what came out, in a sentence and five cards, and what a reader must know before trusting it."""

from __future__ import annotations

from collections.abc import Iterator

from ifso.pruning.result import LABELS
from ifso.report.commands import resume_command
from ifso.report.facts import Fact, facts, worth
from ifso.report.markup import Markup, element, joined
from ifso.report.parts import said, section, status
from ifso.runs.record import RunRecord
from ifso.runs.values import percent


def headline(run: RunRecord, number: int) -> Markup:
    """The section."""
    budget = ", ".join(f"{percent(share, 0)} of its {LABELS.get(kind, kind)}" for kind, share in run.targets.items())
    about = (run.criterion if run.config else "", run.data, f"asked to keep {budget}" if budget else "", status(run))
    cards = element("div", *map(_card, facts(run)), class_="cards")
    line = said(" · ".join(word for word in about if word))
    return section("headline", number, run.model, line, *_banners(run), _lead(run), cards)


def _lead(run: RunRecord) -> Markup | None:
    """The result in a sentence."""
    kept = [f"{percent(run.shares[kind])} of the {LABELS[kind]}" for kind in ("macs", "params") if kind in run.shares]
    if not kept:
        return None
    found = worth(run)
    before, after = found.by_stage.get("unpruned"), found.last
    words = f"{' and '.join(kept)} {'are' if run.finished else 'are still'} left"
    if before is not None and after is not None:
        stage = "after fine-tuning" if "fine-tuned" in found.by_stage else "before any fine-tuning"
        words += f"; {found.name} went from {found.shown(before)} to {found.shown(after)} {stage}"
    return element("p", f"{words}.", class_="lead")


def _banners(run: RunRecord) -> Iterator[Markup]:
    if not run.config:
        yield _banner("This folder holds a pruned network, but not the run that made it: there is little to show.")
    elif not run.finished:
        left = f", {percent(run.shares['macs'])} of the MACs left" if "macs" in run.shares else ""
        how = resume_command(run) or "ifso.prune(…, resume=…)"
        count = f"{len(run.removals)} removal{'' if len(run.removals) == 1 else 's'} so far{left}"
        yield _banner(f"This run is not finished: {count}. Go on with ", element("code", how), ".")
    if run.resumes:
        yield _banner(f"The pruning was interrupted and went on: {'; '.join(run.resumes)}.")
    if run.tuning is not None and run.tuning.summary is None:
        planned = f" of {run.tuning.planned}" if run.tuning.planned else ""
        yield _banner(f"The fine-tuning is not finished: {len(run.tuning.epochs)}{planned} epochs so far.")
    yield from map(_banner, run.problems)


def _banner(*words: object) -> Markup:
    return element("p", *words, class_="banner", role="note")


def _card(fact: Fact) -> Markup:
    before = element("span", f"{fact.before} → ", class_="before") if fact.before else None
    value = element("p", before, element("strong", fact.after or "—"), class_="value")
    bar = None if fact.share is None else _bar(fact.share, fact.target)
    note = element("p", fact.note, class_="note") if fact.note else None
    return element("div", element("h3", fact.label), value, bar, note, class_="card")


def _bar(share: float, target: float | None) -> Markup:
    """For what is left, with a mark where it should be."""
    whole = element("rect", width=100, height=8, class_="whole")
    left = element("rect", width=f"{min(max(100 * share, 0), 100):.2f}", height=8, class_="left")
    mark, asked = None, ""
    if target is not None:
        place, asked = f"{100 * target:.2f}", f", {percent(target, 0)} asked"
        mark = element("line", x1=place, x2=place, y1=0, y2=8, class_="mark")
    shape = {"viewBox": "0 0 100 8", "preserveAspectRatio": "none"}
    picture = element("svg", whole, left, mark, **shape, class_="bar", aria_hidden="true")
    return joined((picture, element("p", f"{percent(share)} left{asked}", class_="share")))
