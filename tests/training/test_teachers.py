"""A table of a teacher's answers against asking it about every variant of every image."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ifso.data import open_data
from ifso.data.batches import Augmentation, TrainBatches
from ifso.errors import TrainingError
from ifso.models import create_model
from ifso.training import distillation as module
from ifso.training.distillation import BatchesWithLogits, TeacherCache, cache_pays_off, variants_per_image

COUNT = 40


def teacher():
    torch.manual_seed(0)
    return create_model("ifso:resnet8-digits")


def batches(augmentation, size=16, drop_last=True):
    images = open_data("digits").train.part(slice(0, COUNT))
    return TrainBatches(images, batch_size=size, augmentation=augmentation, drop_last=drop_last, seed=3)


def moved(pixels, row, column, mirrored, shift):
    """The window of the padded image, cut out; then mirrored."""
    side = pixels.shape[-1]
    window = F.pad(pixels, (shift,) * 4)[:, :, row : row + side, column : column + side]
    return window.flip(3) if mirrored else window


@pytest.mark.parametrize("mirror", [False, True])
def test_the_table_holds_every_answer(mirror, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 17)
    net, taught = teacher().train(), batches(Augmentation(shift=1, mirror=mirror))
    answers = TeacherCache.of(net, taught)
    assert net.training
    places, images, seen = torch.arange(COUNT), taught.images, []
    for row in range(3):
        for column in range(3):
            for mirrored in range(1 + mirror):
                with torch.no_grad():
                    wanted = net.eval()(images.normalized(moved(images.pixels, row, column, mirrored, 1)))
                found = answers(places, torch.tensor([[row, column, mirrored]]).expand(COUNT, 3))
                assert found.dtype == torch.float16
                torch.testing.assert_close(found.float(), wanted, rtol=1e-3, atol=1e-3)
                seen.append(wanted)
    assert len(seen) == variants_per_image(taught) == (18 if mirror else 9)
    apart = torch.pdist(torch.stack(seen).flatten(1))
    assert apart.min() > 0.1


def test_without_augmentation():
    net, plain = teacher(), batches(None)
    order = torch.tensor([5, 0, 39])
    found = TeacherCache.of(net, plain)(order, None)
    with torch.no_grad():
        wanted = net.eval()(plain.images.normalized(plain.images.pixels[order]))
    torch.testing.assert_close(found.float(), wanted, rtol=1e-3, atol=1e-3)
    assert variants_per_image(plain) == 1


@pytest.mark.parametrize("augmentation", [None, Augmentation(shift=1, mirror=True)])
@pytest.mark.parametrize("drop_last", [True, False])
def test_taught_batches_are_the_training_batches_with_answers(augmentation, drop_last):
    net = teacher().eval()
    plain, held = batches(augmentation, drop_last=drop_last), batches(augmentation, drop_last=drop_last)
    taught = BatchesWithLogits(held, TeacherCache.of(net, held))
    assert len(taught) == len(plain) == (2 if drop_last else 3)
    assert taught.drop_last is drop_last
    for _ in range(2):
        compare(net, taught, plain)
    for each in (taught, plain):
        each.set_epoch(7)
    compare(net, taught, plain)
    for found, wanted in zip(taught.plan(7), plain.plan(7), strict=True):
        assert found is wanted is None or torch.equal(found, wanted)


def compare(net, taught, plain):
    for (images, labels, answers), (wanted, truth) in zip(taught, plain, strict=True):
        assert torch.equal(images, wanted)
        assert torch.equal(labels, truth)
        with torch.no_grad():
            torch.testing.assert_close(answers.float(), net(wanted), rtol=1e-3, atol=1e-3)


class TestPays:
    def test_when_there_are_more_epochs_than_variants(self):
        taught = batches(Augmentation(shift=1, mirror=True))
        assert [cache_pays_off(taught, epochs, 10) for epochs in (17, 18)] == [False, True]
        assert cache_pays_off(batches(None), 1, 10)

    def test_only_where_variants_are_known(self):
        assert variants_per_image(list(batches(None))) is None
        assert not cache_pays_off(list(batches(None)), 10**6, 10)

    def test_only_where_there_is_room(self, monkeypatch):
        taught = batches(Augmentation(shift=1, mirror=False))
        size = 2 * COUNT * 9 * 10
        for free, wanted in ((size, True), (size - 1, False)):
            monkeypatch.setattr(module, "SHARE", free / (4 * 2**30))
            assert cache_pays_off(taught, 100, 10) is wanted


def test_a_teacher_that_gives_no_logits():
    taught = batches(None)
    for net, message in (
        (nn.Identity(), r"the teacher returns \(40, 1, 8, 8\); distillation takes logits"),
        (nn.Sequential(nn.Flatten(), nn.RNN(64, 4)), "the teacher returns tuple"),
    ):
        with pytest.raises(TrainingError, match=message):
            TeacherCache.of(net, taught)
