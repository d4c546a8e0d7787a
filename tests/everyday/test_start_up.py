"""What every use pays for: the modules that are imported, and how few of them. No wall time is asserted here."""

import subprocess
import sys

HEAVY = {"torch", "numpy", "rich", "safetensors", "timm", "torchvision", "matplotlib", "onnx", "tensorboard", "asyncio"}
COMMANDS = ("--help", "--version", "finetune --help", "eval --help", "export --help", "report --help", "repro --help",
            "train --help", "inspect --help", "bench everyday --help")  # fmt: skip
"""Not ``prune --help``, which reads the names of criteria from their registry."""
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
    assert {name for name in ours if name.startswith("ifso.")} == {"ifso.errors"}


def test_no_help_imports_anything_heavy():
    """All in one process: what one of them imports stays there to be seen."""
    code = (
        "import contextlib, io\n"
        "from ifso.cli.main import main\n"
        f"for words in {[words.split() for words in COMMANDS]}:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as text: main(words)\n"
        "    assert text.getvalue(), words"
    )
    found = modules_after(code)
    assert "ifso.cli.bench_everyday" in found
    assert not found & HEAVY
