"""SIGTERM stops every command in one line, with the status of a process that it stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from ifso.cli.main import COMMANDS, main

WORK = {
    "demo": "ifso.cli.demo.demonstrate",
    "inspect ifso:resnet20": "ifso.models.registry.network_for",
    "train --model ifso:resnet20 --data digits": "ifso.data.open_data",
    "prune --model ifso:resnet20 --data digits --macs 0.5": "ifso.data.open_data",
    "finetune RUN": "ifso.runs.open.open_run",
    "eval --model ifso:resnet20 --data digits": "ifso.data.open_data",
    "report RUN": "ifso.report.write_report",
    "export RUN --to torch": "ifso.cli.export._export",
    "bench trace": "ifso.cli.bench.measure_apart",
    "repro figure1": "ifso_repro.figure1.study.figure1",
    "repro recipe --smoke": "ifso_repro.recipe_search.choose",
    "repro table2 --smoke": "ifso_repro.runner.Runner",
    "repro table2 --table": "ifso_repro.commands.read",
    "repro figure5 --draw": "ifso_repro.drawing.draw_figure",
}
"""A command, and something that it calls."""
WRITING = ("demo", "train", "prune", "repro")
"""Commands with a folder to work in."""


def test_no_command_is_forgotten():
    modules = {command.__name__.rpartition(".")[2] for command in COMMANDS}
    assert {words.split()[0] for words in WORK} == modules - {"evaluate"} | {"eval", "repro"}


@pytest.fixture
def heard() -> Iterator[None]:
    """SIGTERM does what it does at a terminal."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    found = signal.signal(signal.SIGTERM, before)
    assert found is signal.SIG_DFL


def terminated(*_: object, **__: object) -> None:
    """As ``kill`` does; a second signal must not get in the way of the first."""
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "it would end the tests"
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("words", WORK)
def test_every_command_ends_in_one_line(words, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(WORK[words], terminated)
    out = ["--out", str(tmp_path / "out")] if words.split()[0] in WRITING else []
    assert main([*words.replace("RUN", str(tmp_path)).split(), *out]) == 143
    last = capsys.readouterr().err.splitlines()[-1]
    kept = f"; what is done is kept in {tmp_path / 'out'}: the same command goes on"
    assert last == f"ifso: terminated{kept if words == 'repro table2 --smoke' else ''}"
