"""D1 and D3: nothing is replaced but plain files, and nothing is removed but what a run wrote itself."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest
import torch

import ifso
from ifso.cli.main import main
from ifso.common.files import replacing, write_text
from ifso.errors import RecipeError, RunError
from ifso.runs.folder import RunFolder

CONFIG = {"settings": {"seed": 0}}


def piped(place: Path, write) -> bytes:
    """What comes out of a pipe while ``write`` works."""
    os.mkfifo(place)
    found = []
    reader = threading.Thread(target=lambda: found.append(place.read_bytes()))
    reader.start()
    write()
    reader.join(10)
    assert stat.S_ISFIFO(place.lstat().st_mode)
    return found[0]


class TestNamedByTheUser:
    def test_a_pipe_is_written_into(self, project: Path) -> None:
        words = piped(project / "pipe", lambda: main(["eval", "run", "--only", "pruned", "--out", "pipe"]))
        assert json.loads(words)["run"] == "run"

    def test_a_pipe_that_nobody_reads_is_refused(self, project: Path, refused) -> None:
        os.mkfifo(project / "pipe.svg")
        words = refused("inspect", "ifso:resnet20", "--svg", "pipe.svg")
        assert "pipe.svg cannot be written: nobody reads from this pipe" in words

    def test_the_null_device_stays(self, tmp_path: Path) -> None:
        place = tmp_path / "null"
        try:
            os.mknod(place, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            place.symlink_to("/dev/null")
        before = place.lstat().st_ino
        write_text(place, "words")
        assert place.lstat().st_ino == before
        assert stat.S_ISCHR(place.stat().st_mode)

    def test_standard_output(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        write_text(Path("/proc/self/fd/1"), "words")
        assert capfd.readouterr().out == "words"

    @pytest.mark.parametrize("command", ["eval run --only pruned --out", "report run --out", "export run --out"])
    def test_a_link_is_refused_and_stays(self, project: Path, refused, command: str) -> None:
        (project / "real").write_text("of the user")
        name = {"eval": "x.json", "report": "x.html", "export": "x.pt2"}[command.split(maxsplit=1)[0]]
        (project / name).symlink_to("real")
        assert f"{name} cannot be written: it is a link to real" in refused(*command.split(), name)
        assert (project / name).is_symlink()
        assert (project / "real").read_text() == "of the user"
        assert not list(project.glob(".*.new"))

    def test_a_network_is_not_saved_over_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").write_text("of the user")
        (tmp_path / "model.safetensors").symlink_to("real")
        with pytest.raises(RecipeError, match="it is a link to real"):
            ifso.save(torch.nn.Linear(2, 2), tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "real"]


class TestFilesOfARun:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        with RunFolder.create(tmp_path / "run", CONFIG) as folder:
            folder.write_checkpoint(3, {"weight": torch.ones(2)}, {})
        return tmp_path / "run"

    @pytest.mark.parametrize("name", ["summary.json", "config.json"])
    def test_a_pipe_in_its_place_is_refused(self, tmp_path: Path, name: str) -> None:
        os.mkfifo(tmp_path / name)
        with pytest.raises(OSError, match="it is no plain file"), replacing(tmp_path / name):
            pass

    def test_resuming_removes_nothing_of_a_user(self, run: Path) -> None:
        own = [".notes.new", ".tmpABCDEF", "checkpoints/.notes.new", "checkpoints/.tmpABCDEF"]
        for name in own:
            (run / name).write_text("of the user")
        left = (".summary.json.new", "checkpoints/.00000004.safetensors.new")
        for name in left:
            (run / name).write_text("half")
        folder = run / "checkpoints" / ".00000005.safetensors.new.d"
        folder.mkdir()
        (folder / ".tmpAbCdEf").write_text("half")
        RunFolder.resume(run, CONFIG).close()
        assert all((run / name).read_text() == "of the user" for name in own)
        assert not any((run / name).exists() for name in left)
        assert not folder.exists()

    def test_checkpoints_of_others_are_left_alone(self, run: Path, tmp_path: Path) -> None:
        elsewhere = (run / "checkpoints").rename(tmp_path / "elsewhere")
        (run / "checkpoints").symlink_to(elsewhere)
        for name in ("00000001.safetensors", ".00000002.safetensors.new", ".tmpABCDEF"):
            (elsewhere / name).write_text("of another run")
        before = sorted(path.name for path in elsewhere.iterdir())
        with RunFolder.resume(run, CONFIG) as folder:
            with pytest.raises(RunError, match=r"checkpoints: it is a link to .*; put the folder itself there"):
                folder.newest_checkpoint()
            with pytest.raises(RunError, match="it is a link"):
                folder.write_checkpoint(9, {"weight": torch.ones(2)}, {})
        assert sorted(path.name for path in elsewhere.iterdir()) == before

    def test_a_lock_that_is_a_link_makes_no_file_elsewhere(self, run: Path, tmp_path: Path) -> None:
        (run / ".lock").unlink()
        (run / ".lock").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(RunError, match="it is a link"):
            RunFolder.resume(run, CONFIG)
        assert not (tmp_path / "elsewhere").exists()

    def test_a_link_is_removed_with_nothing_behind_it(self, run: Path, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "file").write_text("of the user")
        (run / ".summary.json.new").symlink_to(tmp_path / "real" / "file")
        (run / ".scores.safetensors.new.d").symlink_to(tmp_path / "real")
        RunFolder.resume(run, CONFIG).close()
        assert (tmp_path / "real" / "file").read_text() == "of the user"
