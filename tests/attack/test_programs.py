"""S1, S2 and S4: a program is executed, and weights are loaded by name, only where the user says so."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ifso
from ifso.cli.main import main
from ifso.errors import ModelNotFound, RunError
from ifso.runs.arguments import refuse_foreign

EVIL = "from pathlib import Path\nPath('executed').touch()\n"
CAME = "which came with it; if you trust it, give --"


def tell(run: Path, **arguments: Any) -> None:
    """Let a run say that it was made with these."""
    config = json.loads((run / "config.json").read_text())
    config["about"]["arguments"].update(arguments)
    (run / "config.json").write_text(json.dumps(config))


@pytest.fixture
def evil(project: Path) -> Path:
    """Beside the run lies a program, and links to it are in the run."""
    extra = project / "extra"
    extra.mkdir()
    (extra / "net.py").write_text(EVIL + (project / "net.py").read_text())
    (project / "run" / "net.py").symlink_to("../extra/net.py")
    (project / "run" / "lib").symlink_to("../extra")
    yield project
    assert not (project / "executed").exists()


class TestLinks:
    @pytest.mark.parametrize("name", ["run/net.py", "run/lib/net.py", "extra/../run/net.py"])
    @pytest.mark.parametrize("command", ["eval run", "eval run --only pruned", "finetune run", "export run --to torch"])
    def test_a_linked_network(self, evil: Path, refused, name: str, command: str) -> None:
        tell(evil / "run", model=f"{name}:network")
        assert f"{CAME}model {name}:network" in refused(*command.split())

    @pytest.mark.parametrize("option", ["model", "data"])
    def test_resuming(self, evil: Path, refused, option: str) -> None:
        tell(evil / "run", **{option: "run/net.py:network"})
        assert f"{CAME}{option} run/net.py:network" in refused("prune", "--resume", "--out", "run")

    @pytest.mark.parametrize("command", ["eval run", "finetune run", "export run --to torch"])
    def test_linked_data(self, evil: Path, refused, command: str) -> None:
        tell(evil / "run", data="run/net.py:data")
        assert f"{CAME}data run/net.py:data" in refused(*command.split())

    def test_a_run_that_is_a_link_itself(self, evil: Path, refused) -> None:
        (evil / "there").symlink_to("run")
        (evil / "run" / "own.py").write_text(EVIL)
        for name in ("there/own.py", "run/own.py", "there/net.py"):
            tell(evil / "run", model=f"{name}:network")
            assert CAME in refused("eval", "there")

    def test_a_name_with_a_colon_in_its_options(self, evil: Path, refused) -> None:
        tell(evil / "run", model="run/net.py:network,width=1:2")
        assert CAME in refused("eval", "run")
        assert CAME in refused("prune", "--resume", "--out", "run")

    def test_whom_the_user_names_is_executed(self, project: Path) -> None:
        shutil.copy("net.py", "run/own.py")
        tell(project / "run", model="run/own.py:network")
        assert main(["eval", "run", "--only", "pruned", "--model", "run/own.py:network"]) == 0


class TestFineTuningElsewhere:
    @pytest.fixture
    def tuned(self, evil: Path) -> Path:
        assert main(["finetune", "run", "--out", "ft", "--epochs", "1", "--device", "cpu"]) == 0
        (evil / "ft" / "summary.json").unlink()
        (evil / "run" / "evil.py").write_text(EVIL)
        return evil / "ft"

    @pytest.mark.parametrize("option", ["data", "model", "teacher"])
    @pytest.mark.parametrize("name", ["run/evil.py", "ft/evil.py", "run/lib/net.py"])
    def test_a_program_of_either_folder(self, tuned: Path, refused, option: str, name: str) -> None:
        (tuned / "evil.py").write_text(EVIL)
        tell(tuned, **{option: f"{name}:data"}, **({"distill": 0.5} if option == "teacher" else {}))
        assert f"{CAME}{option} {name}:data" in refused("finetune", "--resume", "run", "--out", "ft")


class TestOptionsThatLoad:
    NAMES = (
        "timm:resnet10t,pretrained=True",
        "timm:resnet10t,checkpoint_path=evil.pth",
        "torchvision:resnet18,weights=DEFAULT",
    )

    @pytest.mark.parametrize("name", NAMES)
    def test_they_need_the_users_word(self, name: str) -> None:
        with pytest.raises(
            ModelNotFound, match=r"would load or download weights \(\w+\); allow that with --pretrained"
        ):
            ifso.create_model(name)

    @pytest.mark.parametrize("name", NAMES)
    def test_every_command_asks_for_it(self, refused, tmp_path: Path, name: str) -> None:
        for command in (
            "inspect {}",
            "prune --data digits --macs 0.5 --out x --model {}",
            "eval --data digits --model {}",
        ):
            assert "allow that with --pretrained" in refused(*command.format(name).split())

    @pytest.mark.parametrize("name", NAMES)
    def test_no_run_gives_it(self, project: Path, refused, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tell(project / "run", model=name)
        words = refused("prune", "--resume", "--out", "run")
        assert f"load or download weights; if you want that, give --model {name} --pretrained" in words
        with pytest.raises(RunError, match=r"--teacher .* --pretrained"):
            refuse_foreign("teacher", name, (project / "run",))

    def test_a_pruned_network_needs_none(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        quick = "--macs 0.9 --criterion magnitude --schedule one-shot --recalibrate 0 --out run --input 1,3,32,32"
        (tmp_path / "own.py").write_text(DATA)
        assert main(f"prune --model torchvision:squeezenet1_1 --data own.py:Own {quick}".split()) == 0
        tell(tmp_path / "run", model="torchvision:squeezenet1_1,weights=DEFAULT")
        from ifso.runs.open import open_run

        assert open_run(tmp_path / "run").pruned() is not None

    def test_what_the_hub_says_is_one_line(self, refused, monkeypatch: pytest.MonkeyPatch) -> None:
        import torchvision

        def fails(*_: Any, **__: Any) -> None:
            raise OSError("no\nnetwork")

        monkeypatch.setattr(torchvision.models, "get_model", fails)
        words = refused("inspect", "torchvision:resnet18", "--pretrained")
        assert "cannot be built with weights='DEFAULT': OSError: no network" in words

    def test_ours_have_no_published_weights(self, refused) -> None:
        assert "ifso:resnet20 has no published weights" in refused("inspect", "ifso:resnet20", "--pretrained")


DATA = """
import torch
class Own:
    train_batches, num_classes, input_shape = [(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))], 1000, (3, 32, 32)
"""
