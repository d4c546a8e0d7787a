"""Passes that go on where they ended see what whole passes see, and compute each layer once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, FEW, image, outputs, prunable_cases
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ifso.common.module_state import named_tensors
from ifso.pruning.fitted_layers import layers_of
from ifso.pruning.partial_passes import Asked, PartialPasses

ALL = 2**40


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack([out.float().square().mean() for out in outputs(model, batch)]).sum()


class Counted(TorchDispatchMode):
    """Counts convolutions and matrix products."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += any(sign in str(func) for sign in ("convolution", "aten.mm", "addmm", "bmm"))
        return func(*args, **(kwargs or {}))


def inputs_by_layer(
    model: nn.Module, batches: list[Any], room: int, loss: Callable[[nn.Module, Any], Tensor] = loss_of
) -> dict[str, list[Tensor]]:
    """What each layer reads, one layer after the other; weights are halved once a layer has been seen."""
    passes, tensors = PartialPasses(model, loss, lambda: batches, room), named_tensors(model)
    found: dict[str, list[Tensor]] = {}
    for name, layer in layers_of(model, loss, batches[0]).items():
        by_batch: dict[int, list[Tensor]] = {}

        def begin(number: int, seen: dict[int, list[Tensor]] = by_batch) -> Callable[..., None]:
            here = seen[number] = []
            return lambda _, call: here.append(call.x.clone())

        assert list(passes.over(Asked({name: tensors[name]}, layer.calls, name), begin)) == list(range(len(batches)))
        found[name] = [x for number in sorted(by_batch) for x in by_batch[number]]
        with torch.no_grad():
            tensors[name].mul_(0.5)
    return found


def both_ways(build: Callable[[], nn.Module], batches: list[Any], room: int = ALL, **loss: Any) -> tuple[int, int]:
    """How many products a pass anew for each layer takes, and how many the others, which must see the same."""
    counts, seen = [], []
    for bytes_ in (0, room):
        with Counted() as counted:
            seen.append(inputs_by_layer(build(), batches, bytes_, **loss))
        counts.append(counted.calls)
    assert seen[0].keys() == seen[1].keys()
    for name, xs in seen[0].items():
        assert len(xs) == len(seen[1][name])
        assert all(map(torch.equal, xs, seen[1][name])), name
    return counts[0], counts[1]


def batches_of(make: Callable[[], Any], number: int) -> list[Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return [make() for _ in range(number)]


@prunable_cases(few=FEW)
def test_layers_read_what_they_read_in_passes_that_begin_anew(case):
    both_ways(case.model, batches_of(case.make_inputs, 3))


@pytest.mark.parametrize("name", ["residual", "unet", "vit", "fpn"])
def test_each_layer_is_computed_about_once(name):
    case = CASES[name]
    anew, further = both_ways(case.model, batches_of(case.make_inputs, 6))
    with Counted() as whole:
        for batch in batches_of(case.make_inputs, 6):
            loss_of(case.model(), batch)
    assert further <= 1.5 * whole.calls + 20
    assert further < 0.7 * anew


class Net(nn.Module):
    """Three convolutions, with something between them that a test gives."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
        self.register_buffer("seen", torch.zeros(()))
        self.kept = torch.ones(())
        self.runs = 0
        self.between = between
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        for conv in self.convs:
            x = self.between(self, conv(x) + x)
        return x


def drawn(_: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, training=True)


def written_into(_: nn.Module, x: Tensor) -> Tensor:
    return x.mul_(0.9)


def by_its_value(_: nn.Module, x: Tensor) -> Tensor:
    return x / (1 + float(x.abs().mean()))


def with_grad(_: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x * 2


def counted_in_a_buffer(net: Any, x: Tensor) -> Tensor:
    net.seen += 1
    return x * net.seen


def through_numpy(_: nn.Module, x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


def either_way(_: nn.Module, x: Tensor) -> Tensor:
    return F.relu(x) if float(x.mean()) > 0 else -x


def other_each_time(net: Any, x: Tensor) -> Tensor:
    return x if net.runs % 2 else x.abs()


def from_before(net: Any, x: Tensor) -> Tensor:
    net.kept, before = x.mean(), net.kept
    return x + 0 * before


@pytest.mark.parametrize("between", [drawn, written_into, by_its_value, with_grad])
def test_a_pass_goes_on_with_what_networks_do_between_layers(between):
    anew, further = both_ways(lambda: Net(between), batches_of(image(2, 3, 6, 6), 4))
    assert further < 0.8 * anew


@pytest.mark.parametrize("between", [counted_in_a_buffer, through_numpy, from_before])
def test_a_pass_begins_anew_where_it_could_be_another_one(between):
    anew, further = both_ways(lambda: Net(between), batches_of(image(2, 3, 6, 6), 4))
    assert further >= anew


def test_batches_may_go_different_ways():
    anew, further = both_ways(lambda: Net(either_way), batches_of(image(2, 3, 6, 6), 4))
    assert further < anew


def test_a_network_that_goes_another_way_each_time_begins_anew():
    net, batches = Net(other_each_time), batches_of(image(2, 3, 6, 6), 2)
    found = inputs_by_layer(net, batches, ALL)
    assert all(not bool(x.isnan().any()) for xs in found.values() for x in xs)
    assert [len(xs) for xs in found.values()] == [2, 2, 2, 2]


def test_an_error_of_the_network_comes_out():
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if model.runs > 6:
            raise RuntimeError("broken")
        return loss_of(model, batch)

    with pytest.raises(RuntimeError, match="broken"):
        inputs_by_layer(Net(written_into), batches_of(image(2, 3, 6, 6), 2), ALL, loss)


def test_memory_that_runs_out_is_given_back():
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if passes._places:
            raise RuntimeError("out of memory")
        return loss_of(model, batch)

    batches, model = batches_of(image(2, 3, 6, 6), 3), Net(written_into)
    passes = PartialPasses(model, loss, lambda: batches, ALL)
    for number in range(4):
        name = f"convs.{number}.weight"
        asked = Asked({name: model.get_parameter(name)}, 1, name)
        assert list(passes.over(asked, lambda _: lambda *_: None)) == [0, 1, 2]


def test_what_is_held_stays_within_the_room():
    class Wide(nn.Module):
        """Its second layer reads far more than the first and the third."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            sizes = [(3, 4), (4, 64), (64, 4), (4, 4)]
            self.convs = nn.ModuleList(nn.Conv2d(*size, 3, padding=1) for size in sizes).double()

        def forward(self, x: Tensor) -> Tensor:
            for conv in self.convs:
                x = F.relu(conv(x))
            return x

    batches, held = batches_of(image(2, 3, 6, 6), 3), []
    room = 3 * 2 * 4 * 36 * 8 + 3 * 40 * 4  # the input of a narrow layer for each batch, and a little
    model = Wide()
    passes = PartialPasses(model, loss_of, lambda: batches, room)
    with Counted() as counted:
        for name in [f"convs.{number}.weight" for number in range(4)]:
            asked = Asked({name: model.get_parameter(name)}, 1, name)
            assert len(list(passes.over(asked, lambda _: lambda *_: None))) == 3
            tensors = [tensor for place in passes._places.values() for tensor in place.held.values()]
            held.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
    assert held == [0, *[3 * 2 * 4 * 36 * 8] * 3]
    assert counted.calls == 4 + 3 * (0 + 1 + 1 + 2)  # the whole pass that comes first, and what each layer asks for
