"""Generated images: always the same, in the shape of the real sets, and something can be learned from them."""

import pytest
import torch

from ifso.data.generated import CLASSES, SIDES, generated_images


@pytest.mark.parametrize("kind", CLASSES)
def test_shapes(kind):
    data = generated_images(kind)
    side = SIDES[kind]
    assert data.num_classes == CLASSES[kind]
    assert (data.x_train.shape, data.x_test.shape) == ((128, 3, side, side), (64, 3, side, side))
    assert data.x_train.dtype == torch.uint8
    assert 0 <= int(data.y_train.min()) < int(data.y_train.max()) < 10
    images, labels = next(iter(data.train_batches(16)))
    assert (images.shape, labels.shape) == ((16, 3, side, side), (16,))
    assert abs(float(images.mean())) < 1


def test_images_are_always_the_same_and_the_seed_orders_them():
    first, second, other = generated_images("cifar10"), generated_images("cifar10"), generated_images("cifar10", seed=1)
    for again in (second, other):
        assert torch.equal(first.x_train, again.x_train)
        assert torch.equal(first.y_test, again.y_test)
    orders = [data.train_batches(16).plan(0)[0] for data in (first, second, other)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert not torch.equal(first.x_train, generated_images("cifar100").x_train)


def test_the_class_shows():
    """The nearest mean of the training images knows the classes of the test images, which are others."""
    data = generated_images("cifar10")
    train, test = (pixels.double().flatten(1) for pixels in (data.x_train, data.x_test))
    classes = data.y_train.unique()
    means = torch.stack([train[data.y_train == label].mean(0) for label in classes])
    found = classes[torch.cdist(test, means).argmin(1)]
    assert (found == data.y_test).double().mean() > 0.95
    assert not any(bool((train == image).all(1).any()) for image in test)


def test_no_random_state_is_touched():
    before = torch.get_rng_state()
    generated_images("cifar10")
    assert torch.equal(before, torch.get_rng_state())
