"""Quickstart and guides are run: every block of Python as it stands, every command with fewer repetitions."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from documents import DOCS, blocks, run_page
from small_detectors import boxes, write_coco

import ifso
from ifso.graph.rules import RULES

GUIDES = sorted((DOCS / "guides").glob("*.md"))
LEAST = {"own-model": 7, "own-loss": 5, "detection": 5, "latency": 3, "export": 3, "extending": 5, "around": 3}
"""Blocks and commands that at least run; all others of a page are marked, with the reason."""

SHORTER = {"eval": ["--repeats", "2", "--latency-batch", "1", "--train-batch", "8"]}
FEWER = {"train": ["--epochs", "2"], "prune": ["--calibration", "128"], "finetune": ["--epochs", "1"]}


@pytest.fixture
def alone(tmp_path, monkeypatch, few_digits, few_samples):
    """A folder of its own, one thread, a third of the digits, and no rules for operators left behind."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    for op in [op for op in RULES if op.startswith("guide.")]:
        del RULES[op]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_runs(page, alone, capsys):
    if page.stem == "detection":
        write_coco(alone / "cells", boxes())
    assert run_page(page, SHORTER) >= LEAST.get(page.stem, 0)


def test_quickstart_runs(alone, capsys):
    """The numbers shown are those of one run; units, costs before and the headings are the same everywhere."""
    page = DOCS / "quickstart.md"
    (shown,) = (block.code for block in blocks(page) if "removed in" in block.code)
    assert run_page(page, {**SHORTER, **FEWER}) >= 10
    printed = capsys.readouterr().out
    for words in ("of 224 units removed in", "before    after    kept  asked for", "763,520", "77,754", "run folder:"):
        assert words in shown
        assert words in printed
    for file in ("report.html", "eval.json", "recipe.json", "model.safetensors"):
        assert (Path("runs/half") / file).is_file()


@pytest.mark.slow
def test_two_processes_run_the_guide_to_several(alone):
    (code,) = (block.code for block in blocks(DOCS / "guides" / "distributed.md") if block.language == "python")
    Path("worker.py").write_text(code)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "worker.py"]
    source = str(Path(ifso.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": source}
    done = subprocess.run(launcher, env=environment, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("units removed in") == 1
    assert Path("runs/many/recipe.json").is_file()


def test_the_export_to_onnx_is_left_out_only_without_its_packages():
    needed = {name for block in blocks(DOCS / "guides" / "export.md") for name in block.needs}
    assert needed == {"onnx", "onnxscript", "onnxruntime"}
    for name in sorted(needed):
        try:
            importlib.import_module(name)
        except ImportError:
            pytest.skip(f"the ONNX block of docs/guides/export.md was not run: {name} is not installed")
