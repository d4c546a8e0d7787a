"""The loss of a detector: what is added up, in which mode, and what is refused."""

from __future__ import annotations

import pytest
import torch
from mini import MiniRetina, scene
from torch import nn

from ifso.errors import ScoreError
from ifso.tasks.detection import detection_loss, detection_losses, loss_mode


class Losses(nn.Module):
    """Returns what it was made with, and notes the modes of its parts."""

    def __init__(self, found):
        super().__init__()
        self.found = found
        self.norm, self.drop, self.group, self.inner = nn.BatchNorm2d(2), nn.Dropout(), nn.GroupNorm(1, 2), nn.ReLU()

    def forward(self, images, targets):
        self.modes = {name: module.training for name, module in self.named_modules()}
        return self.found


BATCH = ([torch.zeros(3, 2, 2)], [{}])


def test_losses_are_added_up_lists_too():
    model = Losses({"a": torch.tensor(1.0), "b": [torch.tensor(2.0), torch.tensor([3.0])]})
    assert float(detection_loss(model, BATCH)) == 6
    assert {name: float(loss) for name, loss in detection_losses(model, BATCH).items()} == {"a": 1, "b": 5}


def test_half_precision_is_added_up_in_float32():
    model = Losses({"a": torch.tensor(2049.0).bfloat16(), "b": torch.tensor(1.0).bfloat16()})
    assert detection_loss(model, BATCH).dtype == torch.float32


def test_statistics_and_chance_stay_in_the_models_mode():
    model = Losses({"a": torch.tensor(1.0)}).eval()
    detection_loss(model, BATCH)
    assert model.modes == {"": True, "norm": False, "drop": False, "group": True, "inner": True}
    assert not any(module.training for module in model.modules())
    detection_loss(model.train(), BATCH)
    assert all(model.modes.values())


def test_the_loss_of_eval_mode_takes_running_statistics():
    model, batch = MiniRetina(), scene()
    with torch.no_grad():
        trained = float(detection_loss(model.train(), batch))
        model.deep[1].running_mean += 0.3
        running = float(detection_loss(model.eval(), batch))
        model.deep[1].running_mean += 0.3
        assert float(detection_loss(model.train(), batch)) == pytest.approx(trained)
        assert float(detection_loss(model.eval(), batch)) != pytest.approx(running, rel=1e-3)


def test_modes_come_back_after_an_error():
    model = Losses("no dict").eval()
    with pytest.raises(ScoreError):
        detection_loss(model, BATCH)
    with loss_mode(model):
        assert model.training
    assert not any(module.training for module in model.modules())


def test_images_without_boxes_have_a_loss():
    images, targets = scene(counts=(0, 0))
    loss = detection_loss(MiniRetina(), (images, targets))
    loss.backward()
    assert bool(loss.isfinite())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([1, 2], "Losses returned list for"),
        ({}, "Losses returned an empty dict for"),
        (torch.ones(3), r"returned a torch.float32 tensor of shape \(3,\)"),
        ({"boxes": torch.ones(2)}, r"the loss 'boxes' .* got a torch.float32 tensor of shape \(2,\)"),
        ({"boxes": torch.tensor(1)}, "the loss 'boxes' .* got a torch.int64 tensor"),
        ({"boxes": 1.0}, "the loss 'boxes' .* got float"),
        ({"boxes": []}, "the loss 'boxes' .* got an empty list"),
    ],
)
def test_what_is_no_loss_is_refused(found, message):
    with pytest.raises(ScoreError, match=message):
        detection_loss(Losses(found), BATCH)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(2, 3, 4, 4), "must be .*, got Tensor"),
        ((1, 2, 3), "got tuple of 3"),
        (([torch.zeros(3, 2, 2)], []), "1 images and targets for 0"),
    ],
)
def test_batches_that_are_none(batch, message):
    with pytest.raises(ScoreError, match=message):
        detection_loss(MiniRetina(), batch)
