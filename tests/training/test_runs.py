"""Trainings in folders: the same bits after any interruption, the same files, one line for whatever does not fit."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ifso
from ifso.data import open_data
from ifso.data.base import Data
from ifso.errors import DataError, DivergedError, IfsoError, RunError, TrainingError
from ifso.training import runs
from ifso.training.checkpoint import FILE
from ifso.training.evaluation import evaluate
from ifso.training.runs import SilentTraining, Training, finished_summary, train_side_by_side
from ifso.training.settings import TrainSettings
from ifso.training.trainer import Epoch, fit


def network(seed=0, hidden=12):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, hidden, 3, stride=2), nn.BatchNorm2d(hidden), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1),
        nn.Linear(9 * hidden, 10),
    )  # fmt: skip


@pytest.fixture(scope="module")
def data():
    return open_data("digits", seed=1)


QUICK = TrainSettings(epochs=3, batch=128, lr=0.05, schedule="cosine", warm_up=0.5, ema=0.9, label_smoothing=0.1)


@pytest.fixture
def training(data, tmp_path):
    def make(name="net", settings=QUICK, **changes):
        defaults = {"model": network(), "data": data, "start": "before"}
        return Training(name=name, folder=tmp_path / name, settings=settings, **{**defaults, **changes})

    return make


class Stops(SilentTraining):
    """Interrupts at a step or at the end of an epoch."""

    def __init__(self, at):
        self.at = at

    def stepped(self, name, done):
        if done >= self.at:
            raise KeyboardInterrupt


class Notes(SilentTraining):
    def __init__(self):
        self.lines, self.begun = [], []

    def started(self, name, epoch, epochs):
        self.begun.append((name, epoch, epochs))

    def said(self, line):
        self.lines.append(line)


def trained(*trainings, listener=None, **options):
    return train_side_by_side(trainings, listener or SilentTraining(), **options)


def weights_in(folder):
    return load_file(folder / "model.safetensors")


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class TestOne:
    def test_it_is_what_fit_does_with_files_around_it(self, training, data):
        plain, one = network(), training()
        epochs = fit(plain, data.train_batches(128), QUICK, loss_fn=runs.batches_and_loss(data, QUICK)[1])
        (summary,) = trained(one)
        assert equal(weights_in(one.folder), plain.state_dict())
        lines = [json.loads(line) for line in (one.folder / "metrics.jsonl").read_text().splitlines()]
        assert [(line["epoch"], line["loss"], line["lr"]) for line in lines] == [
            (epoch.number, epoch.loss, epoch.lr) for epoch in epochs
        ]
        found, before = evaluate(plain, data.test_batches()), evaluate(network(), data.test_batches())
        assert summary["last_top1"] == lines[-1]["top1"] == found.top1
        assert summary["best_top1"] == max(line["top1"] for line in lines)
        assert summary["before"] == {"before": before.top1}
        assert (summary["split"], summary["epochs"], summary["settings"]) == ("test", 3, QUICK.as_dict())
        stored = json.loads((one.folder / "summary.json").read_text())
        assert stored.pop("digests").keys() == {"settings", "recipe", "metrics"}
        assert summary == stored == finished_summary(one.folder)
        assert equal(ifso.load(one.folder, network(seed=9)).state_dict(), plain.state_dict())
        assert not (one.folder / FILE).exists()

    def test_validation_images_are_evaluated_on(self, training):
        held = open_data("digits", validation=100)
        (summary,) = trained(training(data=held, validation=True))
        model = ifso.load(summary["folder"], network())
        assert summary["last_top1"] == evaluate(model, held.validation_batches()).top1
        assert summary["split"] == "validation"

    def test_it_is_evaluated_as_often_as_asked_for_and_at_the_end(self, training):
        one = training(every=2)
        trained(one)
        lines = [json.loads(line) for line in (one.folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["epoch"] for line in lines if "top1" in line] == [2, 3]


class TestHarm:
    """What is said of a training that ends worse than it began, or than guessing."""

    @pytest.mark.parametrize(
        ("start", "rate", "words"), [("before", 30.0, r"went from [\d.]+ to \S+"), (None, 1000.0, r"is \S+")]
    )
    def test_a_loss_that_explodes(self, training, start, rate, words):
        one = training(settings=replace(QUICK, lr=rate, epochs=1), start=start)
        (summary,) = trained(one)
        (note,) = summary["notes"]
        line = f"the training diverged: the loss {words}, where guessing has 2.3; give a lower --lr than {rate:g}"
        assert re.fullmatch(line, note)
        assert json.loads((one.folder / "summary.json").read_text())["notes"] == [note]

    @pytest.mark.parametrize("start", [None, "before"])
    def test_nothing_of_one_that_learns(self, training, start):
        (summary,) = trained(training(start=start))
        assert "notes" not in summary

    @pytest.mark.parametrize(
        ("before", "after", "loss", "classes", "lines"),
        [
            ({"top1": 80.0, "eval_loss": 0.5}, {"top1": 81.0, "eval_loss": 1.5}, 0.01, 2, 0),  # learned by heart
            ({"top1": 80.0, "eval_loss": 0.5}, {"top1": 79.0, "eval_loss": 1.5}, 0.01, 2, 1),
            ({"top1": 80.0, "eval_loss": 0.5}, {"top1": 50.0}, 9.0, 2, 1),  # a loss that is not finite
            ({"top1": 80.0, "eval_loss": 0.5}, {"top1": 90.0, "eval_loss": 0.4}, 30.0, 2, 0),  # of a teacher
            ({"top1": 30.0, "eval_loss": 1.37}, {"top1": 30.0, "eval_loss": 1.41}, 1.41, 4, 0),  # never trained
            ({"top1": 30.0, "eval_loss": 2.1}, {"top1": 40.0, "eval_loss": 8.7}, 1.6, 4, 0),  # norms not yet settled
            ({"map": 30.0}, {"map": 31.0}, 9.0, None, 0),
            ({"map": 30.0}, {"map": 29.0}, 9.0, None, 1),
            (None, {"top1": 9.0, "eval_loss": 9.0}, 2.5, 10, 0),  # statistics of batch norms that have not settled
            (None, {}, 2.5, 10, 0),
            (None, {}, 30.0, 10, 1),
            (None, {}, 30.0, None, 0),
            ({"eval_loss": 0.5}, {"eval_loss": 9.0}, 9.0, None, 0),
        ],
    )
    def test_when(self, before, after, loss, classes, lines):
        assert len(runs.harm(before, Epoch(1, loss, 0.1, 1.0, after), classes, 0.1)) == lines


class TestInterrupted:
    @pytest.mark.parametrize(("at", "begun"), [(0.5, 0), (1.5, 1), (2.9, 2), (3.0, 2)])
    def test_it_goes_on_to_the_same_bits(self, at, begun, training, monkeypatch):
        monkeypatch.setattr(runs, "SAVE_EVERY", 0.0)
        whole, cut = training("whole"), training("cut")
        (summary,) = trained(whole)
        with pytest.raises(KeyboardInterrupt):
            trained(cut, listener=Stops(at))
        assert cut.model[1].training
        notes, again = Notes(), training("cut")
        (resumed,) = trained(again, listener=notes, resume=True)
        assert notes.begun == [("cut", begun, 3)]
        assert equal(weights_in(whole.folder), weights_in(cut.folder))
        measured = ("before", "last_top1", "best_top1", "last", "loss", "epochs")
        assert {name: resumed[name] for name in measured} == {name: summary[name] for name in measured}
        first, second = (_without_seconds(folder) for folder in (whole.folder, cut.folder))
        assert first == second

    def test_killed_while_the_end_is_written(self, training, monkeypatch):
        whole, cut = training("whole"), training("cut")
        trained(whole)

        def killed(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(runs.RunFolder, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            trained(cut)
        monkeypatch.undo()
        assert finished_summary(cut.folder) is None
        trained(training("cut"), resume=True)
        assert equal(weights_in(whole.folder), weights_in(cut.folder))
        assert finished_summary(cut.folder)["epochs"] == 3

    def test_lines_beyond_the_checkpoint_or_cut_short_go(self, training, monkeypatch):
        monkeypatch.setattr(runs, "SAVE_EVERY", 0.0)
        cut = training("cut")
        with pytest.raises(KeyboardInterrupt):
            trained(cut, listener=Stops(2.5))
        with (cut.folder / "metrics.jsonl").open("a") as file:
            file.write('{"epoch": 3, "loss": 7}\n{"epo')
        trained(training("cut"), resume=True)
        lines = [json.loads(line) for line in (cut.folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["epoch"] for line in lines] == [1, 2, 3]
        assert lines[-1]["loss"] < 7

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"settings": TrainSettings(epochs=4)}, "training.epochs is 4 and was 3"),
            ({"fixed": {"data": "others"}}, "data is 'others' and was not set"),
            ({"model": network(hidden=8)}, "is of another network: 0.weight is float32"),
        ],
    )
    def test_another_training_is_refused(self, changes, message, training, monkeypatch):
        monkeypatch.setattr(runs, "SAVE_EVERY", 0.0)
        with pytest.raises(KeyboardInterrupt):
            trained(training("cut"), listener=Stops(1.5))
        if "model" in changes:
            (outcome,) = trained(training("cut", **changes), resume=True)
            assert message in str(outcome)
        else:
            with pytest.raises(RunError, match=message):
                trained(training("cut", **changes), resume=True)
        (outcome,) = trained(training("cut"), resume=True)
        assert outcome["epochs"] == 3

    def test_a_new_one_does_not_overwrite(self, training):
        trained(training())
        with pytest.raises(RunError, match=r"already holds a run \(3 epochs, finished\)"):
            trained(training())


def _without_seconds(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


class TestSeveral:
    def test_side_by_side_is_as_alone(self, training):
        settings = TrainSettings(epochs=2, lr=0.05)
        plain = {"settings": settings, "model": None}
        alone = [training(f"alone{seed}", **{**plain, "model": _without_dropout(seed)}) for seed in (0, 1)]
        for one in alone:
            trained(one)
        together = [training(f"both{seed}", **{**plain, "model": _without_dropout(seed)}) for seed in (0, 1)]
        trained(*together)
        for one, other in zip(alone, together, strict=True):
            assert equal(weights_in(one.folder), weights_in(other.folder))

    def test_one_that_fails_does_not_stop_the_other(self, training):
        good, bad = training("good"), training("bad", TrainSettings(epochs=2, lr=1e30))
        summary, failure = trained(good, bad)
        assert summary["epochs"] == 3
        assert isinstance(failure, DivergedError)
        assert not bad.folder.exists()

    def test_one_without_a_gradient_does_not_stop_the_other_and_is_told_of_at_once(self, training):
        class Listening(Notes):
            def ended(self, name, epoch):
                self.lines.append(f"{name} {epoch.number}")

        settings, notes = TrainSettings(epochs=2, lr=0.05), Listening()
        bad = training("bad", settings, model=nn.Sequential(*network(), nn.Sigmoid(), nn.Hardtanh(inplace=True)))
        summary, failure = trained(training("good", settings), bad, listener=notes)
        assert summary["epochs"] == 2
        assert isinstance(failure, TrainingError)
        assert "by an inplace operation" in str(failure)
        assert notes.lines == [f"bad: failed: {failure}", "good 1", "good 2"]

    def test_the_last_one_that_fails_is_told_of_at_the_end_only(self, training):
        notes = Notes()
        good, bad = training("good", TrainSettings(epochs=1)), training("bad", TrainSettings(epochs=2, lr=1e30))
        assert isinstance(trained(good, bad, listener=notes)[1], DivergedError)
        assert notes.lines == []


def _without_dropout(seed):
    model = network(seed)
    model[4] = nn.Identity()
    return model


def test_a_teacher_is_learned_from(training):
    settings = TrainSettings(epochs=1, lr=0.05, distill=1.0)
    teacher = network(seed=5)
    taught, other = (training(name, settings, teacher=network(seed)) for name, seed in (("taught", 5), ("other", 6)))
    assert isinstance(trained(taught)[0], dict)
    assert isinstance(trained(other)[0], dict)
    assert not equal(weights_in(taught.folder), weights_in(other.folder))
    model, batches = network(), training("by-hand", settings).data.train_batches(128)
    fit(model, batches, settings, loss_fn=runs.batches_and_loss(taught.data, settings, teacher)[1])
    assert equal(model.state_dict(), weights_in(taught.folder))


class Own(Data):
    """Data without a test set, or with a loss of its own."""

    num_classes, input_shape, name = None, (1, 8, 8), "own"

    def __init__(self, labels=(0, 1, 2, 9), size=8, test=True, loss_fn=None):
        self._batches = [
            (torch.randn(4, 1, 8, 8), torch.arange(4)),
            (torch.randn(4, 1, size, size), torch.tensor(labels)),
        ]
        self._test = test
        if loss_fn is not None:
            self.loss_fn = loss_fn

    def train_batches(self, batch_size=128, augment=True, drop_last=True):
        return self._batches

    def validation_batches(self, batch_size=500):
        raise DataError("own has no validation_batches")

    def test_batches(self, batch_size=500):
        if not self._test:
            raise DataError("own has no test_batches")
        return self._batches

    def example_inputs(self):
        return torch.zeros(1, 1, 8, 8)


class Fixed(nn.Module):
    """No parameters."""

    def forward(self, images):
        return images.flatten(1)[:, :10]


class TestData:
    def test_without_a_test_set_that_is_said(self, training):
        notes = Notes()
        (summary,) = trained(training(data=Own(test=False)), listener=notes)
        assert notes.lines == ["net: no accuracy will be known, because own has no test_batches"]
        assert (summary["last_top1"], summary["before"], summary["epochs"]) == (None, {}, 3)

    def test_a_loss_of_its_own(self, training):
        def square(model, batch):
            return model(batch[0]).square().mean()

        settings = TrainSettings(epochs=2, lr=0.01)
        (summary,) = trained(training(data=Own(loss_fn=square), settings=settings))
        assert summary["last_top1"] is None
        assert summary["last"]["eval_loss"] > 0

    @pytest.mark.parametrize(
        ("changes", "settings", "message"),
        [
            (
                {"data": Own(labels=(0, 1, 2, 10), test=False)},
                QUICK,
                "a batch of own cannot be learned from (IndexError",
            ),
            ({"data": Own(labels=(0, 1, 2, 10))}, QUICK, "label 10 is none of the 10 classes"),
            ({"data": Own(size=9, test=False)}, QUICK, "a batch of own cannot be learned from (RuntimeError"),
            ({"data": Own(size=9)}, QUICK, "evaluation batches of own"),
            ({"validation": True, "data": Own()}, QUICK, "own has no validation_batches"),
            ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 9))}, QUICK, "10 classes, but the network 9 outputs"),
            ({"model": nn.Sequential(nn.Flatten(), nn.Linear(60, 10))}, QUICK, "1×8×8"),
            ({"teacher": nn.Sequential(nn.Flatten(), nn.Linear(64, 9))}, QUICK, "10 classes, but the network 9"),
            ({"model": Fixed()}, QUICK, "Fixed has no parameter to train; set requires_grad of some, or give another"),
            ({}, TrainSettings(epochs=0), "epochs must be 1 or more, got 0"),
            ({}, TrainSettings(epochs=1, distill=0.5), "distillation needs a teacher"),
            ({}, TrainSettings(epochs=1, batch=4096), "cannot be filled by 1442 training images"),
        ],
    )
    def test_what_does_not_fit_is_refused_and_leaves_nothing(self, changes, settings, message, training):
        one = training(settings=settings, **changes)
        try:
            (outcome,) = trained(one)
        except IfsoError as error:
            outcome = error
        assert message in str(outcome)
        assert not one.folder.exists()

    def test_too_little_memory(self, training, monkeypatch):
        def learn(*_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr("ifso.training.steps.TrainStep.__call__", learn)
        (outcome,) = trained(training())
        assert isinstance(outcome, TrainingError)
        assert "too little memory for a batch of 128" in str(outcome)


def test_the_summary_of_a_pruning_is_not_to_be_deleted(tmp_path):
    (tmp_path / "summary.json").write_text('{"shares": {"macs": 0.5}}')
    with pytest.raises(RunError, match="of a pruning, not of a training; go on with ifso prune --resume --out"):
        finished_summary(tmp_path)


def test_a_damaged_summary(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(RunError, match="damaged, or not of a training"):
        finished_summary(tmp_path)
