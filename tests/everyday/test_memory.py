"""Memory of trace and score is bounded as docs/everyday.md states."""

import mmap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ifso
from ifso.bench.trace_worker import peak_growth
from ifso.common.timing import peak_bytes

MIB = 2**20
TRACE = 96 * MIB
"""What the process may grow by a trace, whatever the model and its inputs take."""

CONVOLUTIONS, TRANSFORMER = 3.0, 7.0
"""Tensors of a score, as multiples of a gradient's."""


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def conv_net(width=32):
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Transformer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in "ab")
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        return self.head(self.blocks(self.embed(images).flatten(2).mT).mean(1))


def batches(count, size=16, of=8):
    return [(torch.randn(of, 3, size, size), torch.randint(0, 10, (of,))) for _ in range(count)]


def touched(size):
    """Bytes of memory that are really used, and given back."""
    with mmap.mmap(-1, size) as memory:
        memory.write(b"x" * size)


@pytest.fixture
def peaks_can_be_read():
    if peak_growth(lambda: touched(200 * MIB))[0] < 150 * MIB:
        pytest.skip("the peak of a process's memory cannot be set back here (/proc/self/clear_refs)")


def test_a_trace_takes_no_memory_for_activations_or_weights(peaks_can_be_read):
    """A forward pass of this network takes 2 GiB and its weights would be doubled by a copy."""
    model = nn.Sequential(
        conv_net(64)[:-2], nn.Flatten(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 20_000)
    ).eval()
    images = torch.zeros(1, 3, 1, 1).expand(1, 3, 2048, 2048)
    ifso.trace(model, torch.zeros(1, 3, 8, 8))
    growth, graph = peak_growth(lambda: ifso.trace(model, images))
    assert graph.num_units == 5 * 64 - 64 + 2048
    assert growth < TRACE


@pytest.mark.parametrize(
    ("build", "bound"), [(conv_net, CONVOLUTIONS), (Transformer, TRANSFORMER)], ids=["convolutions", "transformer"]
)
def test_a_score_takes_a_few_gradients(build, bound):
    model, (batch,) = build(), batches(1)
    graph = ifso.trace(model.eval(), batch[0][:1])
    score = peak_bytes(lambda: ifso.score(model, graph, loss_fn, [batch]), torch.device("cpu"))
    gradient = peak_bytes(
        lambda: torch.autograd.grad(loss_fn(model, batch), list(model.parameters())), torch.device("cpu")
    )
    assert 1 < score / gradient < bound


def test_more_batches_take_no_more_memory():
    model, cpu = conv_net().eval(), torch.device("cpu")
    graph = ifso.trace(model, torch.zeros(1, 3, 16, 16))
    data = batches(6)
    one = peak_bytes(lambda: ifso.score(model, graph, loss_fn, data[:1]), cpu)
    six = peak_bytes(lambda: ifso.score(model, graph, loss_fn, data), cpu)
    assert six < 1.05 * one


def test_micro_batches_take_less_memory():
    model, cpu, data = conv_net().eval(), torch.device("cpu"), batches(1, of=16)
    graph = ifso.trace(model, torch.zeros(1, 3, 16, 16))
    whole = peak_bytes(lambda: ifso.score(model, graph, loss_fn, data), cpu)
    parts = peak_bytes(lambda: ifso.score(model, graph, loss_fn, data, micro_batch=2), cpu)
    assert parts < whole / 3
