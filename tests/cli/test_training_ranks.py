"""Commands under ``torchrun`` with two processes: one network, the same on both, as good as that of one process."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from ifso.cli.main import main

NET = """
import sys
from pathlib import Path

from torch import nn

from ifso.cli.main import main
from ifso.common.distributed import rank
from ifso.surgery.recipe import digest_of
from ifso.training import runs

def normed():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 10),
    )

def plain():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)
    )

def finish(self):
    original(self)
    Path(f"{__file__}.{rank()}").write_text(digest_of(self.model))

if __name__ == "__main__":
    original, runs.RunningTraining._finish = runs.RunningTraining._finish, finish
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def net(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return tmp_path / "net.py"


def torchrun(net, *argv):
    started = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2".split()
    done = subprocess.run(
        [*started, str(net), *map(str, argv), "--json"],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r": \d+ samples, shared by 2 processes: (64 of each|whole) batch(es)? on each", done.stderr)
    return json.loads(done.stdout)


def alone(capsys, *argv):
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["plain", "normed"])
def test_two_processes_train_one_network(network, net, tmp_path, capsys):
    """Without norms it is the network of one process; statistics of norms are those of half a batch."""
    task = ["train", "--model", f"{net}:{network}", "--data", "digits", "--epochs", "3", "--lr", "0.05", "--ema", "0.8"]
    both, one = torchrun(net, *task, "--out", tmp_path / "both"), alone(capsys, *task, "--out", tmp_path / "one")
    assert (both["epochs"], both["settings"]) == (one["epochs"], one["settings"])
    digests = [net.with_name(f"net.py.{rank}").read_text() for rank in (0, 1)]
    assert digests[0] == digests[1]
    assert both["last_top1"] == pytest.approx(one["last_top1"], abs=0.3 if network == "plain" else 6)
    if network == "plain":
        weights = [load_file(tmp_path / name / "model.safetensors") for name in ("both", "one")]
        torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
        assert both["loss"] == pytest.approx(one["loss"], rel=1e-4)


@pytest.mark.slow
def test_two_processes_score_as_one_on_all_their_batches(net, tmp_path, capsys):
    """The score is a mean over batches of absolute values: those of both processes, one after the other."""
    task = ["prune", "--model", f"{net}:plain", "--data", "digits", "--macs", "0.7", "--schedule", "one-shot"]
    both = torchrun(net, *task, "--batch", "64", "--out", tmp_path / "both")
    one = alone(capsys, *task, "--batch", "64", "--batches-per-score", "4", "--out", tmp_path / "one")
    assert both["kept"] == one["kept"]
    assert both["measures"] == [pytest.approx(measure) for measure in one["measures"]]
    scores = [load_file(tmp_path / name / "scores.safetensors") for name in ("both", "one")]
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-9)
