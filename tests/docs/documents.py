"""Pages as programs: the blocks of a page in their order, run in one folder with one set of names."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ifso.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
SHELL = ("", "bash", "sh")
PLACEHOLDERS = re.compile(r"…|\[|\b(MODEL|DATA|RUN|STUDY|DIR|FILE|NAME|PATH)\b")
OTHERS = ("pip", "pytest")
"""Programs whose lines are left to continuous integration."""

RUN_ELSEWHERE = ("demo",)
"""By TestDemo in tests/test_cli.py: it trains, prunes and fine-tunes six networks."""

_FENCE = re.compile(r"^ *```(\w*)")
_NOTE = re.compile(r"<!-- (not run|needs): (.+?) -->")
_FILE = re.compile(r"# (\w+\.py)$")


@dataclass(frozen=True)
class Block:
    """What stands between two fences. ``not_run`` is the reason given above it, ``needs`` the modules it imports."""

    page: Path
    line: int
    language: str
    code: str
    not_run: str = ""
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All blocks of a page."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    start = None
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence and start is None:
            start, language = number, fence[1]
        elif fence and start is not None:
            note = _NOTE.search(next((text for text in reversed(lines[:start]) if text), ""))
            kind, text = note.groups() if note else ("", "")
            needs = tuple(text.split(", ")) if kind == "needs" else ()
            code = "\n".join(lines[start + 1 : number])
            found.append(Block(page, start + 1, language, code, text if kind == "not run" else "", needs))
            start = None
    assert start is None, f"{page}: the last block does not end"
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """The lines of a block that a shell would run, cut into words; comments are left out."""
    if block.language not in SHELL:
        return
    for line in block.code.replace("\\\n", " ").splitlines():
        for part in line.split("&&"):
            with contextlib.suppress(ValueError):
                words = shlex.split(part, comments=True)
                if words:
                    yield words


def arguments(words: list[str]) -> list[str] | None:
    """What the ``ifso`` in a command line is told; None if it is another program."""
    if words[0] == "ifso":
        return words[1:]
    if words[0] == "torchrun" and "ifso.cli" in words:
        return words[words.index("ifso.cli") + 1 :]
    return None


def is_synopsis(words: list[str]) -> bool:
    """Does it show how a command is called, with names in place of values?"""
    return any(PLACEHOLDERS.search(word) for word in words)


def run_page(page: Path, extra: dict[str, list[str]], python: bool = True) -> int:
    """Run a page in the current folder and count its commands and blocks of Python.

    ``extra`` has more arguments for some commands. A block of Python that begins with ``# some_file.py`` is written to
    that file as well.
    """
    names: dict[str, Any] = {}
    count = 0
    for block in blocks(page):
        if block.not_run or not _available(block):
            continue
        if block.language == "python" and python:
            _run_python(block, names)
            count += 1
        told = list(commands(block))
        if not any(map(is_synopsis, told)):
            count += sum(_run_command(block, words, extra) for words in told)
    return count


def _available(block: Block) -> bool:
    for name in block.needs:
        try:
            importlib.import_module(name)
        except ImportError:
            return False
    return True


def _run_python(block: Block, names: dict[str, Any]) -> None:
    file = _FILE.match(block.code.splitlines()[0])
    if file:
        Path(file[1]).write_text(block.code + "\n")
    code = "\n" * block.line + block.code
    exec(compile(code, str(block.page), "exec"), names)


def _run_command(block: Block, words: list[str], extra: dict[str, list[str]]) -> bool:
    told = arguments(words)
    if told is None:
        assert words[0] in OTHERS, f"{block}: nothing here can run {words[0]!r}"
        return False
    if told[0] in RUN_ELSEWHERE:
        return False
    assert words[0] == "ifso", f"{block}: {words[0]} is marked “not run”, with the reason"
    status = main([*told, *extra.get(told[0], [])])
    if status:
        pytest.fail(f"{block}: {shlex.join(words)} ended with status {status}")
    return True
