"""No pickle and no text run as code anywhere in the library: its source is searched for every way there is."""

import ast
from pathlib import Path

import pytest

import ifso
import ifso_repro

SOURCES = [Path(package.__file__).parent for package in (ifso, ifso_repro)]
MODULES = ("pickle", "_pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal", "yaml", "jsonpickle")
BUILTINS = ("eval", "exec", "compile", "__import__")
NAMES = ("exec_module", "import_module", "spec_from_file_location", "run_path", "run_module")
ALLOWED = {
    "models/from_file.py": {"spec_from_file_location", "exec_module"},
    "__init__.py": {"import_module"},
    "criteria/registry.py": {"import_module"},
    "errors.py": {"import_module"},
    "ifso_repro/cli.py": {"import_module"},
}
"""``file.py:factory`` is a Python file that the user names to have it run; nothing else may run one. The others import
modules by names that stand in a table beside the call, or below ``ifso.criteria`` once such a table knows them."""


def found_in(source: str) -> set[str]:
    """What of it could unpickle or run what a file says."""
    return {fault for node in ast.walk(ast.parse(source)) for fault in _faults(node)}


def _faults(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names if name.name.partition(".")[0] in MODULES]
    if isinstance(node, ast.ImportFrom):
        names = [node.module or "", *(f"{node.module}.{name.name}" for name in node.names)]
        return [name for name in names if _is_forbidden(name)]
    return _called(node) if isinstance(node, ast.Call) else []


def _is_forbidden(name: str) -> bool:
    return name.partition(".")[0] in MODULES or name in (
        "torch.load",
        "torch.save",
        "numpy.load",
        "os.system",
        "os.popen",
    )


def _called(call: ast.Call) -> list[str]:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    checks = (
        (name in BUILTINS and owner in ("", "builtins"), name),
        (name in NAMES and not (call.args and isinstance(call.args[0], ast.Constant)), name),
        (owner == "torch" and name == "load" and not _has(call, "weights_only", True), "torch.load"),
        (owner == "torch" and name == "save", "torch.save"),
        (owner in ("np", "numpy") and name == "load" and not _has(call, "allow_pickle", False), "np.load"),
        (name == "read_array" and not _has(call, "allow_pickle", False), "read_array"),
        (_has(call, "allow_pickle", True), "allow_pickle"),
        (any(word.arg == "shell" and not _is(word.value, False) for word in call.keywords), "shell"),
        (owner == "os" and name in ("system", "popen"), f"os.{name}"),
        (owner in ("jit", "torch.jit") and name == "load", "torch.jit.load"),
    )
    return [fault for is_one, fault in checks if is_one]


def _has(call: ast.Call, name: str, value: bool) -> bool:
    return any(word.arg == name and _is(word.value, value) for word in call.keywords)


def _is(node: ast.expr, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


FILES = {
    str(path.relative_to(source if source.name == "ifso" else source.parent)): path
    for source in SOURCES
    for path in sorted(source.rglob("*.py"))
}


def test_the_whole_library():
    assert len(FILES) > 200
    found = {name: found_in(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
    wrong = {path: faults - ALLOWED.get(path, set()) for path, faults in found.items()}
    assert {path: faults for path, faults in wrong.items() if faults} == {}
    assert all(found[path] == faults for path, faults in ALLOWED.items())


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "import pickle as p", "import _pickle", "from pickle import loads", "import dill",
        "import joblib",
        "import cloudpickle", "import shelve", "import marshal", "import yaml", "def f():\n    import pickle",
        "torch.load(path)", "torch.load(path, weights_only=False)", "torch.load(path, weights_only=flag)",
        "torch.save(model, path)", "from torch import load", "from torch import save as keep", "torch.jit.load(path)",
        "np.load(path)", "np.load(path, allow_pickle=True)", "numpy.load(path, allow_pickle=x)",
        "from numpy import load",
        "read_array(file)", "npy.read_array(file, allow_pickle=True)", "open_it(path, allow_pickle=True)",
        "eval(text)", "exec(text)", "compile(text, '', 'exec')", "__import__(name)", "builtins.eval(text)",
        "importlib.import_module(name)", "runpy.run_path(path)", "spec.loader.exec_module(module)",
        "subprocess.run(text, shell=True)", "subprocess.run(text, shell=flag)", "os.system(text)", "os.popen(text)",
    ],
)  # fmt: skip
def test_each_way_is_seen(source):
    assert found_in(source)


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, map_location='cpu', weights_only=True)", "np.load(file, allow_pickle=False)",
        "json.loads(text)",
        "re.compile(pattern)", "importlib.import_module('ifso.curvature.kernels')", "torch.compile(model)",
        "ast.literal_eval(text)", "model.eval()", "ifso.load(folder, model)",
        "subprocess.run(words)", "subprocess.run(words, shell=False)", "npy.read_array(file, allow_pickle=False)",
    ],
)  # fmt: skip
def test_what_is_harmless_is_not(source):
    assert not found_in(source)
