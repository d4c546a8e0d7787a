"""What random networks brought to light, each in the smallest network that shows it."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import difference, outputs
from torch import Tensor, nn

import ifso
from ifso.costs.cost import recount
from ifso.errors import CompactionError

EXACT = 1e-10


class Between(nn.Module):
    """Two convolutions with a function between them."""

    def __init__(self, function, channels: int = 8, left: int = 8):
        super().__init__()
        self.first, self.function, self.last = nn.Conv2d(3, channels, 1), function, nn.Conv2d(left, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def images() -> Tensor:
    return torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def assert_exact(model: nn.Module, graph: ifso.ChannelGraph, keep: dict[str, Tensor], inputs: Tensor) -> None:
    with ifso.masked(model, graph, keep):
        soft = outputs(model, inputs)
    ifso.compact_(model, graph, keep)
    assert difference(soft, outputs(model, inputs)) <= EXACT


@pytest.mark.parametrize(
    "function",
    [lambda x: x.roll(1, 1), lambda x: x.unfold(1, 2, 2).amax(-1).repeat(1, 2, 1, 1)],
    ids=["roll", "unfold"],
)
def test_channels_whose_order_matters_stay(function):
    """The operator ran on the ids; with a channel gone it moved others."""
    graph = ifso.trace(Between(function).double(), images())
    assert graph.groups == ()
    assert any("its order matters" in item.reason for item in graph.frozen)


@pytest.mark.parametrize("start", [0, 1])
def test_channels_picked_in_steps_go_together(start):
    model, inputs = Between(lambda x: x[:, start::2], 4, 2).double(), images()
    graph = ifso.trace(model, inputs)
    assert [(group.size, group.members[0].index) for group in graph.groups] == [(2, ((0, 1), (2, 3)))]
    assert_exact(model, graph, {graph.groups[0].name: torch.tensor([False, True])}, inputs)


@pytest.mark.parametrize(
    "function",
    [lambda x: x * x.shape[1] ** -0.5, lambda x: x - x.sum(1, keepdim=True) / x.shape[1], lambda x: x + x.shape[1]],
    ids=["scale", "mean by hand", "sum"],
)
def test_channels_whose_number_is_computed_with_stay(function):
    """No mask can change the number, so the compacted network computed something else."""
    graph = ifso.trace(Between(function).double(), images())
    assert graph.groups == ()
    assert any("computes with how many there are" in item.reason for item in graph.frozen)


class Parts(nn.Module):
    """Two parts of equal size, kept as a list."""

    def __init__(self):
        super().__init__()
        self.sizes = [2, 2]
        self.first, self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(2, 5, 1), nn.Conv2d(2, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).split(self.sizes, 1)
        return self.a(a) + self.b(b)


def test_equal_entries_of_a_list_of_sizes_follow_their_own_part():
    """Both were set to the size of the first part."""
    model, inputs = Parts().double(), images()
    graph = ifso.trace(model, inputs)
    assert len(graph.groups) == 2
    assert_exact(model, graph, {graph.groups[1].name: torch.tensor([False, True])}, inputs)
    assert model.sizes == [2, 1]


class OneHead(nn.Module):
    """PyTorch's attention layer with a single head, whose channels can go one by one."""

    def __init__(self, need_weights: bool, kdim: int | None = None):
        super().__init__()
        self.need_weights = need_weights
        self.embed, self.attn, self.last = nn.Linear(3, 4), nn.MultiheadAttention(4, 1), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.last(x + self.attn(x, x, x, need_weights=self.need_weights)[0])


@pytest.mark.parametrize("width", [2, 4], ids=["slim", "plain"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_single_channels_of_an_attention_layer(need_weights, width):
    """The layer divides by the root of its head size, which masking left as it was; and ``head_dim`` stayed the old."""
    model = OneHead(need_weights).double().eval()
    inputs = torch.randn(7, 2, 3, dtype=torch.float64)
    graph = ifso.trace(model, inputs)
    keep = {group.name: torch.arange(4) < (width if group.name == "embed" else 2) for group in graph.groups}
    assert [group.flags for group in graph.groups if group.name == "attn"] == [{"attention scale"}]
    assert_exact(model, graph, keep, inputs)
    assert model.attn.head_dim == 2
    again = ifso.trace(model, inputs)
    assert_exact(model, again, {name.name: torch.arange(name.size) < 1 for name in again.groups}, inputs)


class Ranks(nn.Module):
    """One module that multiplies matrices of two and of three dims; it looks at a value, so it is traced on values."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(6, 5))
        self.middle = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * 2 if x.sum().item() > 1e9 else x) @ self.first
        return torch.bmm(x, self.middle.expand(x.shape[0], -1, -1)) @ self.last


def test_recount_where_one_module_multiplies_matrices_of_several_ranks():
    """An IndexError once; now a line that says which layer costs more."""
    model = Ranks().double()
    graph = ifso.trace(model, torch.randn(2, 4, 3, dtype=torch.float64))
    keep = {group.name: torch.arange(group.size) < 4 for group in graph.groups}
    ifso.compact_(model, graph, keep)
    more_rows = ifso.trace(model, torch.randn(2, 5, 3, dtype=torch.float64))
    assert recount(graph, graph.kept(keep), more_rows) == []


def test_a_channel_alone_in_its_group_is_tried_too():
    """Code that skips the first channel was never run without it, so its removal was offered and then refused."""
    model, inputs = Between(lambda x: x[:, 1:], 6, 5).double(), images()
    graph = ifso.trace(model, inputs)
    for group in graph.groups:
        if group.size == 1:
            ifso.compact_(model, graph, {group.name: torch.tensor([False])})
    assert graph.groups == ()


class Standardised(nn.Module):
    """Every channel gets the same bias before a convolution whose filters are brought to mean zero."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1)
        self.place = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.last.weight
        return nn.functional.conv2d(self.first(x) + self.place, weight - weight.mean(1, keepdim=True), self.last.bias)


def test_weights_with_statistics_over_channels_that_are_not_zero():
    """Neither the removed channel nor the weight that read it was zero while masked."""
    model, inputs = Standardised().double(), images()
    graph = ifso.trace(model, inputs)
    assert_exact(model, graph, {"first": torch.tensor([True, False, True, True])}, inputs)


def test_a_shuffle_of_a_shuffle():
    """The second one's blocks became units; that their number did not follow shows in no shape."""
    shuffle = nn.ChannelShuffle(4)
    graph = ifso.trace(Between(lambda x: shuffle(shuffle(x))).double(), images())
    keep = ifso.balance(graph, {group.name: torch.arange(group.size) > 0 for group in graph.groups})
    assert_exact(Between(lambda x: shuffle(shuffle(x))).double(), graph, keep, images())


class HalvesByShape(nn.Module):
    """Halves by half of the number of channels there are."""

    def __init__(self):
        super().__init__()
        self.first, self.worked, self.last = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        half = x.shape[1] // 2
        return self.last(torch.cat([x[:, :half], self.worked(x[:, half:])], 1))


@pytest.mark.parametrize("kept", [(1, 3), (3, 1), (2, 3)])
def test_halves_of_unequal_size_are_never_offered(kept):
    """What the trials removed was equal on both sides by chance, so unequal halves were offered and then refused."""
    model, inputs = HalvesByShape().double(), images()
    graph = ifso.trace(model, inputs)
    keep = {name: torch.arange(3) < count for name, count in zip(("first", "first#2"), kept, strict=True)}
    keep = {group.name: keep.get(group.name, torch.ones(group.size) > 0) for group in graph.groups}
    assert_exact(model, graph, ifso.balance(graph, keep), inputs)


def test_an_empty_piece_in_a_concatenation():
    """The join could not be followed, and the layer after it was counted as nothing."""
    model = Between(lambda x: torch.cat([x[:, :0], x], 1), 4, 4).double()
    graph = ifso.trace(model, images())
    assert graph.notes == ()
    assert [group.size for group in graph.groups] == [4]
    assert ifso.cost(model, graph).macs == 2 * 4 * 4 * (3 * 4 + 4 * 5)


class Twice(nn.Module):
    """One norm used twice, on the channels in one order and in the other; each channel has a shift of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.norm(self.first(x)).flip(-1)))


def test_a_norm_that_meets_the_same_channels_in_two_orders():
    """The second use was masked as the first."""
    model, inputs = Twice().double(), torch.randn(2, 7, 3, dtype=torch.float64)
    graph = ifso.trace(model, inputs)
    assert_exact(model, graph, {"first": torch.tensor([True, False, True, True, True, False])}, inputs)


def test_a_remainder_of_the_number_of_channels():
    """Every rehearsal left an even number: the units are offered, and a removal that leaves an odd one is refused."""
    model = Between(lambda x: x + x.roll(x.shape[1] % 2, 2)).double()
    graph, before = ifso.trace(model, images()), outputs(model, images())
    for left in range(1, 8):
        keep = {group.name: torch.arange(group.size) < left for group in graph.groups}
        if left % 2:
            with pytest.raises(CompactionError, match="computes with a number that depends on how many channels"):
                ifso.compact_(model, graph, keep)
            assert difference(before, outputs(model, images())) == 0
        else:
            again = copy.deepcopy(model)
            assert_exact(again, ifso.trace(again, images()), keep, images())
