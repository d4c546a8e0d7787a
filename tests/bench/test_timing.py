"""What the benchmarks measure with."""

from __future__ import annotations

import json

import pytest
import torch

from ifso.bench.score import ScoreBench, ScoreSetup
from ifso.cli.main import main
from ifso.common.timing import LiveBytes, in_turns, make_ready, middle, peak_bytes

CPU = torch.device("cpu")
MINE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.fc = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 5, 3), nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        if isinstance(x, dict):
            x = x["img"]
        return self.fc(self.two(self.one(x).tanh()).tanh().mean((2, 3))) * self.frozen

class Data:
    input_shape = (1, 8, 8)
    def __init__(self):
        torch.manual_seed(1)
        self.train_batches = [{"img": torch.randn(4, 1, 8, 8)}]
    def loss_fn(self, model, batch):
        return model(batch).abs().mean()
"""
"""A network that does not learn all, and takes a batch that is a dict."""


def test_live_bytes_counts_what_is_alive_and_only_that():
    with LiveBytes() as live:
        first = torch.zeros(1000)
        second = first.view(10, 100) * 2
        del first
        third = torch.zeros(500)
    assert live.peak == 4 * (1000 + 1000)
    del second, third


def test_live_bytes_sees_what_backward_needs():
    weight = torch.zeros(100, 100, requires_grad=True)

    def kept():
        x = torch.ones(100, 100)
        for _ in range(10):
            x = (x @ weight).tanh()
        x.sum().backward()

    def not_kept():
        with torch.no_grad():
            x = torch.ones(100, 100)
            for _ in range(10):
                x = (x @ weight).tanh()

    assert peak_bytes(kept, CPU) > 3 * peak_bytes(not_kept, CPU)


def test_rounds_take_turns():
    calls = []
    ready = {name: make_ready(lambda name=name: calls.append(name), CPU) for name in "ab"}
    calls.clear()
    seconds = in_turns(ready, 3)
    assert calls == list("ababab")
    assert all(len(times) == 3 and min(times) >= 0 for times in seconds.values())


def test_middle_of_one():
    assert middle([2.0]) == (2.0, 0.0)


class TestBenchScore:
    def test_json_has_every_method_as_a_multiple_of_the_gradient(self, capsys):
        argv = ["bench", "score", "--models", "ifso:resnet8-digits", "--batch", "2", "--size", "8", "--repeats", "1"]
        assert main([*argv, "--json"]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        methods = result["methods"]
        others = {"authors", "double backward", "group-fisher", "taylor"}
        assert set(methods) == {"gradient", "training step", "ifso", *others}
        assert methods["training step"]["memory_in_steps"] == 1 < methods["training step"]["memory"]
        assert methods["ifso"]["memory_in_steps"] < methods["ifso"]["memory"]
        assert methods["gradient"]["times"] == methods["gradient"]["memory"] == 1
        for row in methods.values():
            assert row["seconds"] > 0
            assert row["peak_bytes"] > 0
        assert methods["ifso"]["peak_bytes"] > methods["gradient"]["peak_bytes"]

    def test_table_names_what_was_asked_for(self, capsys):
        argv = ["bench", "score", "--models", "ifso:resnet8-digits", "--batch", "2", "--size", "8", "--repeats", "1"]
        assert main([*argv, "--methods", "ifso"]) == 0
        out = capsys.readouterr().out
        assert "gradient" in out
        assert "S, exact" in out
        assert "taylor" not in out

    def test_a_method_that_fails_leaves_its_reason_and_the_others(self, capsys, monkeypatch):
        def fail(self):
            raise NotImplementedError("forward AD with\nnative_dropout_backward")

        monkeypatch.setattr("ifso.bench.score.ScoreBench._double_backward", fail)
        argv = ["bench", "score", "--models", "ifso:resnet8-digits", "--batch", "2", "--size", "8", "--repeats", "1"]
        argv += ["--methods", "ifso", "double backward", "taylor"]
        assert main([*argv, "--json"]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        methods = result["methods"]
        reason = "NotImplementedError: forward AD with native_dropout_backward"
        assert methods["double backward"] == {"error": reason}
        assert all(methods[name]["seconds"] > 0 for name in ("gradient", "ifso", "taylor"))
        assert methods["ifso"]["fidelity"] > 0.9
        assert main(argv) == 0
        assert f"double backward failed: {reason}" in capsys.readouterr().out.replace("\n", " ")

    def test_a_model_that_fails_leaves_the_others_and_their_files(self, capsys, tmp_path):
        models = ["ifso:resnet8-digits", "ifso:resnet21", "ifso:resnet20"]
        out = tmp_path / "new" / "folder"
        argv = ["bench", "score", "--models", *models, "--batch", "2", "--size", "8", "--repeats", "1", "--no-ranks"]
        assert main([*argv, "--methods", "ifso", "--out", str(out), "--json"]) == 2
        shown = capsys.readouterr()
        assert [result["model"] for result in json.loads(shown.out)["results"]] == [models[0], models[2]]
        assert shown.err.splitlines()[-1].startswith("ifso: error: ")
        assert "ifso:resnet21 was not measured" in shown.err
        assert sorted(path.name for path in out.iterdir()) == ["ifso_resnet20.json", "ifso_resnet8-digits.json"]
        (kept,) = json.loads((out / "ifso_resnet20.json").read_text())["results"]
        assert kept["methods"]["ifso"]["seconds"] > 0
        (out / "file").touch()
        assert main([*argv, "--out", str(out / "file")]) == 2
        assert "file cannot be made: File exists; give another --out" in capsys.readouterr().err

    def test_ranks_are_of_few_samples_or_left_out(self, capsys, monkeypatch):
        argv = ["bench", "score", "--models", "ifso:resnet8-digits", "--batch", "3", "--size", "8", "--repeats", "1"]
        argv += ["--methods", "ifso", "--json"]
        monkeypatch.setattr("ifso.bench.score.RANK_MACS", 1.0)
        assert main(argv) == 0
        (few,) = json.loads(capsys.readouterr().out)["results"]
        assert few["rank_samples"] == 2
        assert few["methods"]["ifso"]["fidelity"] > 0.99
        monkeypatch.setattr("ifso.bench.score.ScoreBench.fidelity", lambda *_: pytest.fail("ranks were computed"))
        assert main([*argv, "--no-ranks"]) == 0
        (none,) = json.loads(capsys.readouterr().out)["results"]
        assert (none["rank_samples"], none["methods"]["ifso"]["fidelity"]) == (0, None)

    def test_batch_and_loss_are_those_of_a_file(self, capsys, tmp_path):
        file = tmp_path / "mine.py"
        file.write_text(MINE)
        argv = ["bench", "score", "--models", f"{file}:Net", "--data", f"{file}:Data", "--repeats", "1", "--json"]
        assert main([*argv, "--methods", "ifso", "taylor"]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        assert (result["data"], result["rank_samples"]) == ("mine.py:Data", 0)
        assert all(row["seconds"] > 0 for row in result["methods"].values())
        bench = ScoreBench(ScoreSetup(f"{file}:Net", data=f"{file}:Data"))
        assert torch.equal(bench.loss(bench.model, bench.batch), bench.model(bench.batch).abs().mean())
        slow = torch.stack(bench.methods()["double backward"]()).sum(0)[:-1].abs()
        torch.testing.assert_close(bench.methods()["ifso"]().float(), slow, rtol=1e-4, atol=1e-6)
        assert main([*argv, "--size", "8"]) == 2
        assert "--data says what is in a batch" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            (["--precision", "int8"], "int8"),
            (["--methods", "guessing"], "guessing"),
            (["--models", "ifso:resnet21"], "resnet21"),
            (["--models", "torchvision:fasterrcnn_resnet50_fpn"], "image classifiers"),
            (["--size", "0"], "--size"),
            (["--device", "abacus"], "abacus"),
            (["--images", "missing.npz"], "missing.npz"),
        ],
    )
    def test_bad_input_is_one_line(self, more, words, capsys):
        assert main(["bench", "score", "--models", "ifso:resnet20", "--batch", "2", "--repeats", "1", *more]) == 2
        assert words in capsys.readouterr().err

    @pytest.mark.parametrize("option", ["--batch", "--repeats", "--threads"])
    def test_counts_are_whole_numbers(self, option, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["bench", "score", option, "0"])
        assert caught.value.code == 2
        assert f"argument {option}: must be a whole number from 1 up" in capsys.readouterr().err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_a_missing_gpu_is_said(self, capsys):
        assert main(["bench", "score", "--device", "cuda"]) == 2
        assert "no CUDA device" in capsys.readouterr().err
