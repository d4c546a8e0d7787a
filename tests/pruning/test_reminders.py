"""A run says so where the network looks untrained or was pruned before, and says nothing where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ifso
from ifso.cli.main import main
from ifso.pruning.result import PruneResult


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Images of 2×4 pixels whose class is the first row's largest."""
    torch.manual_seed(1)
    images = [torch.randn(64, 2, 4) for _ in range(2)]
    return [(image, image[:, 0].argmax(1)) for image in images]


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained() -> nn.Sequential:
    model, data = network(), batches()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for step in range(60):
        optimizer.zero_grad()
        loss_fn(model, data[step % 2]).backward()
        optimizer.step()
    return model


def pruned(model: nn.Module, **options: object) -> PruneResult:
    budget, example = ifso.Budget(macs=0.7), torch.zeros(1, 2, 4)
    return ifso.prune(model, batches(), loss_fn, budget=budget, example_inputs=example, progress=False, **options)


def test_a_network_that_looks_untrained():
    assert any("looks untrained" in note and "4 classes (1.39)" in note for note in pruned(network()).notes)


def test_a_trained_network_is_not_remarked_on():
    assert not any("looks untrained" in note or "pruned before" in note for note in pruned(trained()).notes)


def test_another_loss_is_not_taken_for_a_cross_entropy():
    def distance(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return 100 * (model(batch[0]) - batch[1]).square().mean()

    targets = [(images, torch.randn(64, 4)) for images, _ in batches()]
    model, example = network(), torch.zeros(1, 2, 4)
    result = ifso.prune(model, targets, distance, budget=ifso.Budget(macs=0.7), example_inputs=example, progress=False)
    assert not any("looks untrained" in note for note in result.notes)


def test_a_network_pruned_twice_as_in_a_cell_that_ran_again():
    model = trained()
    first, second = pruned(model), pruned(model)
    assert not any("pruned before" in note for note in first.notes)
    share = f"to {first.shares['macs']:.1%} of its MACs"
    assert any("pruned before" in note and share in note and "notebook" in note for note in second.notes)
    assert "pruned before" in str(second)


def test_a_further_round_of_a_network_that_was_loaded(tmp_path):
    first = pruned(trained())
    first.save(tmp_path / "run")
    (note,) = (note for note in pruned(ifso.load(tmp_path / "run", network())).notes if "pruned before" in note)
    share = first.shares["macs"]
    words = (
        f"to {share:.1%} of its MACs; this budget is a share of what was left then, {0.7 * share:.1%} of the original"
    )
    assert words in note
    assert "notebook" not in note


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (96, "calibration: 128 samples, not 96 (batches are taken whole)"),
        (999, "calibration: 128 samples, not 999 (train_batches has no more)"),
        (128, None),
        (None, None),
    ],
)
def test_samples_that_are_looked_at(asked, line):
    found = [note for note in pruned(trained(), calibration=asked).notes if "calibration" in note]
    assert found == [line] * (line is not None)


DATA = """
import torch
class Source:
    num_classes, input_shape = 10, (3, 8, 8)
    train_batches = test_batches = [(torch.randn(8, 3, 8, 8), torch.arange(8))]
"""


@pytest.mark.parametrize("given", [True, False])
def test_the_command_line_says_that_weights_are_random_unless_some_are_given(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: object, **__: object) -> None:
        raise ifso.IfsoError("far enough")

    monkeypatch.setattr("ifso.pruning.prune.prune", refuse)
    (tmp_path / "data.py").write_text(DATA)
    torch.save(ifso.create_model("ifso:resnet20").state_dict(), tmp_path / "trained.pt")
    task = ["prune", "--model", "ifso:resnet20", "--data", f"{tmp_path}/data.py:Source", "--macs", "0.5"]
    weights = ["--weights", str(tmp_path / "trained.pt")] if given else []
    assert main([*task, *weights, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "far enough" in said
    assert ("the network has random weights; give trained ones with --weights FILE" in said) is not given
