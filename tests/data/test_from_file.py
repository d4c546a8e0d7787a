"""Data from a user's file."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ifso.data import open_data
from ifso.errors import DataError
from ifso.tasks.classification import cross_entropy

FILE = """
import torch
from torch.utils.data import DataLoader, TensorDataset

class Made:
    def __init__(self, **parts):
        self.__dict__.update(parts)

BATCH = torch.ones(2, 3, 4, 4), torch.tensor([0, 1])

def whole():
    return Made(
        train_batches=[BATCH, BATCH], test_batches=[BATCH], validation_batches=[BATCH], num_classes=2,
        input_shape=[3, 4, 4], loss_fn=lambda model, batch: model(batch[0]).mean(),
    )

def bare():
    return Made(train_batches=DataLoader(TensorDataset(*BATCH), batch_size=1, shuffle=True))

class Counting:
    epochs = []
    def set_epoch(self, epoch):
        self.epochs.append(epoch)
    def __iter__(self):
        return iter([BATCH])

def counting():
    return Made(train_batches=Counting())

def nested():
    return Made(train_batches=[{"images": [torch.zeros(1, 2)], "ids": "a"}], input_shape=(2,))

def nothing():
    return Made(test_batches=[])

def none():
    return None

def generator():
    return Made(train_batches=(BATCH for _ in range(2)))

def tensor():
    return Made(train_batches=torch.zeros(3))

def number():
    return Made(train_batches=3)

def empty():
    return Made(train_batches=[])

def nan():
    return Made(train_batches=[(torch.full((2, 3), float("nan")), torch.zeros(2))])

def words():
    return Made(train_batches=["a batch"])

def hollow():
    return Made(train_batches=[(torch.zeros(0, 3), torch.zeros(0))])

def classes():
    return Made(train_batches=[BATCH], num_classes=0)

def shape():
    return Made(train_batches=[BATCH], input_shape=3)

def loss():
    return Made(train_batches=[BATCH], loss_fn="mean")

def ranked(rank, *, ranks, size=1):
    return Made(train_batches=[(torch.full((size, 1), rank), torch.full((size,), ranks))])

def ranks_only(ranks=1):
    return Made(train_batches=[(torch.full((1, 1), ranks), torch.zeros(1))])

def fails():
    raise OSError("no disk")
"""


@pytest.fixture
def named(tmp_path):
    (tmp_path / "data.py").write_text(FILE)
    return lambda factory: f"{tmp_path / 'data.py'}:{factory}"


def test_everything_a_file_can_say(named):
    data = open_data(named("whole"))
    assert (data.name, data.num_classes, data.input_shape) == (named("whole"), 2, (3, 4, 4))
    assert data.loss_fn(nn.Identity(), next(iter(data.train_batches()))) == 1
    assert (len(data.train_batches()), len(data.test_batches()), len(data.validation_batches())) == (2, 1, 1)
    assert data.example_inputs().shape == (1, 3, 4, 4)


def test_training_batches_alone_will_do(named):
    data = open_data(named("bare"))
    batches = data.train_batches()
    assert sorted(int(y) for _, y in batches) == [0, 1]
    assert sorted(int(y) for _, y in batches) == [0, 1]
    assert (data.num_classes, data.input_shape) == (None, None)
    assert data.loss_fn is cross_entropy
    assert data.example_inputs().shape == (1, 3, 4, 4)
    for part in ("test_batches", "validation_batches"):
        with pytest.raises(DataError, match=f"has no {part}"):
            getattr(data, part)()


def test_the_number_of_the_epoch_is_passed_on(named):
    batches = open_data(named("counting")).train_batches()
    batches.set_epoch(3)
    assert batches.loader.epochs == [3]
    loader = open_data(named("bare")).train_batches()
    loader.set_epoch(1)


def test_the_sampler_of_a_loader_is_told_the_epoch(tmp_path):
    from ifso.data.from_file import DeviceBatches

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch):
            self.told = epoch

    dataset = TensorDataset(torch.zeros(2, 1))
    sampler = Sampler(dataset)
    DeviceBatches(DataLoader(dataset, sampler=sampler), "cpu", "here").set_epoch(4)
    assert sampler.told == 4


def test_tensors_are_moved_wherever_they_are_in_a_batch(named):
    from ifso.data.from_file import DeviceBatches

    source = open_data(named("nested")).train_batches().loader
    (batch,) = DeviceBatches(source, "cpu", "here")
    assert (batch["images"][0].shape, batch["ids"]) == ((1, 2), "a")
    assert open_data(named("nested")).example_inputs().shape == (1, 2)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("nothing", "returned Made without train_batches"),
        ("none", "returned NoneType without train_batches"),
        ("generator", "train_batches is generator, which can be gone through only once"),
        ("tensor", "train_batches is Tensor; give an iterable of batches"),
        ("number", "train_batches is int; give an iterable"),
        ("classes", "num_classes is 0"),
        ("shape", "input_shape is 3"),
        ("loss", "loss_fn is str"),
        ("fails", "failed: OSError: no disk"),
        ("whol", "did you mean whole"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(named, factory, words):
    with pytest.raises(DataError) as caught:
        open_data(named(factory))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("empty", "train_batches is empty"),
        ("nan", "the first batch holds NaN"),
        ("words", "yields str without a tensor"),
        ("hollow", "the first batch is empty"),
    ],
)
def test_bad_batches_are_refused_when_they_come(named, factory, words):
    batches = open_data(named(factory)).train_batches()
    with pytest.raises(DataError, match=words):
        list(batches)


def test_factories_that_ask_are_told_the_rank(named):
    def first(factory, **ranks):
        return [int(part) for part in next(iter(open_data(named(factory), **ranks).train_batches()))]

    assert first("ranked") == [0, 1]
    assert first("ranked", rank=2, ranks=3) == [2, 3]
    assert first("ranks_only", rank=2, ranks=3) == [3, 0]
    assert len(open_data(named("whole"), rank=2, ranks=3).train_batches()) == 2


def test_missing_files_and_validation(named, tmp_path):
    with pytest.raises(DataError, match="no file"):
        open_data(f"{tmp_path}/none.py:make")
    with pytest.raises(DataError, match="let the file have validation_batches, and measure"):
        open_data(named("whole"), validation=0.1)
