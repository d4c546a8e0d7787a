"""How a run is started, goes on or gives up another; FLOPs; numbers of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SmallResNet, listed, loss_fn

import ifso
from ifso.cli.main import main
from ifso.errors import BudgetError, IfsoError, RunError, ScoreError
from ifso.pruning.result import PruneResult
from ifso.runs.folder import RunFolder


def pruned(**options: Any) -> PruneResult:
    given: dict[str, Any] = {"budget": ifso.Budget(macs=0.7), "criterion": "magnitude", "progress": False, **options}
    return ifso.prune(SmallResNet(), listed(), loss_fn, example_inputs=torch.zeros(1, 2, 5, 5), **given)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class TestFlops:
    def test_they_are_macs_and_a_note_says_so(self):
        by_flops, by_macs = pruned(budget=ifso.Budget(flops=0.7)), pruned()
        assert by_flops.targets == {"macs": 0.7}
        assert by_flops.after == by_macs.after
        assert [note for note in by_flops.notes if note.startswith("FLOPs are counted as MACs")]
        assert not [note for note in by_macs.notes if "FLOPs" in note]

    def test_several_shares_and_bad_ones(self):
        assert ifso.Budget(flops=(0.8, 0.5)).path == (ifso.Budget(macs=0.8), ifso.Budget(macs=0.5))
        with pytest.raises(BudgetError, match="mean the same; give one of them"):
            ifso.Budget(macs=0.5, flops=0.5)
        with pytest.raises(BudgetError, match="is not a share"):
            ifso.Budget(flops=50)


class TestResumeAuto:
    def test_a_run_is_started_and_then_goes_on(self, tmp_path: Path):
        first = pruned(resume="auto", out=tmp_path / "run")
        before = contents(tmp_path / "run")
        again = pruned(resume="auto", out=tmp_path / "run")
        assert any("already come to its end" in note for note in again.notes)
        assert again.after == first.after
        assert contents(tmp_path / "run") == before

    def test_a_folder_of_that_name_is_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.chdir(tmp_path)
        first = pruned(resume="auto", out="auto")
        again = pruned(resume=Path("auto"))
        assert any("already come to its end" in note for note in again.notes)
        assert again.after == first.after

    def test_it_needs_a_place_and_the_same_settings(self, tmp_path: Path):
        with pytest.raises(BudgetError, match="resume='auto' needs out="):
            pruned(resume="auto")
        pruned(resume="auto", out=tmp_path / "run")
        with pytest.raises(RunError, match="budget"):
            pruned(resume="auto", out=tmp_path / "run", budget=ifso.Budget(macs=0.6))


class TestOverwrite:
    def test_a_run_makes_room_only_if_asked(self, tmp_path: Path):
        pruned(out=tmp_path / "run")
        with pytest.raises(RunError, match=r"already holds a run .*overwrite=True"):
            pruned(out=tmp_path / "run", budget=ifso.Budget(macs=0.6))
        second = pruned(out=tmp_path / "run", budget=ifso.Budget(macs=0.6), overwrite=True)
        loaded = ifso.load(tmp_path / "run", SmallResNet())
        assert ifso.recipe(loaded) == second.recipe
        assert pruned(out=tmp_path / "new", overwrite=True).folder == tmp_path / "new"

    @pytest.mark.parametrize("mistake", [{"budget": ifso.Budget(macs=0.001)}, {"ignore": ("nothing",)}])
    def test_bad_input_costs_no_run(self, mistake: dict[str, Any], tmp_path: Path):
        pruned(out=tmp_path / "run")
        before = contents(tmp_path / "run")
        with pytest.raises(IfsoError):
            pruned(out=tmp_path / "run", overwrite=True, **mistake)
        assert contents(tmp_path / "run") == before

    def test_files_of_others_are_never_deleted(self, tmp_path: Path):
        pruned(out=tmp_path / "run")
        (tmp_path / "run" / "thesis.tex").write_text("precious")
        before = contents(tmp_path / "run")
        with pytest.raises(RunError, match=r"holds thesis\.tex, which is of no run"):
            pruned(out=tmp_path / "run", overwrite=True)
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("precious")
        with pytest.raises(RunError, match="not empty and no run folder"):
            pruned(out=tmp_path / "mine", overwrite=True)
        assert contents(tmp_path / "run") == before
        assert (tmp_path / "mine" / "notes.txt").read_text() == "precious"

    def test_a_training_is_not_given_up_for_a_pruning(self, tmp_path: Path):
        with RunFolder.create(tmp_path / "run", {"settings": {"training": {"epochs": 1}}}):
            pass
        with pytest.raises(RunError, match="holds a training"):
            pruned(out=tmp_path / "run", overwrite=True)
        assert (tmp_path / "run" / "config.json").is_file()

    def test_it_needs_a_place(self, tmp_path: Path):
        for options in ({}, {"resume": tmp_path, "out": tmp_path}):
            with pytest.raises(BudgetError, match="overwrite=True needs out="):
                pruned(overwrite=True, **options)


class TestOwnNumbers:
    def test_any_names_and_a_plain_number(self):
        named = pruned(evaluate=lambda _: {"dice": 0.25, "hausdorff": torch.tensor(3.0)})
        assert named.measures[0].values == {"dice": 0.25, "hausdorff": 3.0}
        assert "dice" in str(named)
        assert pruned(evaluate=lambda _: 0.5).measures[0].values == {"value": 0.5}

    def test_no_number_is_refused(self):
        with pytest.raises(ScoreError, match="evaluate returned no numbers"):
            pruned(evaluate=lambda _: {})


class TestCommandLine:
    @pytest.fixture
    def command(self, tmp_path: Path) -> list[str]:
        (tmp_path / "net.py").write_text(
            "from torch import nn\n"
            "def make():\n"
            "    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))\n"
        )
        options = "--data digits --criterion magnitude --schedule one-shot --recalibrate 0"
        return ["prune", "--model", f"{tmp_path}/net.py:make", *options.split(), "--out", str(tmp_path / "run")]

    def test_flops_resume_auto_and_overwrite(self, command: list[str], tmp_path: Path, capsys):
        assert main([*command, "--flops", "0.7", "--resume", "auto"]) == 0
        assert "FLOPs are counted as MACs" in capsys.readouterr().err
        before = contents(tmp_path / "run")
        assert main([*command, "--macs", "0.7", "--resume", "auto"]) == 0
        assert "already come to its end" in capsys.readouterr().out
        assert contents(tmp_path / "run") == before
        assert main([*command, "--macs", "0.6"]) == 2
        assert "--overwrite" in capsys.readouterr().err
        assert main([*command, "--macs", "0.6", "--overwrite"]) == 0
        assert contents(tmp_path / "run") != before

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--macs", "0.5", "--flops", "0.5"], "--macs and --flops mean the same"),
            (["--macs", "0.5", "--resume", "--overwrite"], "leave one of them out"),
        ],
    )
    def test_what_is_refused(self, options: list[str], message: str, command: list[str], capsys):
        assert main([*command, *options]) == 2
        assert message in capsys.readouterr().err
