"""What can be typed after ``ifso``, and the statuses that come back. The prose of the help may change."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden_runs import MODEL, command
from golden_store import check_json
from internals import parser

REPEATABLE = (argparse._AppendAction, argparse._AppendConstAction, argparse._ExtendAction)
ERROR = re.compile(r"ifso: error: .+\n")
NET = """
import ifso
def other(): return ifso.create_model("ifso:resnet8-digits", num_classes=3)
"""
TASK = f"--model {MODEL} --data digits"
STATUSES = {
    "--version": 0,
    "--help": 0,
    "": 2,
    "nonsense": 2,
    "prune": 2,
    f"prune {TASK} --macs 0.5": 2,
    f"prune {TASK} --out run": 2,
    f"prune {TASK} --macs 1.5 --out run": 2,
    f"prune {TASK} --macs half --out run": 2,
    f"prune {TASK} --macs 0.5 --criterion nobody --out run": 2,
    f"prune {TASK} --macs 0.5 --criterion-option nothing=1 --out run": 2,
    f"prune {TASK} --macs 0.5 --preset nobody --out run": 2,
    f"prune {TASK} --macs 0.5 --schedule never --out run": 2,
    f"prune {TASK} --macs 0.5 --normalize nobody --out run": 2,
    f"prune {TASK} --macs 0.5 --seed -1 --out run": 2,
    f"prune {TASK} --macs 0.5 --device nowhere --out run": 2,
    f"prune {TASK} --macs 0.5 --weights missing.safetensors --out run": 2,
    f"prune {TASK} --macs 0.0001 --min-units 8 --out run": 3,
    f"prune --model {MODEL} --data nothing --macs 0.5 --out run": 2,
    "prune --model ifso:nobody --data digits --macs 0.5 --out run": 2,
    "prune --model net.py:other --data digits --macs 0.5 --out run": 2,
    "prune --resume --out run": 2,
    "train": 2,
    f"train {TASK} --recipe nobody --out run": 2,
    f"train {TASK} --epochs 0 --out run": 2,
    "train --resume --out run": 2,
    "finetune": 2,
    "finetune run": 2,
    "eval": 2,
    "eval run": 2,
    "eval run --split other": 2,
    "report": 2,
    "report run": 2,
    "export": 2,
    "export run --to onnx": 2,
    "inspect": 2,
    "inspect ifso:nobody": 2,
    "inspect net.py:nobody": 2,
    "bench": 2,
    "bench nothing": 2,
    "bench score --methods nobody": 2,
    "bench zoo --device cuda": 2,
    "bench train --help": 2,
    "repro": 2,
    "repro nothing": 2,
    "repro --markdown tables.md": 2,
    "repro table2 --seeds 0": 2,
    "repro --list": 0,
}
"""Arguments and the status they end with."""


def commands(of: argparse.ArgumentParser, name: str = "ifso") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A parser and all those of its subcommands."""
    yield name, of
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from commands(inner, f"{name} {word}")


def described(action: argparse.Action) -> dict[str, Any]:
    """What decides how an argument is written and what stands for it where it is not."""
    found: dict[str, Any] = {
        "values": "one" if action.nargs is None else action.nargs,
        "default": plain(action.default),
    }
    if action.choices is not None:
        found["choices"] = list(action.choices)
    if action.required:
        found["required"] = True
    if isinstance(action, REPEATABLE):
        found["repeatable"] = True
    return found


def plain(value: Any) -> Any:
    """A default as JSON has it."""
    if isinstance(value, (tuple, list)):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def test_options_of_all_commands():
    found = {
        name: {
            ", ".join(action.option_strings) or str(action.metavar or action.dest): described(action)
            for action in each._actions
        }
        for name, each in commands(parser())
    }
    check_json("options", found)


@pytest.mark.parametrize("name", [name for name, each in commands(parser()) if "--help" in each._option_string_actions])
def test_help_names_every_option_and_ends_well(name):
    done = command(*name.split()[1:], "--help")
    each = dict(commands(parser()))[name]
    assert (done.status, done.err) == (0, "")
    shown = [action for action in each._actions if action.help != argparse.SUPPRESS]
    assert all(option in done.out for action in shown for option in action.option_strings)


def test_version():
    assert command("--version").out == "ifso 0.1.0\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder but for a network."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


@pytest.mark.parametrize("line", STATUSES)
def test_status(line, here):
    done = command(*line.split())
    assert done.status == STATUSES[line], done.err
    if done.status:
        assert done.out == ""
        usage = done.err.startswith("usage: ifso")
        assert usage or ERROR.fullmatch(done.err.splitlines(keepends=True)[-1]), done.err
        assert "Traceback" not in done.err
        assert sorted(path.name for path in here.iterdir()) in (["net.py"], ["__pycache__", "net.py"])
