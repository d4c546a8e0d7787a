"""Layers fitted, one after the other, to the outputs of the unpruned network, against plain least squares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, FEW, Case, image, outputs, prunable_cases, random_keep
from reference.least_squares import watched
from small_runs import SmallResNet, listed
from torch import Tensor, nn

import ifso
from ifso.common.batches import num_samples
from ifso.common.timing import LiveBytes, peak_bytes
from ifso.pruning import judging, reconstruction
from ifso.pruning.chunks import as_chunks, chunks_of
from ifso.pruning.fitted_layers import layers_of, outputs_left
from ifso.pruning.judging import Aim
from ifso.pruning.reconstruction import GRID, LEAST_GAIN, Room, reconstruct_, towards
from ifso.pruning.recovery import norms_of, recalibrate_


def square(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack([out.float().square().mean() for out in outputs(model, batch)]).sum()


def like(whole: nn.Module) -> Callable[[nn.Module, Any], Tensor]:
    """A loss that the network has least of as it is now."""
    wanted = copy.deepcopy(whole).eval()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            aims = outputs(wanted, batch)
        return torch.stack([F.mse_loss(*pair) for pair in zip(outputs(model, batch), aims, strict=True)]).sum()

    return loss


def pruned(model: nn.Module, graph: ifso.ChannelGraph, keep: dict[str, Tensor]) -> nn.Module:
    smaller = copy.deepcopy(model)
    ifso.compact_(smaller, graph, keep)
    return smaller


def batches_of(case: Case, number: int) -> list[Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return [case.make_inputs() for _ in range(number)]


def apart(model: nn.Module, teacher: nn.Module, batches: list[Any]) -> float:
    pairs = [zip(outputs(model, batch), outputs(teacher, batch), strict=True) for batch in batches]
    return sum(float((one - other).square().mean() / other.var()) for pair in pairs for one, other in pair)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def plain(x: Tensor, z: Tensor, weight: Tensor, lam: float) -> Tensor:
    """Rows of a ridge towards the old weights, solved as least squares; x and z are centred."""
    upper, lower = x / len(x) ** 0.5, torch.eye(x.shape[1], dtype=x.dtype) * lam**0.5
    right = torch.cat([z / len(z) ** 0.5, lam**0.5 * weight.t()])
    return torch.linalg.lstsq(torch.cat([upper, lower]), right, driver="gelsd").solution.t()


def chosen(x: list[Tensor], z: list[Tensor], weight: Tensor) -> Tensor:
    """By the error on the second half of what was fitted to the first one."""
    x, z = [part - part.mean(0) for part in x], [part - part.mean(0) for part in z]
    size = float(x[0].square().mean())
    tried = [weight, *(plain(x[0], z[0], weight, share * size) for share in GRID)]
    errors = [float((x[1] @ one.t() - z[1]).square().sum() / z[1].square().sum()) for one in tried]
    best = min(range(1, len(tried)), key=errors.__getitem__)
    return tried[best] if errors[best] < errors[0] - LEAST_GAIN else weight


@pytest.mark.parametrize(("rows", "noise"), [(400, 0.1), (40, 1.0), (12, 3.0)])
def test_a_layer_gets_the_ridge_that_does_best_on_samples_it_was_not_fitted_to(rows, noise):
    generator = torch.Generator().manual_seed(rows)
    x, true = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((rows, 9), (4, 9)))
    z = x @ true.t() + noise * torch.randn(rows, 4, dtype=torch.float64, generator=generator)
    weight = true + 0.3 * torch.randn(4, 9, dtype=torch.float64, generator=generator)
    halves = x.tensor_split([rows // 2]), z.tensor_split([rows // 2])
    joints = [torch.cat(pair, 1).t().cov(correction=0)[None] for pair in zip(*halves, strict=True)]
    found = towards(weight[None], *joints)
    assert found is not None
    torch.testing.assert_close(found[0], chosen(*halves, weight))


def test_a_layer_that_says_nothing_of_its_target_is_left_alone():
    x, z = torch.randn(500, 6, dtype=torch.float64), torch.randn(500, 2, dtype=torch.float64)
    joint = torch.cat([x, z], 1).t().cov()[None]
    assert towards(torch.randn(1, 2, 6, dtype=torch.float64), joint, joint) is None


class Chain(nn.Module):
    """A convolution with a batch norm behind it, one with a bias, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 6, 3, bias=False)
        self.norm, self.three, self.fc = nn.BatchNorm2d(6), nn.Conv2d(6, 5, 1), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.two(F.relu(self.one(x))))
        return self.fc(F.relu(self.three(F.relu(x))).mean((2, 3)))


CHAIN = Case("chain", Chain, image(24, 3, 8, 8))


def little(monkeypatch: pytest.MonkeyPatch, **room: int) -> None:
    """Let so many bytes be held, and of everything else as many as one likes."""
    given = Room(**{**dict.fromkeys(Room._fields, 2**40), **room})
    monkeypatch.setattr(reconstruction.Room, "of", lambda _: given)


def by_hand(small: nn.Module, whole: nn.Module, batches: list[Tensor]) -> None:
    """The layers of a chain, one after the other."""
    for name in ("one", "two", "three", "fc"):
        layers = small.get_submodule(name), whole.get_submodule(name)
        x, z = [], []
        for batch in batches:
            with torch.no_grad(), watched() as calls:
                small(batch), whole(batch)
            (mine,), (theirs,) = (calls.layers[id(layer.weight)] for layer in layers)
            conv = mine.kind == "conv2d"
            columns = F.unfold(mine.x, layers[0].kernel_size).transpose(1, 2).flatten(0, 1) if conv else mine.x
            x.append(columns)
            z.append(theirs.out.movedim(1, -1).flatten(0, -2)[:, KEPT[name]])
        halves = [[torch.cat(part[first::2]) for first in (0, 1)] for part in (x, z)]
        weight = chosen(*halves, layers[0].weight.detach().flatten(1))
        got, wanted = torch.cat(x) @ weight.t(), torch.cat(z)
        layers[0].weight.data = weight.view_as(layers[0].weight)
        if layers[0].bias is not None:
            layers[0].bias.data = (wanted - got).mean(0)
        if name == "two":
            theirs = whole.norm.running_mean[KEPT[name]], whole.norm.running_var[KEPT[name]]
            small.norm.running_mean = got.mean(0) - wanted.mean(0) + theirs[0]
            small.norm.running_var = theirs[1] * got.var(0) / wanted.var(0)


IN_ONE_PASS = ("plain", "residual", "depthwise", "grouped", "transposed", "conv1d", "vit", "real-residual")
SIZES = {"one": 8, "two": 6, "three": 5}
KEPT = {"one": [0, 2, 3, 6, 7], "two": [0, 1, 3, 5], "three": [1, 2, 4], "fc": [0, 1, 2, 3]}


def test_a_chain_is_fitted_as_by_hand(monkeypatch):
    monkeypatch.setattr(reconstruction, "POSITIONS", 10**9)
    whole, batches = CHAIN.model(), batches_of(CHAIN, 4)
    keep = {name: torch.isin(torch.arange(size), torch.tensor(KEPT[name])) for name, size in SIZES.items()}
    found, wanted = (pruned(whole, CHAIN.graph(), keep) for _ in range(2))
    before = apart(found.eval(), whole.eval(), batches[1::2])
    assert reconstruct_(found, whole, CHAIN.graph(), CHAIN.graph().kept(keep), square, lambda: batches)
    by_hand(wanted, whole, batches)
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[name], tensor, rtol=1e-6, atol=1e-8, msg=lambda text, n=name: n + text
        )
    assert apart(found, whole, batches[1::2]) < before


@prunable_cases(few=FEW)
def test_no_network_gets_further_from_the_unpruned_one_on_samples_that_are_held_out(case):
    whole, graph, keep = case.model(), case.graph(), random_keep(case.graph(), seed=2, share=0.3)
    small, batches = pruned(whole, graph, keep), batches_of(case, 4)
    teacher, modes = state(whole), [module.training for module in small.modules()]
    small.eval(), whole.eval()
    before, old = apart(small, whole, batches[1::2]), state(small)
    better = reconstruct_(small, whole, graph, graph.kept(keep), like(whole), lambda: batches)
    after = apart(small, whole, batches[1::2])
    assert after < before if better else all(torch.equal(old[name], tensor) for name, tensor in state(small).items())
    assert all(torch.equal(teacher[name], tensor) for name, tensor in state(whole).items())
    assert len(modes) == len([module.training for module in small.modules()])


@prunable_cases(few=FEW)
def test_outputs_are_those_that_are_left(case):
    whole, graph, keep = case.model(), case.graph(), random_keep(case.graph(), seed=2, share=0.3)
    small, batch, seen = pruned(whole, graph, keep), batches_of(case, 1)[0], 0
    layers = layers_of(whole, square, batch)
    here = layers_of(small, square, batch)
    for name in layers.keys() & here.keys():
        left = outputs_left(graph, graph.kept(keep), name, whole.get_parameter(name), layers[name])
        assert left is not None
        assert len(left) == here[name].outputs
        if layers[name].bias:
            torch.testing.assert_close(
                small.get_parameter(here[name].bias), whole.get_parameter(layers[name].bias)[left]
            )
            seen += 1
    assert seen or not any(layer.bias for layer in layers.values())


def test_a_change_that_does_harm_is_undone(monkeypatch):
    whole, keep, batches = CHAIN.model(), {"one": torch.arange(8) < 5}, batches_of(CHAIN, 4)
    small = pruned(whole, CHAIN.graph(), keep)
    old, kept = state(small), CHAIN.graph().kept(keep)
    monkeypatch.setattr(reconstruction, "towards", lambda weight, *_: -weight)
    assert not reconstruct_(small, whole, CHAIN.graph(), kept, square, lambda: batches)
    assert all(torch.equal(old[name], tensor) for name, tensor in state(small).items())


@pytest.mark.parametrize("unpruned", [0.0, 3.0])
def test_a_loss_that_rises_away_from_that_of_the_unpruned_network_undoes_it(unpruned):
    whole, batches = CHAIN.model(), batches_of(CHAIN, 4)
    keep = {name: torch.isin(torch.arange(size), torch.tensor(KEPT[name])) for name, size in SIZES.items()}
    small = pruned(whole, CHAIN.graph(), keep)
    old, kept = state(small), CHAIN.graph().kept(keep)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            same = model is small and all(torch.equal(old[name], tensor) for name, tensor in state(model).items())
        return outputs(model, batch)[0].sum() * 0 + (unpruned if model is not small else 1.0 if same else 2.0)

    assert reconstruct_(small, whole, CHAIN.graph(), kept, loss, lambda: batches) == (unpruned > 0)
    assert all(torch.equal(old[name], tensor) for name, tensor in state(small).items()) == (unpruned == 0)


def test_statistics_that_lag_behind_are_no_aim():
    whole, keep, batches = CHAIN.model(), {"one": torch.arange(8) < 5}, batches_of(CHAIN, 4)
    recalibrate_(whole, square, batches)
    found, kept = pruned(whole, CHAIN.graph(), keep), CHAIN.graph().kept(keep)
    wanted, lagging = copy.deepcopy(found), copy.deepcopy(whole)
    assert reconstruct_(wanted, whole, CHAIN.graph(), kept, like(whole), lambda: batches)
    for norm in norms_of(lagging):
        norm.running_mean += 1.0
    before = state(lagging)
    assert reconstruct_(found, lagging, CHAIN.graph(), kept, like(whole), lambda: batches)
    for name, tensor in wanted.state_dict().items():
        if "num_batches" not in name:
            torch.testing.assert_close(found.state_dict()[name], tensor, msg=lambda text, n=name: n + text)
    assert all(torch.equal(before[name], tensor) for name, tensor in state(lagging).items())


@pytest.mark.parametrize("what", ["one batch", "nothing but a loss", "as many outputs as are found"])
def test_without_samples_to_judge_by_nothing_is_changed(what):
    whole, keep, batches = CHAIN.model(), {"one": torch.arange(8) < 5}, batches_of(CHAIN, 4)
    small = pruned(whole, CHAIN.graph(), keep)
    old, loss = state(small), square
    if what == "one batch":
        batches = batches[:1]
    elif what == "as many outputs as are found":
        small.register_forward_hook(lambda *args: args[-1][:-1])
    else:
        small.forward, whole.forward = (lambda x, m=m: Chain.forward(m, x).sum() for m in (small, whole))
        loss = lambda model, batch: model(batch)  # noqa: E731
    assert not reconstruct_(small, whole, CHAIN.graph(), CHAIN.graph().kept(keep), loss, lambda: batches)
    assert all(torch.equal(old[name], tensor) for name, tensor in state(small).items())


def test_frozen_weights_stay_and_little_memory_changes_nothing(monkeypatch):
    whole, keep, batches = CHAIN.model(), {"one": torch.arange(8) < 5}, batches_of(CHAIN, 4)
    small = pruned(whole, CHAIN.graph(), keep)
    small.three.weight.requires_grad_(False)
    other, kept = copy.deepcopy(small), CHAIN.graph().kept(keep)
    assert reconstruct_(small, whole, CHAIN.graph(), kept, square, lambda: batches)
    assert torch.equal(small.three.weight, other.three.weight)
    assert not torch.equal(small.two.weight, other.two.weight)
    little(monkeypatch, targets=1)
    assert reconstruct_(other, whole, CHAIN.graph(), kept, square, lambda: batches)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in small.state_dict().items())


@pytest.mark.parametrize(("name", "as_one"), [("plain", True), ("vit", True), ("multihead-sequence-first", False)])
def test_batches_that_go_as_one_do_what_they_do_apart(name, as_one, monkeypatch):
    case = CASES[name]
    whole, graph, keep = case.model(), case.graph(), random_keep(case.graph(), seed=2, share=0.3)
    found, batches, sizes = pruned(whole, graph, keep), batches_of(case, 5), []
    wanted, kept = copy.deepcopy(found), graph.kept(keep)
    little(monkeypatch, live=0)
    better = reconstruct_(wanted, whole, graph, kept, square, lambda: batches)
    two = 2 * max(layer.reads for layer in layers_of(found, square, batches[0]).values())
    little(monkeypatch, live=4 * two)
    passes = reconstruction.PartialPasses
    monkeypatch.setattr(
        reconstruction, "PartialPasses",
        lambda *args: sizes.append([num_samples(batch) for batch in args[2]()]) or passes(*args),
    )  # fmt: skip
    assert reconstruct_(found, whole, graph, kept, square, lambda: batches) == better
    count = num_samples(batches[0])
    assert sizes[0] == ([2 * count, 2 * count, count] if as_one else [count] * 5)
    for key, tensor in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[key], tensor, rtol=1e-6, atol=1e-8, msg=lambda t, n=key: n + t)


def test_batches_of_other_kinds_go_apart():
    layer = next(iter(layers_of(CHAIN.model(), square, batches_of(CHAIN, 1)[0]).values()))
    layers = {"one": replace(layer, reads=100)}

    def of(sizes: list[tuple[int, ...]], live: int) -> list[list[int]]:
        return chunks_of(layers, lambda: [torch.zeros(size) for size in sizes], live)

    assert of([(4, 2)] * 5, 400 * 5 // 2) == [[4, 4], [4, 4], [4]]
    assert of([(4, 2), (2, 2), (1, 2), (4, 2)], 400 * 2) == [[4, 2, 1], [4]]
    assert of([(4, 2), (4, 3), (4, 3)], 2**30) == [[4], [4, 4]]
    assert of([(4, 2)] * 2, 1) == [[4], [4]]
    assert chunks_of({"one": replace(layer, calls=2)}, lambda: [torch.zeros(4, 2)] * 2, 2**30) == [[4], [4]]
    assert chunks_of(layers, lambda: [([torch.zeros(3)] * 2, [{}] * 2)] * 2, 2**30) == [[2], [2]]


@pytest.mark.parametrize(("room", "times"), [(4 * 10, 1), (4 * 10 - 1, 3)])
def test_batches_are_held_where_there_is_room(room, times):
    asked = []

    def batches() -> Iterator[Tensor]:
        asked.append(1)
        yield from torch.arange(10.0).split([4, 4, 2])

    give = as_chunks(batches, [[4, 4], [2]], room)
    next(iter(give()))
    asked.clear()
    found = [[one.tolist() for one in give()] for _ in range(3)]
    assert found == [[[*map(float, range(8))], [8.0, 9.0]]] * 3
    assert len(asked) == times
    for one in give():
        one.zero_()
    assert [one.tolist() for one in give()] == found[0]


@pytest.mark.parametrize("name", [*IN_ONE_PASS, "shared-module", "multihead-sequence-first", "gru-by-hand"])
def test_one_pass_does_what_a_pass_for_each_layer_does(name, monkeypatch):
    case = CASES[name]
    whole, graph, keep = case.model(), case.graph(), random_keep(case.graph(), seed=2, share=0.3)
    one, batches, alone = pruned(whole, graph, keep), batches_of(case, 4), []
    other, third, kept = copy.deepcopy(one), copy.deepcopy(one), graph.kept(keep)
    by_itself = reconstruction._Fit.by_itself_
    monkeypatch.setattr(reconstruction._Fit, "by_itself_", lambda *args: alone.append(1) or by_itself(*args))
    better = reconstruct_(one, whole, graph, kept, square, lambda: batches)
    assert bool(alone) == (name not in IN_ONE_PASS)
    little(monkeypatch, live=0, places=0)
    assert reconstruct_(other, whole, graph, kept, square, lambda: batches) == better
    for key, tensor in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[key], tensor, rtol=1e-6, atol=1e-8, msg=lambda t, n=key: n + t)
    little(monkeypatch, targets=1, live=0)
    assert reconstruct_(third, whole, graph, kept, square, lambda: batches) == better
    assert all(torch.equal(third.state_dict()[key], tensor) for key, tensor in other.state_dict().items())


def test_it_takes_about_as_much_memory_as_a_training_step(monkeypatch):
    def step() -> None:
        whole(batches[0]).square().mean().backward()

    whole, batches = CHAIN.model(), [F.interpolate(batch, (40, 40)) for batch in batches_of(CHAIN, 24)]
    keep = {name: torch.isin(torch.arange(size), torch.tensor(KEPT[name])) for name, size in SIZES.items()}
    usual, roomy = (pruned(whole, CHAIN.graph(), keep) for _ in range(2))
    monkeypatch.setattr(reconstruction, "LEAST_ROOM", 0)
    taken = []
    for small in (usual, roomy):
        with LiveBytes() as live:
            assert reconstruct_(small, whole, CHAIN.graph(), CHAIN.graph().kept(keep), square, lambda: batches)
        taken.append(live.peak)
        little(monkeypatch)
    bound = peak_bytes(step, torch.device("cpu"))
    assert taken[0] <= 2 * bound < 4 * bound < taken[1]
    for name, tensor in roomy.state_dict().items():
        torch.testing.assert_close(usual.state_dict()[name], tensor, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("room", [2**20, 24 * 4 * 8, 0])
def test_what_the_aim_gives_is_held_while_there_is_room(room, monkeypatch):
    monkeypatch.setattr(judging, "REMEMBERED", room)
    whole, batches, runs = CHAIN.model(), batches_of(CHAIN, 5), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        runs.append(model is whole)
        return square(model, batch)

    small, aim = copy.deepcopy(whole), Aim(whole, loss, lambda: batches, lambda total: total)
    with torch.no_grad():
        small.fc.weight.mul_(0.5)
    first, again = aim.judged(small), aim.judged(small)
    assert first == again
    assert first is not None
    assert first.distance > 0
    assert first.loss < first.unpruned
    assert sum(runs) == {2**20: 2, 24 * 4 * 8: 3, 0: 4}[room]


def test_a_network_without_outputs_is_not_calibrated_anew(monkeypatch):
    monkeypatch.setattr(judging, "recalibrate_", lambda *_: pytest.fail("calibrated"))
    whole, batches = CHAIN.model(), batches_of(CHAIN, 4)
    assert Aim(whole, square, lambda: batches[:1], lambda total: total).better_calibrated().network is whole
    whole.forward = lambda x: Chain.forward(whole, x).sum()
    aim = Aim(whole, lambda model, batch: model(batch), lambda: batches, lambda total: total)
    assert aim.better_calibrated() is aim
    assert aim.judged(copy.deepcopy(whole)) is None


def test_a_network_that_takes_no_larger_batch_has_a_pass_for_each_layer(monkeypatch):
    class Small(Chain):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 24:
                raise RuntimeError("no memory")
            return super().forward(x)

    whole, keep, batches = CHAIN.model(), {"one": torch.arange(8) < 5}, batches_of(CHAIN, 4)
    wanted, kept = pruned(whole, CHAIN.graph(), keep), CHAIN.graph().kept(keep)
    found = copy.deepcopy(wanted)
    little(monkeypatch, live=0)
    assert reconstruct_(wanted, whole, CHAIN.graph(), kept, square, lambda: batches)
    monkeypatch.undo()
    found.__class__ = Small
    assert reconstruct_(found, whole, CHAIN.graph(), kept, square, lambda: batches)
    assert all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in found.state_dict().items())


@pytest.mark.parametrize("update", [True, False])
def test_a_staged_run_ends_with_it_at_every_budget(update):
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> float:
        seen.append(state(model))
        return 0.0

    seen: list[dict[str, Tensor]] = []
    budget, example = ifso.Budget(macs=(0.8, 0.5)), torch.zeros(1, 2, 5, 5)
    result = ifso.prune(
        SmallResNet(6, 9), listed(), loss, budget=budget, example_inputs=example, update=update, evaluate=evaluate
    )
    last = [measure.stage for measure in result.measures][-1]
    assert last == ("layers fitted to the unpruned network" if update else "batch norms recalibrated")
    for network in result.networks if update else ():
        mine = (network.model or result.model).state_dict()
        assert any(all(torch.equal(one.get(name, torch.zeros(0)), mine[name]) for name in mine) for one in seen)
