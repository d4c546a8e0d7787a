"""``import ifso`` and ``ifso --help`` are quick: they do not import torch. Every public name can be had."""

import subprocess
import sys

import pytest

import ifso


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "work",
    ["import ifso", "import ifso; dir(ifso)", "from ifso.cli.main import _parser; _parser().format_help()"],
)
def test_torch_and_rich_are_imported_only_when_needed(work):
    done = run(f"{work}\nimport sys\nprint(sorted({{'torch', 'rich', 'numpy', 'jinja2'}} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["demo", "--help"], ["bench", "--help"]])
def test_help_takes_little_cpu_time(arguments):
    done = run(
        "import resource, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-m', 'ifso.cli', *{arguments}], check=True, stdout=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime)"
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.6


@pytest.mark.parametrize("name", ifso.__all__)
def test_every_public_name_resolves(name):
    value = getattr(ifso, name)
    assert value is not None
    assert getattr(value, "__name__", name) == name


def test_names_and_homes_agree():
    eager = {"IfsoError", "__version__"}
    assert set(ifso.__all__) == set(ifso._HOME) | eager
    assert set(ifso.__all__) <= set(dir(ifso))
    assert ifso.__all__ == sorted(ifso.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'traec'"):
        _ = ifso.traec


def test_importing_subpackages_does_not_shadow_functions():
    done = run(
        "import ifso, importlib\n"
        "for home in set(ifso._HOME.values()): importlib.import_module(home)\n"
        "from types import ModuleType\n"
        "print([name for name in ifso._HOME if isinstance(getattr(ifso, name), ModuleType)])"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
