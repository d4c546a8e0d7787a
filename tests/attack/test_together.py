"""U6 and K1: who writes to one place at the same time, and files that are the same bytes each time."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import ifso
from ifso.common import locks
from ifso.common.files import explained, replacing, write_tensors, write_text
from ifso.common.locks import turn_in
from ifso.errors import RecipeError

TIMES = 12


def network(number: int) -> nn.Module:
    """All of its weights are that number."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for parameter in model.parameters():
        nn.init.constant_(parameter, number)
    return model


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def at_once(*works: Callable[[], object]) -> None:
    """Each of them again and again, in threads of their own; the first error of any is raised."""
    errors: list[BaseException] = []

    def again(work: Callable[[], object]) -> None:
        try:
            for _ in range(TIMES):
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=again, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "WAIT", 0.05)


@pytest.fixture
def busy(tmp_path: Path):
    """A folder that another thread writes into until the test is over."""
    begun, done = threading.Event(), threading.Event()

    def hold() -> None:
        with turn_in(tmp_path):
            begun.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(60)
    yield tmp_path
    done.set()
    thread.join()


def test_saves_and_loads_of_one_folder(tmp_path: Path) -> None:
    """What is loaded is whole, and of one save."""
    ifso.save(network(0), tmp_path / "m")
    found = []

    def load() -> None:
        model = ifso.load(tmp_path / "m", network(9))
        found.append({float(value) for parameter in model.parameters() for value in parameter.detach().unique()})

    at_once(*(lambda n=n: ifso.save(network(n), tmp_path / "m") for n in range(3)), load, load)
    assert all(values in ({0.0}, {1.0}, {2.0}) for values in found)
    assert names(tmp_path / "m") == ["model.safetensors", "recipe.json"]


def test_reports_to_one_file(tmp_path: Path) -> None:
    texts = [letter * 100_000 for letter in "abc"]
    at_once(*(lambda text=text: write_text(tmp_path / "report.html", text) for text in texts))
    assert (tmp_path / "report.html").read_text() in texts
    assert names(tmp_path) == ["report.html"]


@pytest.mark.usefixtures("impatient")
def test_who_waits_too_long_is_told(busy: Path) -> None:
    with pytest.raises(OSError, match="busy") as caught:
        write_text(busy / "report.html", "words")
    assert "another process writes there; do it again when that is through" in explained(caught.value)
    with pytest.raises(RecipeError, match="another process writes there"):
        ifso.save(network(1), busy)
    assert names(busy) == []


@pytest.mark.usefixtures("impatient")
def test_one_thread_writes_several_files_at_once(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as new:
        write_text(tmp_path / "b", "second")
        new.write_text("first")
    assert names(tmp_path) == ["a", "b"]
    with turn_in(tmp_path, reading=True):
        write_text(tmp_path / "a", "third")


@pytest.mark.usefixtures("impatient")
def test_readers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    ifso.save(network(1), tmp_path)
    with turn_in(tmp_path, reading=True):
        thread = threading.Thread(target=at_once, args=(lambda: ifso.load(tmp_path, network(0)),))
        thread.start()
        thread.join(60)
    assert not thread.is_alive()


def test_the_order_of_metadata_is_always_the_same(tmp_path: Path) -> None:
    told = {"z": 'a "quote"\n', "é": "\x7f\x01", "a": "1", "m": "{}", "k": "…"}
    tensors = {"b": torch.ones(2), "a": torch.zeros(3, dtype=torch.float16)}
    found = set()
    for _ in range(8):
        write_tensors(tmp_path / "x.safetensors", tensors, told)
        found.add((tmp_path / "x.safetensors").read_bytes())
    assert len(found) == 1
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == told
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())
