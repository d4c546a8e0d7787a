"""C2 to C9, U1 to U12 and K2 to K5: one line that says the truth, the right status, and no waiting."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_runs
import tiny
import torch
import trials
from safetensors.torch import save_file
from torch.nn.utils import prune as torch_prune
from torch.utils.data import DataLoader, TensorDataset

import ifso
from ifso.cli.main import main
from ifso.criteria.scorer import ScoreWarning
from ifso.data import open_data
from ifso.errors import BudgetError, CompactionError, DataError, IfsoError, KeepError, ScoreError, VerificationError
from ifso.models import load_weights
from ifso.runs.files import read_config
from ifso.runs.folder import RunFolder
from ifso.training.profiling import time_forward

TASK = ["prune", "--model", "net.py:network", "--data", "net.py:data", "--macs", "0.7", "--out", "new"]
LONG = "a" * 300


def usage(capfd: pytest.CaptureFixture[str], *command: str) -> str:
    """What argparse says of an option."""
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    return capfd.readouterr().err.splitlines()[-1]


def tell(run: Path, **arguments: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    config["about"]["arguments"].update(arguments)
    (run / "config.json").write_text(json.dumps(config))


class TestOptions:
    """C3, C9, U11"""

    @pytest.mark.parametrize(
        ("option", "value", "words"),
        [
            ("--seed", "1180591620717411303424", "must be a whole number from 0 to 9223372036854775807"),
            ("--seed", "-1", "must be a whole number from 0"),
            ("--input", f"1,{2**63}", "is no shape"),
            ("--lr", "inf", "'inf' is no finite number"),
        ],
    )
    def test_numbers(self, project: Path, capfd: pytest.CaptureFixture[str], option: str, value: str, words: str):
        assert words in usage(capfd, *TASK, f"{option}={value}")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--input", "1,2,1000000,1000000"], "--input 1,2,1000000,1000000 takes 7,450.6 GiB of memory, and"),
            (["--device", "meta"], "device 'meta' cannot be used: it holds no numbers; use cpu or cuda"),
            (["--weights", f"{LONG}.pth"], "no weight file aaa"),
            (["--model", f"{LONG}.py:network"], "no file aaa"),
            (["--data", f"{LONG}.py:data"], "no file aaa"),
            (["--data", f"cifar10:{LONG}"], "aaa"),
            (["--out", f"{LONG}/x"], "File name too long"),
            (["--out", "~nobodyxyz/x"], "out must be a path, got "),
        ],
    )
    def test_one_line(self, project: Path, refused, options: list[str], words: str) -> None:
        assert words in refused(*TASK, *options)

    def test_a_batch_that_would_fill_the_memory(self) -> None:
        with pytest.raises(IfsoError, match=r"^a batch of 1000000000 takes [\d,.]+ GiB of memory, and"):
            time_forward({"net": tiny.network()}, torch.zeros(1, 2, 64, 64), 10**9, "float32", repeats=1)

    @pytest.mark.parametrize("command", ["report {}", "eval {}", "finetune {}", "export {} --to torch"])
    def test_a_folder_that_cannot_be_looked_into(self, project: Path, refused, command: str) -> None:
        assert "File name too long; give a shorter name" in refused(*command.format(LONG).split())

    def test_a_training_is_no_pruning(self, project: Path, refused) -> None:
        task = "train --model net.py:network --data net.py:data --epochs 1 --out trained"
        assert main(task.split()) == 0
        words = refused("prune", "--resume", "--out", "trained")
        assert "trained holds a training and no pruning; go on with it: ifso train --resume --out trained" in words

    def test_a_moved_run(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """U4"""
        save_file(tiny.network().state_dict(), project / "base.safetensors")
        assert main([*TASK, "--weights", "base.safetensors", "--model", str(project / "net.py:network"),
                     "--data", str(project / "net.py:data"), "--criterion", "magnitude"]) == 0  # fmt: skip
        (project / "elsewhere").mkdir()
        monkeypatch.chdir(project / "elsewhere")
        assert main(["prune", "--resume", "--out", str(project / "new")]) == 0


SHORT = "type('B', (list,), {'__len__': lambda self: -1})([(torch.zeros(2, 2, 4, 4), torch.tensor([0, 1]))])"
SPOILT_DATA = {
    "num_classes = 10**9": "num_classes is 1000000000; give a whole number from 1 to 16777216",
    f"train_batches = {SHORT}": "its length cannot be read: ValueError",
    "test_batches = property(lambda self: 1 / 0)": "ZeroDivisionError: division by zero",
}


class TestOwnData:
    """C3"""

    @pytest.mark.parametrize("line", SPOILT_DATA)
    def test_one_line(self, tmp_path: Path, line: str) -> None:
        (tmp_path / "own.py").write_text(f"""
import torch
class data:
    train_batches = [(torch.zeros(2, 2, 4, 4), torch.tensor([0, 1]))]
    {line}
""")
        with pytest.raises(DataError) as caught:
            len(open_data(f"{tmp_path / 'own.py'}:data").train_batches())
        assert SPOILT_DATA[line] in str(caught.value)

    def test_a_file_that_goes_elsewhere(self, project: Path, capfd: pytest.CaptureFixture[str]) -> None:
        """K3"""
        (project / "there").mkdir()
        with (project / "net.py").open("a") as file:
            file.write("import os\nos.chdir(__file__.rpartition('/')[0] + '/there')\n")
        model = [str(project / "net.py:network"), "--data", str(project / "net.py:data")]
        assert main([*TASK, "--criterion", "magnitude", "--model", model[0], *model[1:]]) == 0
        assert f"run folder: {project / 'there' / 'new'}" in capfd.readouterr().out


class TestEditedConfigs:
    """C4, C6, C7, K4"""

    @pytest.mark.parametrize("value", [None, 5, [0.5], {"a": 1}, True, "x\0y"])
    @pytest.mark.parametrize("name", ["model", "data", "weights", "device", "schedule", "criterion_option", "input"])
    def test_of_another_type(self, project: Path, refused, name: str, value: Any) -> None:
        tell(project / "run", **{name: value})
        assert f"config.json: {name} must be a" in refused("prune", "--resume", "--out", "run")
        assert f"config.json: {name} must be a" in refused("eval", "run")

    @pytest.mark.parametrize(
        ("name", "value"), [("lr", "fast"), ("train_mode", 1), ("seed", 0.5), ("seed", 2**70), ("evaluate_every", 0)]
    )
    def test_of_another_kind(self, project: Path, refused, name: str, value: Any) -> None:
        tell(project / "run", **{name: value})
        assert f"config.json: {name} must be" in refused("finetune", "run")

    @pytest.mark.parametrize("value", [None, [0.5], {"a": 1}, True, "x\0y", -1])
    @pytest.mark.parametrize("name", ["model", "data", "weights", "device", "evaluate_every"])
    def test_of_a_training(self, project: Path, refused, name: str, value: Any) -> None:
        task = "train --model net.py:network --data net.py:data --epochs 1 --out trained"
        assert main(task.split()) == 0
        tell(project / "trained", **{name: value})
        (project / "trained" / "summary.json").unlink()
        if value is not None or name not in ("weights", "device"):
            assert f"config.json: {name} must be" in refused("train", "--resume", "--out", "trained")

    def test_a_pipe(self, project: Path, refused) -> None:
        (project / "piped").mkdir()
        os.mkfifo(project / "piped" / "config.json")
        assert "config.json: is no plain file" in refused("prune", "--resume", "--out", "piped")
        assert "not empty and no run folder" in refused(*TASK[:-1], "piped")

    @pytest.mark.parametrize("text", ['"version": true', '"version": 1, "version": 1'])
    def test_what_a_recipe_would_refuse(self, project: Path, text: str) -> None:
        place = project / "run" / "config.json"
        place.write_text(place.read_text().replace('"version": 1', text))
        with pytest.raises(IfsoError, match=r"config\.json: (damaged|version True is unknown)"):
            read_config(place)

    def test_a_network_that_was_not_pruned(self, project: Path, refused) -> None:
        ifso.save(tiny.network(), project / "run")
        summary = json.loads((project / "run" / "summary.json").read_text())
        del summary["digests"]
        (project / "run" / "summary.json").write_text(json.dumps(summary))
        assert "run holds a network that was not pruned" in refused("prune", "--resume", "--out", "run")


class TestStreams:
    """C5, K2"""

    @staticmethod
    def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        whole = f"{sys.executable} -m ifso.cli {command}"
        variables = {**os.environ, "PYTHONPATH": str(Path(ifso.__file__).parents[1]), **environment}
        return subprocess.run(["bash", "-c", whole], capture_output=True, text=True, env=variables, check=False)

    @pytest.mark.parametrize("where", [">&-", "2>&-", "2> /dev/full"])
    def test_nobody_listens(self, where: str) -> None:
        found = self.shell(f"repro --list {where}")
        assert (found.returncode, "Traceback" in found.stderr) == (0, False)

    @pytest.mark.parametrize(
        ("where", "status"),
        [
            ("> /dev/full", 2),
            ("2>&-", 0),
            pytest.param(">&-", 0, marks=pytest.mark.slow),
            pytest.param("2> /dev/full", 0, marks=pytest.mark.slow),
        ],
    )
    def test_nobody_listens_to_a_pruning(self, project: Path, where: str, status: int) -> None:
        """The work is done all the same."""
        found = self.shell(f"{' '.join(TASK)} --criterion magnitude {where}")
        assert (found.returncode, "Traceback" in found.stderr) == (status, False)
        assert ifso.load("new", tiny.network())[0].weight.shape[0] <= 5

    def test_nobody_listens_to_an_error(self) -> None:
        assert self.shell("inspect ifso:nothing 2> /dev/full").returncode == 2

    def test_output_that_is_full(self) -> None:
        found = self.shell("repro --list > /dev/full")
        words = "ifso: error: standard output cannot be written: No space left on device\n"
        assert (found.returncode, found.stderr) == (2, words)

    @pytest.mark.parametrize("command", ["repro --list", "prune --help"])
    def test_ascii(self, command: str) -> None:
        found = self.shell(command, PYTHONIOENCODING="ascii")
        assert (found.returncode, "Traceback" in found.stderr) == (0, False)
        assert found.stdout.isascii()

    def test_a_name_that_is_no_text(self, project: Path, refused) -> None:
        words = refused(*TASK[:-1], os.fsdecode(b"bad\xff"))
        assert "is no UTF-8 name" in words
        assert not (project / os.fsdecode(b"bad\xff")).exists()

    def test_escape_codes_are_shown(self, project: Path, refused) -> None:
        (project / "net.py").write_text("raise ValueError('\x1b[2J' + 'a' * 10000)\n")
        words = refused("inspect", "net.py:network")
        assert "\\x1b[2J" in words
        assert len(words) < 2100


class TestNetworks:
    """C2, C8, U1, U2, U7, U10, W12"""

    def test_masks_of_torch(self) -> None:
        model = tiny.network()
        torch_prune.l1_unstructured(model[3], "weight", 0.5)
        graph = ifso.trace(model, tiny.samples()[0])
        with pytest.raises(ScoreError, match=r"units are read through 3\.weight_mask, .* remove\(module, name\), or"):
            ifso.score(model, graph, small_runs.loss_fn, tiny.listed(), criterion="ifso")
        torch_prune.remove(model[3], "weight")
        graph = ifso.trace(model, tiny.samples()[0])
        assert ifso.score(model, graph, small_runs.loss_fn, tiny.listed(), criterion="ifso").keys() == {"0", "3"}

    def test_an_empty_batch(self) -> None:
        model = tiny.network()
        graph = ifso.trace(model, tiny.samples()[0])
        empty = (torch.zeros(0, 2, 4, 4), torch.zeros(0, dtype=torch.long))
        with pytest.raises(ScoreError, match="no samples"):
            ifso.score(model, graph, lambda model, batch: model(batch[0]).sum(), [empty], criterion="group-fisher")

    def test_compacting_what_is_masked(self) -> None:
        model = tiny.network()
        graph = ifso.trace(model, tiny.samples()[0])
        keep = graph.keep_all()
        keep[graph.groups[0].name][0] = False
        with ifso.masked(model, graph, keep), pytest.raises(CompactionError, match="leave the block of"):
            ifso.compact_(model, graph, keep)
        ifso.compact_(model, graph, keep)

    def test_meta_as_the_usual_device(self) -> None:
        with torch.device("meta"), pytest.raises(BudgetError, match="torch's default device is meta"):
            small_runs.prune("plain")

    def test_a_loss_that_never_was_finite(self, tmp_path: Path) -> None:
        with pytest.raises(ScoreError, match=r"the loss of the first batch is not finite \(nan\)"):
            small_runs.prune(
                "plain", tmp_path / "run", loss_fn=lambda model, batch: model(batch[0]).sum() * float("nan")
            )
        assert not (tmp_path / "run").exists()

    def test_outputs_that_are_not_finite(self) -> None:
        from ifso.pruning.measures import compare, refuse_failed

        outputs = [torch.tensor([1.0, float("nan")])]
        with pytest.raises(VerificationError, match="the network gives NaN or infinity on a batch"):
            refuse_failed([compare(outputs, outputs)])

    def test_pruning_inside_autocast(self) -> None:
        """C1"""
        with torch.autocast("cpu", torch.bfloat16):
            result = small_runs.prune("plain")
        assert result.removed_units > 0

    def test_a_backward_hook(self) -> None:
        model = tiny.network()
        graph = ifso.trace(model, tiny.samples()[0])
        plain = ifso.score(model, graph, small_runs.loss_fn, tiny.listed(), criterion="ifso")
        model[3].register_full_backward_hook(lambda *_: None)
        with pytest.warns(ScoreWarning, match="scored by double backward"):
            hooked = ifso.score(model, graph, small_runs.loss_fn, tiny.listed(), criterion="ifso")
        for name, scores in plain.items():
            torch.testing.assert_close(hooked[name], scores, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("zipped", [True, False])
    def test_a_program_in_weights(self, tmp_path: Path, zipped: bool) -> None:
        class Evil:
            def __reduce__(self) -> Any:
                return os.system, ("true",)

        torch.save({"a": Evil()}, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
        with pytest.raises(IfsoError, match="system") as caught:
            load_weights(tiny.network(), tmp_path / "x.pth")
        assert "weights_only" not in str(caught.value)

    def test_workers_that_remember(self, tmp_path: Path) -> None:
        from ifso.common.batches import remembers

        data = TensorDataset(torch.zeros(4, 2))
        assert remembers(DataLoader(data, num_workers=1, persistent_workers=True))
        assert not remembers(DataLoader(data, num_workers=1))
        assert not remembers([1])


class TestArguments:
    """K5"""

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"ignore": None}, "ignore=None is no tuple"),
            ({"out": 5}, "out must be a path, got 5"),
            ({"listener": object()}, "listener must have started, removed, said, finished, got object without started"),
        ],
    )
    def test_of_prune(self, options: Any, words: str) -> None:
        with pytest.raises(BudgetError, match=words):
            small_runs.prune("plain", **options)

    def test_of_compact(self) -> None:
        model = tiny.network()
        with pytest.raises(KeepError, match=r"keep must be \{group name: bool tensor\}, got str"):
            ifso.compact_(model, ifso.trace(model, tiny.samples()[0]), "abc")


class TestFilesThatCannotBeRead:
    """U3, U5"""

    @pytest.mark.parametrize("name", ["x.safetensors", "x.pth"])
    def test_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        place = tmp_path / name
        (save_file if name.endswith("safetensors") else torch.save)(tiny.network().state_dict(), place)

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))

        monkeypatch.setattr("ifso.models.weights.load_file", refuse)
        monkeypatch.setattr("torch.load", refuse)
        with pytest.raises(IfsoError) as caught:
            load_weights(tiny.network(), place)
        assert str(caught.value).startswith(f"{place} cannot be read: Permission denied; make it readable")

    @pytest.mark.parametrize("command", ["prune --resume --out run", "eval run", "finetune run", "report run"])
    def test_settings_of_a_run(self, project: Path, refused, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
        opened = Path.open

        def refuse(path: Path, *args: Any, **options: Any) -> Any:
            if path.name == "config.json":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return opened(path, *args, **options)

        monkeypatch.setattr(Path, "open", refuse)
        assert "config.json: Permission denied; make it readable" in refused(*command.split())

    @pytest.mark.parametrize("at", [1, 8, 20])
    def test_a_full_disk_before_the_first_removal(self, tmp_path: Path, at: int) -> None:
        outcome = trials.stopped(trials.SCENARIOS["prune staged"], tmp_path, "full", at)
        assert outcome.status == 2
        gone = not (tmp_path / "run" / "config.json").exists()
        assert "No space left on device; make room, then resume the run, or start it again if its folder is gone" in (
            outcome.words
        )
        assert gone == (trials.command("prune", "--resume", "--out", tmp_path / "run") != 0)


class TestImages:
    """U12"""

    def test_one_that_is_larger_than_said_is_not_decoded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from PIL import Image

        from ifso.data.decoding import ImageFiles

        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        Image.new("1", (13000, 13000)).save(tmp_path / "x.png")
        files = ImageFiles(tmp_path, [b"x.png"], torch.zeros(1))
        with pytest.raises(DataError, match="it has 169000000 pixels, and 134217728 are the most"):
            files.read(0)


def test_a_folder_is_not_made_under_a_name_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(IfsoError, match="is no UTF-8 name"):
        RunFolder.create(tmp_path / os.fsdecode(b"bad\xff"), {"settings": {}})
