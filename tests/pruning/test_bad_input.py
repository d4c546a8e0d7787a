"""What ``ifso.prune`` says about bad input, in one line, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_runs import SIZE, SmallResNet, listed, loss_fn, prune, samples
from torch import Tensor, nn

import ifso
from ifso.common.module_state import named_tensors
from ifso.errors import (
    BudgetError,
    DataError,
    DivergedError,
    IfsoError,
    RunError,
    ScoreError,
    TraceError,
    UnreachableBudget,
)
from ifso.pruning.events import Silent

NAN = float("nan")


def refused(kind: type[IfsoError], message: str, status: int = 2, **options: Any) -> str:
    """One line of that kind; the model is as it was, and there is no folder."""
    model = options.pop("model", None) or SmallResNet()
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    with pytest.raises(kind, match=message) as caught:
        prune("plain", model=model, **options)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == status
    assert before.keys() == named_tensors(model).keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_tensors(model).items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(random, torch.get_rng_state())
    assert not options["out"].exists() if "out" in options else True
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------ budget


@pytest.mark.parametrize("share", [0, 0.0, -0.1, 1, 1.5, NAN, True, "half", float("inf")])
def test_no_share(share: Any) -> None:
    with pytest.raises(BudgetError) as caught:
        ifso.Budget(macs=share)
    assert "\n" not in str(caught.value)
    assert repr(share) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.5}, r"budget is 0.5; give ifso.Budget\(macs=0.5\)"),
        ({"budget": None}, r"budget is None"),
        ({"schedule": "at-once"}, "schedule must be 'staged', 'incremental', 'one-shot' or"),
        ({"preset": "paperr"}, "preset must be one of paper, authors, got 'paperr'"),
        ({"accumulate": 0}, "accumulate must be a whole number from . up, got 0$"),
        ({"accumulate": 2.5}, "accumulate must be a whole number from . up, got 2.5$"),
        ({"batches_per_score": True}, "batches_per_score must be a whole number from . up, got True$"),
        ({"units_per_step": -1}, "units_per_step must be a whole number from . up, got -1$"),
        ({"seed": -1}, "seed must be a whole number from . up, got -1$"),
        ({"recalibrate": -2}, "recalibrate must be a whole number from . up, got -2$"),
        ({"damping": 0}, "damping=0 must be above 0"),
        ({"round_to": 0}, "round_to"),
        ({"round_to": 2.0}, "round_to"),
        ({"min_units": 0}, "min_units"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)}, "optimizer is a SGD; give a function"),
        ({"optimizer": lambda parameters: None}, "optimizer gave a NoneType; it must return a torch.optim.Optimizer"),
    ],
)
def test_settings(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(BudgetError, message, **options, out=tmp_path / "run")


@pytest.mark.parametrize("criterion", ["ifsoo", 7, nn.ReLU()])
def test_criterion(criterion: Any, tmp_path: Path) -> None:
    assert "magnitude" in refused(ScoreError, "criterion", criterion=criterion, out=tmp_path / "run")


def test_normalizer(tmp_path: Path) -> None:
    refused(ScoreError, "normalize='memery' is unknown.*sqrt-memory", normalize="memery", out=tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": ifso.Budget(macs=0.001)}, ["macs=0.001", "the last channels of every layer"]),
        ({"budget": ifso.Budget(params=0.3), "ignore": ("one.conv1", "stem")}, ["params=0.3", "ignore"]),
        ({"budget": ifso.Budget(macs=0.5), "round_to": 8}, ["round_to=8"]),
        ({"budget": ifso.Budget(macs=0.2), "min_units": 4}, ["min_units=4"]),
        ({"budget": ifso.Budget(macs=0.8, activations=0.01)}, ["activations"]),
    ],
)
def test_unreachable(options: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    message = refused(UnreachableBudget, "", 3, **options, out=tmp_path / "run")
    assert all(word in message for word in words), message


# -------------------------------------------------------------------------------------------------------------- data


def test_empty_data(tmp_path: Path) -> None:
    refused(DataError, "train_batches is empty", train_batches=iter(()), out=tmp_path / "run")


def test_no_batches(tmp_path: Path) -> None:
    refused(DataError, "train_batches is one batch", train_batches=torch.zeros(3, 2), out=tmp_path / "run")
    refused(DataError, "train_batches is a int; give an iterable", train_batches=3, out=tmp_path / "run")


def test_a_generator_runs_out() -> None:
    model = SmallResNet()
    with pytest.raises(DataError, match=r"ran out after 1 batches; .* can be gone through again") as caught:
        prune("plain", model=model, train_batches=iter(listed()))
    assert "\n" not in str(caught.value)


def test_nan_in_the_first_batch(tmp_path: Path) -> None:
    batches = [(images * NAN, labels) for images, labels in listed()]
    refused(DataError, "batch 0 of train_batches holds NaN", train_batches=batches, out=tmp_path / "run")


class Turning:
    """Batches that are good for some time, then hold NaN."""

    def __init__(self, good: int) -> None:
        self.good = good

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in listed():
            self.good -= 1
            yield (images if self.good >= 0 else images * NAN), labels


def usable(model: nn.Module, folder: Path) -> None:
    """The model is finite and smaller, and its like can be loaded."""
    assert all(tensor.isfinite().all() for tensor in named_tensors(model).values())
    images, labels = samples()
    loaded = ifso.load(folder, SmallResNet())
    assert torch.equal(loaded.eval()(images), model.eval()(images))
    F.cross_entropy(model.train()(images), labels).backward()


def test_nan_in_a_later_batch(tmp_path: Path) -> None:
    model = SmallResNet()
    with pytest.raises(DataError, match=r"hold NaN or infinity .1 of them.*after 4 removals") as caught:
        prune("plain", tmp_path / "run", model=model, train_batches=Turning(8))
    assert "\n" not in str(caught.value)
    whole = sum(tensor.numel() for tensor in SmallResNet().parameters())
    assert sum(tensor.numel() for tensor in model.parameters()) < whole
    usable(model, tmp_path / "run")


def test_nan_in_the_batches_of_batch_norms(tmp_path: Path) -> None:
    model = SmallResNet()
    with pytest.raises(DataError, match="holds NaN or infinity") as caught:
        prune("plain", tmp_path / "run", model=model, train_batches=Turning(4 + 7))
    assert "\n" not in str(caught.value)
    usable(model, tmp_path / "run")


@pytest.mark.parametrize("rate", [1e3, 1e30])
def test_the_loss_diverges(rate: float, tmp_path: Path) -> None:
    model = SmallResNet()
    with pytest.raises(DivergedError, match=r"no longer finite.*last good state.*smaller learning rate") as caught:
        prune("plain", tmp_path / "run", model=model, accumulate=4,
              optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate))  # fmt: skip
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    usable(model, tmp_path / "run")


def test_an_evaluation_that_is_not_finite(tmp_path: Path) -> None:
    result = prune("plain", tmp_path / "run", evaluate=lambda model: {"accuracy": NAN})
    assert str(result)
    assert str(prune("plain", tmp_path / "run", evaluate=lambda model: {"accuracy": NAN}))


# -------------------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: None, "loss_fn returned NoneType; it must return a scalar"),
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), "of shape .8,."),
        (lambda model, batch: model(batch[0]).argmax(1).sum(), "loss_fn returned torch.int64"),
        (lambda model, batch: model(batch[0].double()).mean(), "loss_fn failed: RuntimeError.*dtype"),
        (lambda model, batch: model(batch["images"]).mean(), "loss_fn failed: TypeError"),
    ],
)
@pytest.mark.parametrize("criterion", ["ifso", "magnitude"])
def test_loss_functions(loss: Callable[..., Any], message: str, criterion: str, tmp_path: Path) -> None:
    model = SmallResNet()
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    with pytest.raises(ScoreError, match=message) as caught:
        ifso.prune(
            model, listed(), loss, budget=ifso.Budget(macs=0.5), example_inputs=torch.zeros(1, 2, SIZE, SIZE),
            criterion=criterion, schedule="one-shot", out=tmp_path / "run",
        )  # fmt: skip
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_tensors(model).items())
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------------- model


def test_inputs_that_do_not_fit(tmp_path: Path) -> None:
    refused(
        TraceError,
        "does not run on the example inputs",
        example_inputs=torch.zeros(1, 3, SIZE, SIZE),
        out=tmp_path / "run",
    )


def test_ignored_modules_that_are_not_there(tmp_path: Path) -> None:
    refused(TraceError, "three", ignore=("three",), out=tmp_path / "run")


def test_frozen_weights(tmp_path: Path) -> None:
    refused(BudgetError, "no trainable parameters", model=SmallResNet().requires_grad_(False), out=tmp_path / "run")


def test_nothing_to_prune(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2 * SIZE * SIZE, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.flatten(1))

    refused(BudgetError, "nothing in Flat can be pruned", model=Flat(), out=tmp_path / "run")


def test_a_folder_that_exists(tmp_path: Path) -> None:
    prune("one-shot", tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for name, message in (("run", r"already holds a run \(7 removals, finished\)"), ("other", "is not empty")):
        model = SmallResNet()
        before = model.fc.weight.clone()
        with pytest.raises(RunError, match=message) as caught:
            prune("one-shot", model=model, out=tmp_path / name)
        assert "\n" not in str(caught.value)
        assert torch.equal(model.fc.weight, before)


def test_a_pruned_model_is_pruned_further(tmp_path: Path) -> None:
    first = prune("plain", tmp_path / "once", budget=ifso.Budget(macs=0.7))
    second = prune("plain", tmp_path / "twice", model=first.model, budget=ifso.Budget(macs=0.6))
    assert len(second.recipe.rounds) == 2
    assert second.before.macs == first.after.macs
    assert second.after.macs <= 0.6 * first.after.macs
    loaded = ifso.load(tmp_path / "twice", SmallResNet())
    images = samples()[0]
    assert torch.equal(loaded.eval()(images), second.model.eval()(images))
    again = prune("plain", tmp_path / "twice", model=ifso.load(tmp_path / "once", SmallResNet()),
                  budget=ifso.Budget(macs=0.6))  # fmt: skip
    assert torch.equal(again.model.eval()(images), second.model.eval()(images))
    assert len(again.recipe.rounds) == 2


# ------------------------------------------------------------------------------------------------------------ memory


class Heard(Silent):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def said(self, line: str) -> None:
        self.lines.append(line)


def tight(most: int) -> Callable[..., Tensor]:
    """A loss for whose gradient there is memory for so many samples only."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled() and len(batch[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nand so on")
        return loss_fn(model, batch)

    return loss


@pytest.mark.parametrize("criterion", ["ifso", "taylor"])
def test_out_of_memory(criterion: str, tmp_path: Path) -> None:
    heard = Heard()
    result = ifso.prune(
        SmallResNet(), listed(), tight(3), budget=ifso.Budget(macs=0.5), accumulate=1, recalibrate=2,
        example_inputs=torch.zeros(1, 2, SIZE, SIZE), criterion=criterion, out=tmp_path / "run", listener=heard,
    )  # fmt: skip
    notes = [note for note in result.notes if "out of memory" in note]
    assert [note for note in heard.lines if "out of memory" in note] == notes
    assert [int(note.split("micro-batches of ")[1].split()[0]) for note in notes] == [4, 2]
    assert result.shares["macs"] <= 0.5
    assert all(check.passed for check in result.checks)
    usable(result.model, tmp_path / "run")


def test_no_memory_at_all(tmp_path: Path) -> None:
    model = SmallResNet()
    with pytest.raises(ScoreError, match="out of memory with a single sample") as caught:
        ifso.prune(
            model, listed(), tight(0), budget=ifso.Budget(macs=0.5), out=tmp_path / "run",
            example_inputs=torch.zeros(1, 2, SIZE, SIZE),
        )  # fmt: skip
    assert "\n" not in str(caught.value)
