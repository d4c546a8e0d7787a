"""W5, W6, W8, W9, W10 and W13: what was verified stays verified, and nothing else is taken for it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_runs
import tiny
import torch
from safetensors.torch import save_file
from torch import nn

import ifso
from ifso.cli.main import main
from ifso.errors import RunError, VerificationError, WeightsError
from ifso.models import load_weights


def changed(path: Path, change: Any) -> None:
    """Edit a JSON file."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


class TestKindsOfWeights:
    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64])
    def test_another_kind_is_refused(self, tmp_path: Path, dtype: torch.dtype) -> None:
        model = nn.Linear(3, 2)
        before = model.weight.clone()
        save_file({name: value.to(dtype) for name, value in model.state_dict().items()}, tmp_path / "w.safetensors")
        with pytest.raises(WeightsError, match=r"2 of another kind \(weight \w+ for float32, bias"):
            load_weights(model, tmp_path / "w.safetensors")
        assert torch.equal(model.weight, before)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_another_precision_is_not(self, tmp_path: Path, dtype: torch.dtype) -> None:
        model, other = (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(2))
        save_file({name: value.to(dtype) for name, value in other.state_dict().items()}, tmp_path / "w.safetensors")
        load_weights(model, tmp_path / "w.safetensors")
        assert torch.equal(model[0].weight, other[0].weight.to(dtype).float())


class TestCheckpointsOfOthers:
    @staticmethod
    def stopped(folder: Path, **options: Any) -> Path:
        with pytest.raises(small_runs.Stop):
            small_runs.prune("plain", folder, listener=small_runs.StopAt(3), **options)
        return folder

    def test_one_of_another_seed_is_refused(self, tmp_path: Path) -> None:
        run, other = self.stopped(tmp_path / "run"), self.stopped(tmp_path / "other", seed=1)
        shutil.rmtree(run / "checkpoints")
        shutil.copytree(other / "checkpoints", run / "checkpoints")
        with pytest.raises(RunError, match=r"\.safetensors: of another run, or config\.json was edited since"):
            small_runs.prune("plain", run)

    def test_settings_edited_in_mid_run_are_refused(self, tmp_path: Path) -> None:
        run = self.stopped(tmp_path / "run", about={"arguments": {"batch": 8}})
        changed(run / "config.json", lambda config: config["about"]["arguments"].update(batch=16))
        with pytest.raises(RunError, match=r"of another run, or config\.json was edited since"):
            small_runs.prune("plain", run)

    def test_a_run_of_an_earlier_version_goes_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from ifso.common import serialization as checkpoint
        from ifso.runs import folder

        def older(path: Path, tensors: Any, state: Any = None) -> None:
            checkpoint.write_tensor_file(path, tensors, state and {k: v for k, v in state.items() if k != folder.RUN})

        monkeypatch.setattr(folder, "write_tensor_file", older)
        run = self.stopped(tmp_path / "run")
        monkeypatch.undo()
        whole = small_runs.prune("plain", tmp_path / "whole")
        assert small_runs.prune("plain", run).removals == whole.removals
        assert small_runs.contents(run) == small_runs.contents(tmp_path / "whole")

    def test_a_hole_in_the_metrics_is_told(self, tmp_path: Path) -> None:
        run = self.stopped(tmp_path / "run")
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join([lines[0], *lines[2:], lines[0]]))
        result = small_runs.prune("plain", run)
        assert any("metrics.jsonl: 1 of the 2 removals so far are not in it any more" in note for note in result.notes)
        numbers = [line["removal"] for line in small_runs.lines(run)]
        assert numbers == sorted(set(numbers))


class TestTheNetworkOfAnother:
    @pytest.fixture
    def mixed(self, project: Path) -> Path:
        """A run that holds the network of another one."""
        task = "prune --model net.py:network --data net.py:data --out other --macs 0.5 --criterion magnitude"
        assert main([*task.split(), "--schedule", "one-shot"]) == 0
        for name in ("recipe.json", "model.safetensors"):
            shutil.copy(project / "other" / name, project / "run" / name)
        return project / "run"

    @pytest.mark.parametrize(
        "command", ["prune --resume --out run", "eval run", "finetune run --epochs 1", "export run --to torch"]
    )
    def test_it_is_refused(self, mixed: Path, refused, command: str) -> None:
        assert "summary.json: of another run than recipe.json and the weights beside it" in refused(*command.split())

    def test_unless_asked_for(self, mixed: Path) -> None:
        assert main(["eval", "run", "--only", "pruned", "--unverified"]) == 0

    def test_a_fine_tuning_too(self, project: Path, refused) -> None:
        assert main(["finetune", "run", "--epochs", "1"]) == 0
        for name in ("recipe.json", "model.safetensors"):
            shutil.copy(project / "run" / name, project / "run" / "finetune" / name)
        assert "finetune/summary.json: of another run than recipe.json" in refused(
            "eval", "run", "--only", "fine-tuned"
        )

    def test_metrics_of_another(self, project: Path, refused) -> None:
        with (project / "run" / "metrics.jsonl").open("a") as file:
            file.write("{}\n")
        assert "of another run than metrics.jsonl beside it" in refused("eval", "run")

    def test_a_run_of_an_earlier_version_is_opened(self, project: Path) -> None:
        changed(project / "run" / "summary.json", lambda summary: summary.pop("digests"))
        (project / "run" / "metrics.jsonl").write_text("")
        assert main(["eval", "run", "--only", "pruned"]) == 0
        assert main(["prune", "--resume", "--out", "run"]) == 0


class TestAFailedCheck:
    @pytest.fixture
    def failed(self, project: Path) -> Path:
        def fail(summary: Any) -> None:
            summary["checks"][0]["passed"] = False

        changed(project / "run" / "summary.json", fail)
        return project / "run"

    @pytest.mark.parametrize("command", ["eval run", "finetune run --epochs 1", "export run --to torch"])
    def test_its_network_is_refused(self, failed: Path, refused, command: str) -> None:
        words = refused(*command.split(), status=4)
        assert "run: this network failed the check of its run (compacted equals masked); prune again, or" in words

    def test_and_by_load(self, failed: Path) -> None:
        with pytest.raises(VerificationError, match="failed the check of its run"):
            ifso.load(failed, tiny.network())
        assert ifso.load(failed, tiny.network(), unverified=True)[0].weight.shape[0] <= 5

    def test_unless_asked_for(self, failed: Path) -> None:
        assert main(["eval", "run", "--only", "pruned", "--unverified"]) == 0


PLACES = {
    "at import": "import sys\nsys.exit({})\n",
    "network": "def network():\n    import sys\n    sys.exit({})\n",
    "data": "def data():\n    import sys\n    sys.exit({})\n",
    "batches": """
class data:
    num_classes, input_shape = 3, (2, 4, 4)
    class train_batches:
        def __iter__(self):
            import sys
            sys.exit({})
    train_batches = train_batches()
""",
    "loss": """
tiny_data = data
def data():
    found = tiny_data()
    def loss_fn(model, batch):
        import sys
        sys.exit({})
    found.loss_fn = loss_fn
    return found
""",
    "forward": """
def network():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 1)
        def forward(self, x):
            import sys
            sys.exit({})
    return Net()
""",
}


class TestSystemExit:
    @pytest.mark.parametrize("code", [0, ""])
    @pytest.mark.parametrize("place", PLACES)
    def test_it_is_an_error(self, project: Path, refused, place: str, code: object) -> None:
        with (project / "net.py").open("a") as file:
            file.write(PLACES[place].format(code))
        task = "prune --model net.py:network --data net.py:data --macs 0.7 --out new --criterion magnitude"
        assert "exit" in refused(*task.split()).lower()
        assert not (project / "new").exists()

    def test_any_other_way_out_of_a_file(self, project: Path, refused) -> None:
        (project / "net.py").write_text("class Out(BaseException): pass\nraise Out('far')\n")
        assert "net.py cannot be imported: Out: far" in refused("inspect", "net.py:network")
