"""What every use pays for: the modules that are imported, and how few of them. No wall time is asserted here."""

import argparse
import subprocess
import sys

from ifso.cli.main import _parser

HEAVY = {"torch", "numpy", "rich", "safetensors", "timm", "torchvision", "matplotlib", "onnx", "tensorboard", "asyncio"}
MOST = 60
"""Modules that ``import ifso`` may add to those of a bare Python; it adds 27."""


def modules_after(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules, sep='\\n')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines())


def test_importing_adds_few_modules_and_none_that_is_heavy():
    ours = modules_after("import ifso; dir(ifso)") - modules_after("")
    assert "ifso.errors" in ours
    assert len(ours) <= MOST
    assert not ours & HEAVY
    assert {name for name in ours if name.startswith("ifso.")} == {"ifso.errors", "ifso._version"}


def test_no_help_imports_anything_heavy():
    """All in one process: what one of them imports stays there to be seen."""
    commands = list(every_command(_parser()))
    assert {("prune",), ("repro",), ("bench", "choose")} < set(commands)
    code = (
        "import contextlib, io\n"
        "from ifso.cli.main import main\n"
        f"for words in {[['--version'], *([*words, '--help'] for words in commands)]}:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as text: main(words)\n"
        "    assert text.getvalue(), words"
    )
    found = modules_after(code)
    assert {"ifso.cli.bench", "ifso.criteria.registry"} < found
    assert not found & HEAVY


def every_command(parser, words=()):
    """The words of every command and of the commands below it, beginning with none."""
    if "--help" in parser._option_string_actions:
        yield words
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from every_command(below, (*words, name))
