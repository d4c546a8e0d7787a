"""Where data meets a network: what does not fit is said in one line, and nothing is left changed."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from ifso.data import open_data
from ifso.data.base import Data
from ifso.data.compatibility import check_fits
from ifso.errors import DataError
from ifso.models import create_model


class Made(Data):
    """One batch of a user's own."""

    name, num_classes, input_shape = "mine", None, None

    def __init__(self, batch, **changes):
        self.batch = batch
        self.__dict__.update(changes)

    def train_batches(self, batch_size=128, augment=True, drop_last=True):
        return [self.batch]

    def validation_batches(self, batch_size=500):
        raise AssertionError

    def test_batches(self, batch_size=500):
        raise AssertionError

    def example_inputs(self):
        raise AssertionError


def network(outputs=4, features=6):
    return nn.Sequential(nn.Flatten(), nn.Linear(features, outputs))


def refused(model, data):
    with pytest.raises(DataError) as caught:
        check_fits(model, data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def labelled(*labels):
    return Made((torch.zeros(len(labels), 6), torch.tensor(labels)))


def test_what_fits():
    check_fits(network(10, 64), open_data("digits"))
    check_fits(network(1000, 64), open_data("digits"))
    check_fits(create_model("ifso:resnet20"), Made((torch.zeros(3, 3, 32, 32), torch.arange(3)), num_classes=10))
    check_fits(network(), labelled(0, 3, -100))
    check_fits(network(), labelled(-100))
    check_fits(network(), Made((torch.zeros(2, 6), torch.full((2, 4), 0.25))))
    check_fits(nn.Conv2d(3, 5, 1), Made((torch.zeros(2, 3, 4, 4), torch.full((2, 4, 4), 4))))


def test_images_of_another_size_or_colour():
    message = refused(create_model("ifso:resnet20"), open_data("digits"))
    assert message.startswith("images 1×8×8 of digits do not fit the network (RuntimeError:")
    assert "give images of the size" in message
    assert "images 7 of mine do not fit" in refused(network(), Made((torch.zeros(2, 7), torch.zeros(2).long())))


def test_too_few_outputs():
    assert refused(network(9, 64), open_data("digits")).startswith("digits has 10 classes, but the network 9 outputs")
    wrong = "mine: label 4 is outside the 4 outputs of the network; give labels from 0 to 3"
    assert wrong in refused(network(), labelled(0, 1, 2, 4))
    assert "label -1 is outside" in refused(network(), labelled(0, -1))


def test_labels_and_batches_that_are_none():
    assert "labels are torch.float32 of shape (2,); give whole numbers from 0 to 3" in refused(
        network(), labelled(0.0, 1.0)
    )
    images = torch.zeros(2, 6)
    assert "shape (2, 3)" in refused(network(), Made((images, torch.ones(2, 3))))
    assert "a batch is dict, not two tensors (images, labels)" in refused(network(), Made({"x": images}))
    assert "2 images and 3 labels" in refused(network(), Made((images, torch.zeros(3).long())))


def test_networks_that_give_no_logits():
    assert "the network gave (12,) for 2 images" in refused(nn.Flatten(0), labelled(0, 1))
    assert "the network gave tuple for 2 images" in refused(nn.LSTM(6, 4), labelled(0, 1))


def test_a_loss_of_its_own_is_not_tried():
    check_fits(network(), Made({"anything": 1}, loss_fn=lambda model, batch: model(batch)))


class Counting(nn.Module):
    """Draws random numbers, counts its calls, and remembers in which modes it was."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout())
        self.register_buffer("calls", torch.zeros(()))
        self.modes = []

    def forward(self, x):
        self.calls += 1
        self.modes.append(self.training)
        return self.layers(x) + torch.rand(4)


class Drawing(Made):
    """Draws from every global source of random numbers."""

    def train_batches(self, *_, **__):
        random.random(), np.random.random(), torch.rand(1)  # noqa: NPY002
        return [self.batch]


def test_everything_is_left_as_it_was():
    model = Counting().train()
    model.layers[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    check_fits(model, Drawing((torch.zeros(3, 6), torch.tensor([0, 1, 2]))))
    assert model.modes == [False]
    assert [module.training for module in model.modules()] == [True, True, True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert random.getstate() == states[2]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_modes_come_back_after_a_failure_too():
    model = network().train()
    refused(model, Made((torch.zeros(2, 7), torch.zeros(2).long())))
    assert all(module.training for module in model.modules())
