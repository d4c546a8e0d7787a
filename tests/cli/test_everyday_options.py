"""Options of everyday use: where a command computes, rehearsals, floors by layer, words that mean the same."""

import shlex

import pytest
import torch

from ifso.cli.distributed import device_of
from ifso.cli.main import main

TASK = "--model ifso:resnet8-digits --data digits"
QUICK = "--criterion magnitude --schedule one-shot --recalibrate 0 --batch 64"


def ifso_(line: str) -> int:
    return main(shlex.split(line))


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestDevice:
    @pytest.mark.parametrize("name", [None, "auto"])
    @pytest.mark.parametrize(
        ("there", "device", "line"),
        [(False, "cpu", "device: cpu"), (True, "cuda", "device: cuda (Some GPU), unless --device cpu")],
    )
    def test_what_there_is(self, monkeypatch, name, there, device, line):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
        said: list[str] = []
        assert (device_of(name, said), said) == (device, [line])

    def test_one_that_is_named_is_taken_without_a_word(self):
        said: list[str] = []
        assert (device_of("cuda:1", said), said) == ("cuda:1", [])

    @pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
    @pytest.mark.parametrize(
        "line",
        [f"prune {TASK} --macs 0.9 {QUICK} --out a", f"train {TASK} --epochs 1 --out a", f"eval {TASK} --repeats 1"],
    )
    def test_is_said(self, line, capsys):
        assert ifso_(line) == 0
        assert "device: cpu\n" in capsys.readouterr().err
