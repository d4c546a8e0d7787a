"""Commands in the documentation: those of the README are run, all others are read by the parser."""

import argparse
import ast
import re
import shlex

import numpy as np
import pytest
import torch
from documents import DOCS, PAGES, ROOT, arguments, blocks, commands, is_synopsis, run_page
from safetensors.torch import save_file

import ifso
from ifso.cli.main import _parser

INLINE = re.compile(r"`(ifso [a-z][^`\n]*|torchrun [^`\n]*)`")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
QUICKLY = {
    "prune": shlex.split("--schedule one-shot --accumulate 1 --batches-per-score 1 --batch 8 --recalibrate 1"),
    "finetune": shlex.split("--epochs 1 --batch 16"),
    "eval": shlex.split("--repeats 2 --latency-batch 1 --train-batch 8"),
}
SIZES = {"train": 32, "test": 16}
"""Images of the stand-in for CIFAR-10."""


def of_blocks(page):
    """Where a command of a block stands, and what ``ifso`` is told by it."""
    return [(f"{block}: {' '.join(words)}", words) for block in blocks(page) for words in commands(block)]


def of_text(page):
    """The same of commands within the text, which may be cut short."""
    return [(f"{page.name}: {match[1]}", match[1].split()) for match in INLINE.finditer(page.read_text())]


def told(found):
    return [(place, arguments(words)) for place, words in found if arguments(words)]


WRITTEN = [item for page in PAGES for item in of_blocks(page)]
WHOLE = told(item for item in WRITTEN if not is_synopsis(item[1]))
SYNOPSES = told([item for item in WRITTEN if is_synopsis(item[1])] + [item for page in PAGES for item in of_text(page)])


def parser_of(*names):
    """The parser of a command, or of a command of a command."""
    parser = _parser()
    for name in names:
        (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = action.choices[name if name in action.choices else "run"]  # ifso repro table2: ifso repro run table2
    return parser


def takes_commands(parser):
    """``ifso bench`` does."""
    return any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)


def test_there_are_commands_to_look_at():
    assert len(WHOLE) > 40
    assert len(SYNOPSES) > 12


@pytest.mark.parametrize(("place", "argv"), WHOLE, ids=[place for place, _ in WHOLE])
def test_a_command_is_understood(place, argv, capsys):
    try:
        _parser().parse_args(argv)
    except SystemExit:
        pytest.fail(f"{place}\n{capsys.readouterr().err}")


@pytest.mark.parametrize(("place", "argv"), SYNOPSES, ids=[place for place, _ in SYNOPSES])
def test_options_that_are_named_exist(place, argv):
    parser = parser_of(argv[0])
    if takes_commands(parser) and len(argv) > 1:
        parser = parser_of(*argv[:2])
    known = {option for action in parser._actions for option in action.option_strings}
    assert [option for option in OPTION.findall(" ".join(argv)) if option not in known] == []


def test_the_commands_of_the_readme_run(tmp_path, monkeypatch, capsys):
    """With generated images for CIFAR-10 and random weights, and shorter than a user would want."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    arrays = {f"x_{part}": random.integers(0, 256, (count, 32, 32, 3), np.uint8) for part, count in SIZES.items()}
    np.savez("cifar10.npz", **arrays, **{f"y_{part}": np.arange(count) % 10 for part, count in SIZES.items()})
    torch.manual_seed(0)
    save_file(ifso.create_model("ifso:resnet32").state_dict(), "resnet32.safetensors")
    assert run_page(ROOT / "README.md", QUICKLY, python=False) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_that_is_not_run_is_python_all_the_same(page):
    for block in blocks(page):
        if block.language == "python" and ">>>" not in block.code:
            ast.parse(block.code)


def test_what_is_not_run_says_why():
    """In quickstart and guides every block of Python and every command is run, unless a comment gives the reason."""
    reasons = [block.not_run for page in (DOCS / "guides").glob("*.md") for block in blocks(page) if block.not_run]
    assert len(reasons) < 10
    assert all(len(reason.split()) > 3 for reason in reasons)
    assert not any(block.not_run for block in blocks(DOCS / "quickstart.md"))
