"""Which batches and which loss the settings lead to, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from ifso.data import open_data
from ifso.data.base import ImageData
from ifso.data.batches import TrainBatches
from ifso.errors import TrainingError
from ifso.tasks.classification import cross_entropy
from ifso.training.distillation import BatchesWithLogits, distillation
from ifso.training.objective import TeacherCaches, batches_and_loss
from ifso.training.settings import TrainSettings
from ifso.training.trainer import fit


class OwnLoss(ImageData):
    """Data of a user, who has a loss for them."""

    @staticmethod
    def loss_fn(model, batch):
        return model(batch[0]).square().mean()


def own(data):
    return OwnLoss("mine.py:data", 10, data.train, data.validation, data.test, data.augmentation, data.seed, data.shard)


class Counting(nn.Sequential):
    """A linear classifier that counts how many images it was asked about."""

    def __init__(self, classes=10):
        torch.manual_seed(classes)
        super().__init__(nn.Flatten(), nn.Linear(64, classes))
        self.asked = 0

    def forward(self, x):
        self.asked += len(x)
        return super().forward(x)


DATA = open_data("digits")
IMAGES = 1442
TAUGHT = TrainSettings(epochs=9, batch=103, distill=0.7, temperature=2.0)


class TestWithoutATeacher:
    def test_labels_only(self):
        batches, loss_fn = batches_and_loss(DATA, TrainSettings(batch=100))
        assert isinstance(batches, TrainBatches)
        assert (batches.batch_size, loss_fn) == (100, cross_entropy)

    def test_a_teacher_that_is_not_wanted_is_not_asked(self):
        teacher = Counting()
        assert batches_and_loss(DATA, TrainSettings(), teacher)[1] is cross_entropy
        assert teacher.asked == 0

    def test_smoothed_labels(self):
        batches, loss_fn = batches_and_loss(DATA, TrainSettings(label_smoothing=0.1))
        x, y = next(iter(batches))
        model = Counting()
        wanted = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
        assert torch.equal(loss_fn(model, (x, y)), wanted)

    def test_processes_share_a_batch(self):
        assert batches_and_loss(DATA, TrainSettings(batch=96), ranks=3)[0].batch_size == 32
        with pytest.raises(TrainingError, match="a batch of 100 cannot be shared by 3 processes; give a multiple"):
            batches_and_loss(DATA, TrainSettings(batch=100), ranks=3)

    def test_a_loss_of_the_users(self):
        data = own(DATA)
        assert batches_and_loss(data, TrainSettings())[1] is data.loss_fn
        for settings in (TrainSettings(distill=0.5), TrainSettings(label_smoothing=0.1)):
            with pytest.raises(TrainingError, match=r"mine\.py:data has a loss of its own; distillation and label"):
                batches_and_loss(data, settings, Counting())


class TestWithATeacher:
    def test_a_long_run_asks_it_once_about_every_variant(self):
        teacher, said, tables = Counting(), [], TeacherCaches()
        for _ in range(2):
            batches, loss_fn = batches_and_loss(DATA, TAUGHT, teacher, caches=tables, say=said.append)
        assert isinstance(batches, BatchesWithLogits)
        assert teacher.asked == 9 * IMAGES
        assert said == ["asking the teacher about every variant of every image"]
        fit(Counting(), batches, TAUGHT, loss_fn=loss_fn)
        assert teacher.asked == 9 * IMAGES
        other = Counting()
        batches_and_loss(DATA, TAUGHT, other, caches=tables)
        assert other.asked == 9 * IMAGES

    def test_a_short_run_asks_it_in_every_step(self):
        teacher, settings = Counting(), TrainSettings(epochs=8, batch=103, distill=0.7)
        batches, loss_fn = batches_and_loss(DATA, settings, teacher)
        assert isinstance(batches, TrainBatches)
        assert teacher.asked == 0
        fit(Counting(), batches, settings, loss_fn=loss_fn)
        assert teacher.asked == 8 * IMAGES

    def test_both_ways_give_the_same_network(self):
        """But for the answers, which the table rounds to float16."""
        teacher, start = Counting(), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        asked, told = copy.deepcopy(start), copy.deepcopy(start)
        fit(asked, DATA.train_batches(103), TAUGHT, loss_fn=distillation(teacher, temperature=2.0, weight=0.7))
        batches, loss_fn = batches_and_loss(DATA, TAUGHT, teacher)
        fit(told, batches, TAUGHT, loss_fn=loss_fn)
        moved = float((asked[1].weight - start[1].weight).detach().norm())
        apart = float((asked[1].weight - told[1].weight).detach().norm())
        assert 0 < apart < 1e-3 * moved

    def test_smoothing_and_temperature_are_passed_on(self):
        teacher, model = Counting(), Counting(10)
        settings = TrainSettings(epochs=9, batch=103, distill=0.6, temperature=3.0, label_smoothing=0.2)
        options = {"temperature": 3.0, "weight": 0.6, "label_smoothing": 0.2}
        batches, loss_fn = batches_and_loss(DATA, settings, teacher)
        batch = next(iter(batches))
        nn.init.zeros_(model[1].weight)
        wanted = distillation(teacher, **options)(model, batch[:2])
        torch.testing.assert_close(loss_fn(model, batch), wanted, rtol=1e-3, atol=1e-4)
        live = batches_and_loss(DATA, TrainSettings(**{**settings.as_dict(), "epochs": 3}), teacher)[1]
        assert torch.equal(live(model, batch[:2]), wanted)

    def test_none_given(self):
        with pytest.raises(TrainingError, match="distillation needs a teacher, the network before pruning"):
            batches_and_loss(DATA, TAUGHT)

    @pytest.mark.parametrize("epochs", [1, 9])
    def test_of_other_classes(self, epochs):
        settings = TrainSettings(epochs=epochs, batch=103, distill=0.7)
        batches, loss_fn = batches_and_loss(DATA, settings, Counting(7))
        with pytest.raises(TrainingError, match="the teacher knows 7 classes and the network 10"):
            fit(Counting(), batches, settings, loss_fn=loss_fn)
