"""Every package that is pinned and installed here states its licence."""

import importlib.util
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SILENT = {"cuda-toolkit"}
"""Has no files of its own: it names the versions of NVIDIA's packages that belong together."""


@pytest.fixture(scope="module")
def licences():
    spec = importlib.util.spec_from_file_location("licences", ROOT / "requirements" / "licences.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_state_their_licence(licences):
    found = {name: (terms, size) for name, _, terms, size in licences.listed()}
    here = {name: terms for name, (terms, _) in found.items() if terms != "not installed"}
    assert {"torch", "numpy", "safetensors", "rich", "pytest"} <= set(here)
    assert {name for name, terms in here.items() if not terms or terms == "not stated"} <= SILENT
    assert found["numpy"][1] > 2**20


def test_the_core_is_under_permissive_licences(licences):
    found = {name: terms for name, _, terms, _ in licences.listed()}
    core = {name: found[name] for name in ("numpy", "safetensors", "rich")}
    assert not any("GPL" in terms for terms in core.values())
    assert "BSD" in core["numpy"]
    assert "Apache" in core["safetensors"]
    assert "MIT" in core["rich"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"License-Expression": "MIT", "License": "something"}, "MIT"),
        ({"Classifier": "License :: OSI Approved :: MIT License", "License": "Copyright …"}, "MIT License"),
        ({"License": "BSD"}, "BSD"),
        ({"License": "Copyright\nall of it", "License-File": "COPYING"}, "see its file COPYING"),
        ({"License": "Copyright\nall of it"}, "not stated"),
    ],
)
def test_where_it_is_stated(licences, fields, told):
    metadata = Message()
    for key, value in fields.items():
        metadata[key] = value
    package = type("Package", (), {"metadata": metadata})
    assert licences.licence(package) == told
