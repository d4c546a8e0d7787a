"""A project in which a network of a user's own was pruned; every test has a copy of it, and is in its folder."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from ifso.cli.main import main

for folder in ("faults", "pruning"):
    sys.path.append(str(Path(__file__).parent.parent / folder))

TINY = Path(__file__).parent.parent / "faults" / "tiny.py"
QUICK = shlex.split("--macs 0.7 --criterion magnitude --schedule one-shot --recalibrate 0")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``net.py`` and a finished run in ``run``."""
    project = tmp_path_factory.mktemp("project")
    shutil.copy(TINY, project / "net.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        task = shlex.split("--model net.py:network --data net.py:data")
        assert main(["prune", *task, *QUICK, "--out", "run"]) == 0
    return project


@pytest.fixture
def project(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = Path(shutil.copytree(made, tmp_path / "project", symlinks=True))
    monkeypatch.chdir(copy)
    yield copy
    for name in [name for name in sys.modules if name.startswith("_ifso_user_")]:
        del sys.modules[name]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]):
    """Runs a command that must end with a status and one line, which is returned."""

    def run(*command: object, status: int = 2) -> str:
        capfd.readouterr()
        found = main([os.fspath(part) if isinstance(part, Path) else str(part) for part in command])
        lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("·")]
        assert (found, len(lines)) == (status, 1), lines
        assert "Traceback" not in lines[0]
        return lines[0]

    return run
