"""The page: one file that opens from a disk, asks nobody for anything, and shows one run or several."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from string import Template

from ifso.common.files import write_text
from ifso.errors import RunError
from ifso.report.charted import course, scores, structure, tuning, when
from ifso.report.comparison import comparison
from ifso.report.content import content, names_of
from ifso.report.evidence import frozen, setup, trust
from ifso.report.headline import headline
from ifso.report.markup import Markup, element, embedded, joined
from ifso.runs.reading import read_run
from ifso.runs.record import RunRecord

NAME = "report.html"
SUFFIXES = (".html", ".htm")
SCRIPTS = ("kit.js", "columns.js", "layers.js", "detail.js", "lines.js", "worth.js", "page.js")
SECTIONS: dict[str, tuple[str, Callable[[RunRecord, int], Markup]]] = {
    "headline": ("Summary", headline),
    "structure": ("Structure", structure),
    "scores": ("Scores", scores),
    "when": ("When", when),
    "course": ("Course", course),
    "tuning": ("Fine-tuning", tuning),
    "frozen": ("Frozen", frozen),
    "trust": ("Checks", trust),
    "setup": ("Setup", setup),
}
"""The kinds of sections about a run, in order: the words of the link to it, and what makes it."""

ACCURACY_AFTER = 5
"""After so many of them comes accuracy against MACs, if the page is about a single run."""


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page about these run folders, and say where.

    ``out`` is the file; without it that of one run is ``report.html`` in its folder, that of several in the folder
    they all lie in.
    """
    records = [read_run(Path(folder)) for folder in runs]
    place = out or default_place(
        [_home(Path(folder), record.folder) for folder, record in zip(runs, records, strict=True)]
    )
    if place.suffix.lower() not in SUFFIXES:
        raise RunError(f"{place}: the report is a page; give a name that ends in .html")
    page = render(records)
    try:
        write_text(place, page)
    except OSError as error:
        raise RunError(f"{place} cannot be written: {error.strerror or error}; give another --out") from error
    return place


def _home(given: Path, run: Path) -> Path:
    """The run that a page is about, if it is the folder that was given or the one above; no other that a file names."""
    return run if run.resolve() in (given.resolve(), given.resolve().parent) else given


def default_place(folders: Sequence[Path]) -> Path:
    """Where the page goes if nobody says so."""
    if len(folders) == 1:
        return folders[0] / NAME
    parents = {folder.resolve().parent for folder in folders}
    if len(parents) > 1:
        raise RunError("the runs lie in different folders; say with --out where the report goes")
    return folders[0].parent / NAME


def render(runs: Sequence[RunRecord]) -> str:
    """The HTML document."""
    from ifso._version import __version__

    names = names_of(runs)
    title = f"{runs[0].model} pruned" if len(runs) == 1 else f"{len(runs)} pruning runs compared"
    together = comparison(runs, names)
    if len(runs) == 1:
        body = _article(runs[0], 0, together)
    else:
        body = joined((together, *(_article(run, number) for number, run in enumerate(runs))))
    script = "\n".join(["'use strict';(()=>{", *map(_asset, SCRIPTS), "})();"])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = embedded({"runs": [content(run, name) for run, name in zip(runs, names, strict=True)]})
    return Template(_asset("page.html")).substitute(
        title=joined((title,)),
        version=joined((__version__,)),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=_asset("style.css"),
        digest=digest,
        chooser=_chooser(names),
        links=_links(len(runs) > 1),
        body=body,
        data=data,
        script=script,
    )


def _article(run: RunRecord, number: int, *between: Markup) -> Markup:
    """Everything about one run."""
    sections = [make(run, number) for _, make in SECTIONS.values()]
    sections[ACCURACY_AFTER:ACCURACY_AFTER] = between
    return element("article", *sections, id=f"run-{number}", class_="run", data_run=number)


def _asset(name: str) -> str:
    return files("ifso.report").joinpath("assets", name).read_text(encoding="utf-8")


def _chooser(names: Sequence[str]) -> Markup:
    if len(names) == 1:
        return Markup("")
    choices = (element("option", name, value=number) for number, name in enumerate(names))
    return element("label", "Run ", element("select", *choices, id="chooser"), class_="chooser")


def _links(several: bool) -> Markup:
    together = element("a", "Comparison" if several else "Accuracy", href="#comparison")
    links = [element("a", words, href=f"#{kind}-0", data_link=kind) for kind, (words, _) in SECTIONS.items()]
    links.insert(0 if several else ACCURACY_AFTER, together)
    return joined(links)
