"""Wheel and sdist: built twice they are the same bytes, and they hold what is meant and nothing else."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import ifso

ROOT = Path(__file__).parents[2]
EPOCH = 1_700_000_000
WHEEL = re.compile(
    r"ifso(?:_repro)?/[\w/]+\.py|ifso_repro/toml/[\w-]+\.toml|ifso/(?:py\.typed|report/assets/[\w-]+\.(?:js|css)|report/templates/[\w-]+\.html"
    r"|data/digits\.npz|data/LICENSE-digits\.txt)"
    r"|ifso-[\w.]+\.dist-info/(?:METADATA|WHEEL|RECORD|entry_points\.txt|licenses/LICENSE)"
)
SDIST_TOP = {
    "src", "tests", "examples", "requirements", "docs", "repro", "benchmarks", "mkdocs.yml", "README.md",
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore",
}  # fmt: skip


DECOYS = ("scratch/src/ifso/py.typed", "scratch/LICENSE", "elsewhere/tests/test_it.py", "runs/README.md", "weights.pth")
"""What may lie about in a checkout and belongs into neither."""


def checkout(folder):
    """A copy of this checkout with decoys in it: nobody changes it between two builds."""
    for name in SDIST_TOP - {"PKG-INFO"}:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
        else:
            shutil.copy(ROOT / name, folder / name)
    for name in DECOYS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def build(source, folder):
    """Wheel and sdist, by hatchling itself in a process of its own: nothing is fetched."""
    code = (
        "import sys\n"
        "from hatchling.builders.sdist import SdistBuilder\n"
        "from hatchling.builders.wheel import WheelBuilder\n"
        "for builder in (WheelBuilder, SdistBuilder):\n"
        "    list(builder(sys.argv[1]).build(directory=sys.argv[2], versions=['standard']))\n"
    )
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)}
    subprocess.run([sys.executable, "-c", code, source, folder], env=environment, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    pytest.importorskip("hatchling", reason='it is not installed; pip install "ifso[test]"')
    return build(source, tmp_path_factory.mktemp("dist"))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_built_again_they_are_the_same_bytes(source, built, tmp_path):
    assert [sha256(path) for path in build(source, tmp_path)] == [sha256(path) for path in built]
    with tarfile.open(built[1]) as archive:
        assert {entry.mtime for entry in archive} == {EPOCH}
    with zipfile.ZipFile(built[0]) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {time.gmtime(EPOCH)[:6]}


def test_the_wheel_holds_the_package_and_nothing_else(source, built):
    names = names_in(built[0])
    assert [name for name in names if not WHEEL.fullmatch(name)] == []
    files = {str(path.relative_to(source / "src")) for path in (source / "src").rglob("*") if path.is_file()}
    recipes = {f"ifso_repro/toml/{path.name}" for path in (source / "repro").glob("*.toml")}
    assert {name for name in names if ".dist-info/" not in name} == files | recipes
    assert {"ifso/py.typed", "ifso/report/templates/page.html", "ifso/data/digits.npz"} <= files


def test_the_metadata_says_what_the_package_is(built):
    with zipfile.ZipFile(built[0]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        told = Parser().parsestr(archive.read(name).decode())
    assert (told["Name"], told["Version"], told["License-Expression"]) == ("ifso", ifso.__version__, "MIT")
    core = [line for line in told.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(re.match(r"[\w-]+", line)[0] for line in core) == ["jinja2", "numpy", "rich", "safetensors", "torch"]


def test_the_sdist_holds_what_is_meant(source, built):
    with tarfile.open(built[1]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {name.partition("/")[0] for name in names} == SDIST_TOP
    assert [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".pth"))] == []
    here = {str(path.relative_to(source)) for path in (source / "tests").rglob("*.py")}
    assert here <= set(names)


def test_the_wheel_runs_from_where_it_is(built):
    code = "import ifso, ifso.cli.main as cli; print(ifso.__file__); cli.main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(built[0])!r}); {code}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"{built[0]}/ifso/__init__.py", f"ifso {ifso.__version__}"], done.stderr


@pytest.mark.slow
def test_the_tests_of_the_sdist_can_be_collected(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "tests",
    ]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert int(re.search(r"(\d+) tests collected", done.stdout)[1]) > 1000


@pytest.mark.slow
def test_the_sdist_installs_into_a_fresh_environment(built, tmp_path):
    """Built by the backend that is installed here; dependencies are left out, so that nothing is fetched."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--target", tmp_path / "site", built[1]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import ifso; print(ifso.__file__)"
    told = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == str(tmp_path / "site" / "ifso" / "__init__.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [("twine", "check", "--strict"), ("check-wheel-contents",)], ids=lambda words: words[0]
)
def test_checkers_of_others_are_content(built, program):
    found = shutil.which(program[0], path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f'{program[0]} is not installed; pip install "ifso[release]"')
    paths = built if program[0] == "twine" else built[:1]
    done = subprocess.run([found, *program[1:], *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
