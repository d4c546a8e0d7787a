"""The digits that come with the package."""

import hashlib
from pathlib import Path

import torch

import ifso.data
from ifso.data.digits import TEST_EVERY, digits

SHA256 = "4e1325d038813314ead2a30970b4ad8eed6ef36a845f57a2129b3ece33899fd1"


def test_shapes_types_and_range():
    data = digits()
    assert data.x_train.shape == (1442, 1, 8, 8)
    assert data.x_test.shape == (355, 1, 8, 8)
    assert (data.y_train.shape, data.y_test.shape) == ((1442,), (355,))
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert (x.min(), x.max()) == (0, 1)
        assert torch.equal((x * 16).round(), x * 16)
        assert y.unique().tolist() == list(range(10))


def test_split_is_stratified_and_disjoint():
    data = digits()
    train, test = data.y_train.bincount(), data.y_test.bincount()
    assert (train + test).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(test, (train + test) // TEST_EVERY)
    images = torch.cat([data.x_train, data.x_test]).flatten(1)
    assert len(images.unique(dim=0)) == len(images) == 1797


def test_contents_never_change():
    digest = hashlib.sha256()
    for tensor in digits():
        digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest() == SHA256


def test_each_call_gives_tensors_of_its_own():
    digits().x_train.zero_()
    assert digits().x_train.sum() > 0


def test_a_linear_classifier_learns_them():
    data = digits()
    design, targets = data.x_train.flatten(1).double(), torch.nn.functional.one_hot(data.y_train).double()
    gram = design.T @ design + torch.eye(64, dtype=torch.float64)
    guess = (data.x_test.flatten(1).double() @ torch.linalg.solve(gram, design.T @ targets)).argmax(1)
    assert (guess == data.y_test).double().mean() > 0.9


def test_attribution_lies_beside_the_data():
    notice = Path(ifso.data.__file__).with_name("LICENSE-digits.txt").read_text()
    assert "CC BY 4.0" in notice
    assert "Alpaydin" in notice
