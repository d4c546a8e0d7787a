"""The page: one file that opens from a disk, asks nobody for anything, and shows one run or several."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ifso._version import __version__
from ifso.common.files import write_text
from ifso.errors import RunError
from ifso.report import chart_data, results, sections
from ifso.report.sections import LINKS, Comparison
from ifso.runs.reading import RunRecord, read_run
from ifso.runs.values import percent

NAME = "report.html"
SUFFIXES = (".html", ".htm")
SCRIPTS = ("kit.js", "columns.js", "layers.js", "detail.js", "lines.js", "quality.js", "files.js", "page.js")


def write_report(runs: Sequence[Path], out: Path | None = None, finetuned: Path | None = None) -> Path:
    """Write the page about these run folders, and return where it is.

    ``out`` is the file; without it that of one run is ``report.html`` in its folder, that of several in the folder
    they all lie in. ``finetuned`` is where the fine-tuned network of the one run is, if that is said.
    """
    if finetuned is not None and len(runs) > 1:
        raise RunError("--finetuned says where the fine-tuned network of one run is; give one RUN")
    records = [read_run(Path(folder), finetuned) for folder in runs]
    path = out or default_path(
        [_home(Path(folder), record.folder) for folder, record in zip(runs, records, strict=True)]
    )
    if path.suffix.lower() not in SUFFIXES:
        raise RunError(f"{path}: the report is a page; give a name that ends in .html")
    page = render(records)
    try:
        write_text(path, page)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}; give another --out") from error
    return path


def _home(given: Path, run: Path) -> Path:
    """The run that a page is about, if it is the folder that was given or the one above; no other that a file names."""
    return run if run.resolve() in (given.resolve(), given.resolve().parent) else given


def default_path(folders: Sequence[Path]) -> Path:
    """Where the page goes if nobody says so."""
    if len(folders) == 1:
        return folders[0] / NAME
    parents = {folder.resolve().parent for folder in folders}
    if len(parents) > 1:
        raise RunError("the runs lie in different folders; say with --out where the report goes")
    return folders[0].parent / NAME


def render(runs: Sequence[RunRecord]) -> str:
    """The HTML document."""
    templates, names = _templates(), names_of(runs)
    draw = vars(templates.get_template("sections.html").module)
    articles = [{kind: body for kind in LINKS if (body := draw[kind](run)).strip()} for run in runs]
    together = Comparison(runs, names) if len(runs) > 1 else None
    script = "\n".join(["'use strict';(()=>{", *map(_asset, SCRIPTS), "})();"])
    fair = together if together and together.is_fair else None
    return templates.get_template("page.html").render(
        title=f"{len(runs)} pruning runs compared" if together else f"{runs[0].model} pruned",
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=_asset("style.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        names=names,
        links={kind: words for kind, words in LINKS.items() if any(kind in article for article in articles)},
        articles=articles,
        together=together,
        data={
            "runs": [chart_data.chart_data(run, name) for run, name in zip(runs, names, strict=True)],
            "groups": [[name, list(fair.groups[name].items()), *more] for name, _, *more in fair.means] if fair else [],
        },
    )


def _templates() -> Environment:
    """Templates in which every text is escaped; a name that is not given is an error."""
    found = Environment(
        loader=PackageLoader("ifso.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    found.globals.update(sections=sections, results=results, chart_data=chart_data)
    found.filters.update(percent=percent, written=written, cells=astuple, capital=results.capital)
    return found


def written(value: object, kind: str) -> str:
    r"""A cell of a table: a ``count``, a ``share``, a ``number`` or a ``text``.

    >>> written(1234, "count"), written(0.5, "share"), written(0.123456, "number"), written(None, "count")
    ('1,234', '50.0\xa0%', '0.1235', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, (int, float)):
        forms = {"count": "{:,.0f}" if isinstance(value, float) else "{:,}", "number": "{:.4g}"}
        return percent(value) if kind == "share" else forms.get(kind, "{}").format(value)
    return str(value)


def _asset(name: str) -> str:
    return files("ifso.report").joinpath("assets", name).read_text(encoding="utf-8")


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run: its folder, with as many folders above it as it takes to tell them apart."""
    paths = [run.folder.resolve() for run in runs]
    for depth in (1, 2, 3):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {path.name}" for number, path in enumerate(paths, 1)]
