"""requirements/test.txt: every package of the test environment with one version and its hashes, as pyproject asks."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINS = ROOT / "requirements" / "test.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINUX = {"python_version": "3.11", "python_full_version": "3.11.9", "sys_platform": "linux", "platform_system": "Linux"}


def pinned(text):
    """{name: version} of a requirements file in which every line names one version with hashes."""
    found = {}
    for entry in re.sub(r"\\\n", " ", text).splitlines():
        words = entry.partition("#")[0].split()
        if words:
            name, _, version = words[0].partition("==")
            assert re.fullmatch(r"[\w.+!-]+", version), f"{entry!r} has no single version"
            hashes = [word for word in words[1:] if re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word)]
            assert hashes, f"{name} has no hash"
            assert hashes == words[1:], f"{name} has more than hashes: {words[1:]}"
            found[canonicalize_name(name.partition("[")[0])] = version
    return found


def asked(extra):
    """Requirements of the core and an extra; extras of ours that it names are opened."""
    wanted = [Requirement(line) for line in PROJECT["dependencies"]]
    queue = [extra]
    while queue:
        for line in PROJECT["optional-dependencies"][queue.pop()]:
            requirement = Requirement(line)
            if requirement.name == PROJECT["name"]:
                queue.extend(requirement.extras)
            else:
                wanted.append(requirement)
    return wanted


@pytest.fixture(scope="module")
def pins():
    return pinned(PINS.read_text())


def test_every_dependency_is_pinned_within_its_range(pins):
    wrong = {
        str(requirement): pins.get(canonicalize_name(requirement.name))
        for requirement in asked("test")
        if (requirement.marker is None or requirement.marker.evaluate(LINUX))
        and not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0"))
    }
    assert wrong == {}


def test_what_installed_packages_need_is_pinned_as_well(pins):
    """A hashed install refuses whatever is not listed: go along the dependencies of what is installed here."""
    from importlib.metadata import PackageNotFoundError, requires, version

    checked, gaps = 0, []
    for name, pin in pins.items():
        try:
            needs = requires(name) or [] if version(name) == pin else []
        except PackageNotFoundError:
            continue
        checked += bool(needs)
        for requirement in map(Requirement, needs):
            applies = requirement.marker is None or requirement.marker.evaluate({**LINUX, "extra": ""})
            have = pins.get(canonicalize_name(requirement.name))
            if applies and (have is None or not requirement.specifier.contains(have, prereleases=True)):
                gaps.append(f"{name} needs {requirement}, pinned is {have}")
    if not checked:
        pytest.skip("no package is installed in the version that requirements/test.txt pins")
    assert gaps == []


def test_the_file_names_no_place_to_load_from():
    text = PINS.read_text()
    assert re.findall(r"^.*(?:://|--(?:extra-)?index-url|--find-links|@ ).*$", text, re.MULTILINE) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rich>=13 --hash=sha256:" + "0" * 64, "no single version"),
        ("rich==13.7.0", "no hash"),
        ("rich==13.7.0 --hash=md5:" + "0" * 32, "no hash"),
        ("rich==13.7.0 --hash=sha256:" + "0" * 64 + " --no-binary", "more than hashes"),
    ],
)
def test_a_loose_pin_is_noticed(text, message):
    with pytest.raises(AssertionError, match=message):
        pinned(text)


@pytest.mark.slow
def test_pip_accepts_the_pins(tmp_path):
    """Loads every package, some gigabytes: for machines with a package index."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--require-hashes",
        "--dry-run",
        "--ignore-installed",
        "-r",
        PINS,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800, cwd=tmp_path)
    if "Could not find a version" in done.stderr or "connection" in done.stderr.lower():
        pytest.skip("no package index that has the pinned versions can be reached from here")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Would install" in done.stdout
