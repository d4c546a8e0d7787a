"""Weights fitted when inputs go, against plain least squares on what the layers compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, FEW, Case, difference, image, outputs, prunable_cases, random_keep, run
from reference.least_squares import ridge, truth
from torch import Tensor, nn

import ifso
from ifso.curvature.weight_space import Reader, readers
from ifso.errors import ScoreError
from ifso.pruning import least_squares as fitting
from ifso.pruning.least_squares import Update, least_squares

ALL = 10**9
DAMPING = 0.03

LEFT_ALONE = {
    "weight-norm": "also used by _weight_norm",
    "weight-norm-hooked": "also used by _weight_norm",
    "wavenet": "also used by _weight_norm",
    "weight-standardised": "also used by",
    "weight-standardised-batch-norm": "also used by",
    "tied-weights": "also used by embedding",
    "einsum": "also used by einsum",
    "cross-attention": "also used by split",
}
"""Layers that have no closed form here, and what is said of them."""


def passes(model: nn.Module, batches: list[Any]) -> Iterator[None]:
    for batch in batches:
        run(model, batch)
        yield


def batches_of(case: Case, number: int = 3) -> list[Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return [case.make_inputs() for _ in range(number)]


def updated(
    model: nn.Module, graph: ifso.ChannelGraph, keep: dict[str, Tensor], batches: list[Any], **options: Any
) -> Update:
    """The update for all readers that lose something."""
    kept = graph.kept(keep)
    losing = [reader for reader in readers(graph) if bool((~kept[reader.owner]).any())]
    chosen = {"damping": DAMPING, "positions": ALL, **options}
    return least_squares(model, losing, kept, lambda: passes(model, batches), **chosen)


def assert_same(found: Update, wanted: dict[str, Tensor]) -> None:
    assert found.tensors.keys() | found.left_alone.keys() >= wanted.keys()
    for name, tensor in found.tensors.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-7, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


@prunable_cases(few={*FEW, *LEFT_ALONE})
def test_every_layer_of_every_case_gets_the_weights_of_plain_least_squares(case):
    model, graph, batches = case.model(), case.graph(), batches_of(case)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    keep = random_keep(graph, seed=2, share=0.4)
    found = updated(model, graph, keep, batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for reason in found.left_alone.values():
        assert LEFT_ALONE[case.name] in reason
    wanted = truth(model, graph, keep, lambda net: passes(net, batches), DAMPING)
    assert_same(found, wanted)
    assert found.tensors or found.left_alone or not wanted


class Pair(nn.Module):
    """A layer that makes channels, ReLU, and a layer that reads them."""

    def __init__(self, first: nn.Module, second: nn.Module, norm: nn.Module | None = None):
        super().__init__()
        self.first, self.second, self.norm = first, second, norm or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(F.relu(self.first(x))))


class Twice(nn.Module):
    """The reading layer runs on two feature maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x))).sum((2, 3)) + self.second(self.first(x.flip(-1)).tanh()).sum((2, 3))


def pair(first: Any, second: Any, *shape: int, norm: nn.Module | None = None) -> Case:
    return Case("pair", lambda: Pair(first(), second(), norm), image(*shape))


def c2() -> nn.Module:
    return nn.Conv2d(3, 8, 3)


LAYERS = {
    "conv1d, stride, dilation, padding": pair(
        lambda: nn.Conv1d(3, 8, 3), lambda: nn.Conv1d(8, 4, 3, stride=2, dilation=2, padding=3), 2, 3, 14
    ),
    "conv2d, unequal options": pair(
        c2, lambda: nn.Conv2d(8, 4, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(2, 1)), 2, 3, 9, 8
    ),
    "conv3d": pair(lambda: nn.Conv3d(3, 8, 2), lambda: nn.Conv3d(8, 3, 2, stride=2, padding=1), 2, 3, 5, 4, 4),
    "same": pair(c2, lambda: nn.Conv2d(8, 4, (4, 3), padding="same", dilation=2), 2, 3, 8, 8),
    "valid": pair(c2, lambda: nn.Conv2d(8, 4, 3, padding="valid"), 2, 3, 8, 8),
    "reflected": pair(c2, lambda: nn.Conv2d(8, 4, 3, padding=2, padding_mode="reflect"), 2, 3, 8, 8),
    "groups": pair(c2, lambda: nn.Conv2d(8, 6, 3, groups=2), 2, 3, 8, 8),
    "transposed 1d": pair(
        lambda: nn.Conv1d(3, 8, 3), lambda: nn.ConvTranspose1d(8, 4, 3, stride=2, output_padding=1), 2, 3, 9
    ),
    "transposed 2d, groups": pair(
        c2, lambda: nn.ConvTranspose2d(8, 6, 3, 2, padding=1, output_padding=1, groups=2, dilation=2), 2, 3, 6, 6
    ),
    "linear on vectors": pair(lambda: nn.Linear(3, 8), lambda: nn.Linear(8, 4), 12, 3),
    "linear on tokens": pair(lambda: nn.Linear(3, 8), lambda: nn.Linear(8, 4), 2, 5, 3),
    "linear without a batch": pair(lambda: nn.Linear(3, 8), lambda: nn.Linear(8, 4), 3),
    "flatten": pair(c2, lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 4)), 9, 3, 4, 4),
    "no bias": pair(c2, lambda: nn.Conv2d(8, 4, 3, bias=False), 2, 3, 8, 8),
    "no bias, batch norm": pair(c2, lambda: nn.Conv2d(8, 4, 3, bias=False), 2, 3, 8, 8, norm=nn.BatchNorm2d(4)),
    "bias and batch norm": pair(c2, lambda: nn.Conv2d(8, 4, 3), 2, 3, 8, 8, norm=nn.BatchNorm2d(4)),
    "no bias, layer norm": pair(
        lambda: nn.Linear(3, 8), lambda: nn.Linear(8, 4, bias=False), 9, 3, norm=nn.LayerNorm(4)
    ),
    "called twice": Case("twice", Twice, image(2, 3, 8, 8)),
}
by_layer = pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS)


@by_layer
def test_every_kind_of_layer_gets_the_weights_of_plain_least_squares(case):
    model, graph, batches = case.model(), case.graph(), batches_of(case)
    keep = random_keep(graph, seed=1)
    wanted = truth(model, graph, keep, lambda net: passes(net, batches), DAMPING)
    assert any("second" in name and "weight" in name for name in wanted)
    found = updated(model, graph, keep, batches)
    assert found.tensors.keys() == wanted.keys()
    assert_same(found, wanted)


@by_layer
def test_a_channel_that_others_can_say_is_not_missed(case):
    """Channel 1 is a copy of channel 0 before ReLU: with next to no damping its removal changes nothing."""
    model = case.model()
    for tensor in (model.first.weight, model.first.bias):
        tensor.data[1] = tensor.data[0]
    groups = getattr(model.second, "groups", 1)
    if groups > 1:  # both groups lose one
        for tensor in (model.first.weight, model.first.bias):
            tensor.data[5] = tensor.data[4]
    batches = batches_of(case)
    gone = torch.tensor([unit in (1, 5)[:groups] for unit in range(8)])
    before = [out for batch in batches for out in outputs(model, batch)]
    updated(model, case.graph(), {"first": ~gone}, batches, damping=1e-10).apply_(model)
    ifso.compact_(model, case.graph(), {"first": ~gone})
    assert difference(before, [out for batch in batches for out in outputs(model, batch)]) < 1e-6


@pytest.mark.parametrize("name", ["weight-standardised", "einsum", "cross-attention"])
def test_weights_with_another_use_are_left_alone_with_a_reason(name):
    case = CASES[name]
    found = updated(case.model(), case.graph(), random_keep(case.graph(), seed=2), batches_of(case))
    assert found.left_alone
    assert all(LEFT_ALONE[name] in reason for reason in found.left_alone.values())
    assert not found.tensors.keys() & found.left_alone.keys()


def test_a_matrix_shared_by_embedding_and_decoder_is_left_alone():
    case = CASES["tied-weights"]
    model, kept = case.model(), torch.arange(9) != 3
    reader = Reader("embed.weight", 1, torch.arange(8))
    found = least_squares(model, [reader], kept, lambda: passes(model, batches_of(case)))
    assert found.left_alone == {"embed.weight": "its weight is also used by embedding"}
    assert not found.tensors


def test_with_the_statistics_of_batches_the_running_mean_moves_too():
    """In train mode a batch norm takes every shift away, but is left with one when it is in eval mode again."""
    case = LAYERS["no bias, batch norm"]
    model, keep, batches = case.model(), {"first": torch.arange(8) < 5}, batches_of(case)
    wanted = updated(model, case.graph(), keep, batches).tensors
    model.norm.track_running_stats = False
    found = updated(model.train(), case.graph(), keep, batches).tensors
    assert found.keys() == wanted.keys() == {"second.weight", "norm.running_mean"}
    torch.testing.assert_close(found["norm.running_mean"], wanted["norm.running_mean"])


def test_an_output_that_also_goes_elsewhere_keeps_its_mean():
    """Its shift is taken away by the batch norm, but not where it is added."""

    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.norm = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4)

        def forward(self, x):
            z = self.second(F.relu(self.first(x)))
            return z + self.norm(z)

    case = Case("forked", Forked, image(4, 3, 6, 6))
    found = updated(case.model(), case.graph(), {"first": torch.arange(8) < 5}, batches_of(case))
    assert list(found.tensors) == ["second.weight"]
    model, batches = case.model(), batches_of(case)
    rows = torch.cat([F.relu(model.first(batch)).movedim(1, -1).flatten(0, 2) for batch in batches]).detach()
    second = rows.t() @ rows / len(rows)
    second += DAMPING * second.diagonal().mean() * torch.eye(8, dtype=torch.float64)
    wanted = model.second.weight.detach().flatten(1) @ second[:, :5] @ second[:5, :5].inverse()
    torch.testing.assert_close(found.tensors["second.weight"].flatten(1)[:, :5], wanted)


@pytest.mark.parametrize("name", ["plain", "attention", "multihead", "transposed-grouped", "flatten"])
def test_pieces_of_memory_change_nothing(name, monkeypatch):
    case = CASES[name]
    model, graph, keep = case.model(), case.graph(), random_keep(case.graph(), seed=2)
    whole = updated(model, graph, keep, batches_of(case), positions=5)
    passed = []
    monkeypatch.setattr(fitting, "_pass", lambda *args, old=fitting._pass: passed.append(args[0]) or old(*args))
    sizes = [fitting._size(model.get_parameter(reader.parameter), reader)[1] for reader in readers(graph)]
    monkeypatch.setattr(fitting, "PIECE", max(sizes))
    parts = updated(model, graph, keep, batches_of(case), positions=5)
    assert len(passed) > 1
    assert parts.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(tensor, whole.tensors[name]) for name, tensor in parts.tensors.items())


def test_a_layer_that_is_too_large_is_left_alone(monkeypatch):
    case = CASES["plain"]
    monkeypatch.setattr(fitting, "PIECE", 2 * 8 * 6**2)
    found = updated(case.model(), case.graph(), random_keep(case.graph(), seed=2), batches_of(case))
    assert found.left_alone == {"body.conv.weight": "72 columns are too many for their moments to be held"}
    assert found.tensors.keys() == {"head.fc.weight", "head.fc.bias"}


def rows_with_common_causes(samples: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    causes = torch.randn(6, columns, dtype=torch.float64, generator=generator)
    noise = torch.randn(samples, columns, dtype=torch.float64, generator=generator) / 2
    return torch.randn(samples, 6, dtype=torch.float64, generator=generator) @ causes + noise


def by_hand(weight: Tensor, rows: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The protected weights from rows, by plain least squares and a search for the share; and what is fitted."""
    one, other = rows.tensor_split([len(rows) // 2])
    both, first, second = (part.t() @ part / len(part) for part in (rows, one, other))
    size = both.diagonal().mean()
    error = (first - second).square().sum() / 4
    rho = error / (both - size * torch.eye(len(both))).square().sum()
    damping = max(0.01, float(rho / (1 - rho))) if rho < 1 else fitting.MOST_DAMPING
    lam = damping * size

    def fit(part: Tensor) -> Tensor:
        mine = float(lam / part.square().mean())
        return torch.stack([ridge(part, row, kept, mine, centred=False)[0] for row in weight])

    found = [fit(one), fit(other)]
    shares = torch.linspace(0, 1, 2001).tolist()
    errors = []
    for share in shares:
        tried = [weight * kept + share * (part - weight * kept) for part in found]
        pairs = zip(tried, (other, one), strict=True)
        errors.append(sum(float(((weight - v) @ x.t()).square().sum() / len(x)) for v, x in pairs))
    share = shares[errors.index(min(errors))]
    assert min(errors) <= errors[0]
    return weight * kept + share * (fit(rows) - weight * kept), fit(rows)


@pytest.mark.parametrize(("samples", "share"), [(12, 0.6), (40, 0.6), (400, 0.3), (4000, 0.3)])
def test_the_two_halves_of_the_samples_say_how_far_a_fit_is_to_be_trusted(samples, share):
    rows, kept = rows_with_common_causes(samples, 30, seed=samples), torch.rand(30) > share
    weight = torch.randn(4, 30, dtype=torch.float64)
    wanted, whole = by_hand(weight, rows, kept)
    halves = [part.t() @ part / len(part) for part in rows.tensor_split([samples // 2])]
    found = fitting.protected(weight, rows.t() @ rows / samples, halves, kept)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-3
    if samples == 4000:
        assert float((found - whole).norm() / whole.norm()) < 0.01


@pytest.mark.parametrize("seed", range(5))
def test_with_few_samples_the_fit_helps_on_others_all_the_same(seed):
    """A linear layer reads 200 channels of 10 samples: a fit without protection is worse there than none."""
    torch.manual_seed(seed)
    weight, kept = torch.randn(8, 200, dtype=torch.float64), torch.rand(200) > 0.5
    rows = rows_with_common_causes(5000, 200, seed)
    rows += 20 * torch.randn(len(rows), 1, dtype=torch.float64) * (torch.rand(len(rows), 1) < 0.02)
    few, others = rows[:10], rows[10:]
    whole, *halves = (part.t() @ part / len(part) for part in (few, few[:5], few[5:]))

    def lost(new: Tensor) -> float:
        return float(((weight - new) @ others.t()).square().mean())

    assert lost(fitting.protected(weight, whole, halves, kept)) < lost(weight * kept)


def test_halves_that_have_nothing_in_common_leave_the_weights_as_they_are():
    case = pair(lambda: nn.Linear(40, 40), lambda: nn.Linear(40, 4), 2, 40)
    model, batches = case.model(), [torch.eye(40, dtype=torch.float64)[:2]]
    model.first.weight.data = torch.eye(40, dtype=torch.float64)
    model.first.bias.data.zero_()
    kept = torch.arange(40) > 0
    found = updated(model, case.graph(), {"first": kept}, batches, damping=None)
    torch.testing.assert_close(found.tensors["second.weight"], model.second.weight.detach() * kept)


def test_a_single_sample_is_taken_as_it_is():
    case = LAYERS["linear without a batch"]
    found = updated(case.model(), case.graph(), {"first": torch.arange(8) != 4}, batches_of(case, 1), damping=None)
    assert all(bool(tensor.isfinite().all()) for tensor in found.tensors.values())
    assert not bool(found.tensors["second.weight"][:, 4].any())


@pytest.mark.parametrize("trouble", ["dead", "few samples", "constant"])
def test_whatever_the_inputs_are_the_weights_stay_finite(trouble):
    case = LAYERS["linear on vectors"]
    model = case.model()
    batch = image(2 if trouble == "few samples" else 9, 3)()
    if trouble == "dead":
        model.first.bias.data[:3] = -100.0
    if trouble == "constant":
        batch = batch[:1].expand(9, 3)
    found = updated(model, case.graph(), {"first": torch.arange(8) != 4}, [batch])
    assert all(bool(tensor.isfinite().all()) for tensor in found.tensors.values())
    wanted = truth(model, case.graph(), {"first": torch.arange(8) != 4}, lambda net: passes(net, [batch]), DAMPING)
    assert_same(found, wanted)
    if trouble == "dead":
        torch.testing.assert_close(found.tensors["second.weight"][:, :3], model.second.weight.detach()[:, :3])


def test_columns_that_went_before_do_not_count():
    """A unit of an earlier stage is still there as a constant, sigmoid(0), with weights of zero."""
    second = fitting.fitted(
        torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64),
        torch.tensor([[2.0, 1.0, 4.0], [1.0, 3.0, 4.0], [4.0, 4.0, 90.0]], dtype=torch.float64),
        torch.tensor([True, False, False]),
        damping=0.1,
    )
    assert second.tolist() == [[pytest.approx((2.25 + 2 * 1.0) / 2.25), 0.0, 0.0]]


def test_inputs_that_are_no_numbers_are_refused_in_one_line():
    case = LAYERS["linear on vectors"]
    with pytest.raises(ScoreError, match="inputs of a layer are not finite"):
        updated(case.model(), case.graph(), {"first": torch.arange(8) != 4}, [image(4, 3)() * float("nan")])


def test_small_spreads_around_large_means_are_not_lost_in_float32():
    case = LAYERS["linear on vectors"]
    model, batch, keep = case.model(), image(64, 3)(), {"first": torch.arange(8) != 4}
    model.first.bias.data += 3000
    wanted = truth(model, case.graph(), keep, lambda net: passes(net, [batch]), DAMPING)["second.weight"]
    found = updated(model.float(), case.graph(), keep, [batch.float()]).tensors["second.weight"]
    assert float((found - wanted).norm() / wanted.norm()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half_precision(dtype):
    case = LAYERS["conv2d, unequal options"]
    keep, batches = {"first": torch.arange(8) % 3 > 0}, batches_of(case)
    wanted = updated(case.model(), case.graph(), keep, batches)
    found = updated(case.model().to(dtype), case.graph(), keep, [batch.to(dtype) for batch in batches])
    for name, tensor in found.tensors.items():
        assert tensor.dtype == dtype
        assert float((tensor - wanted.tensors[name]).norm() / wanted.tensors[name].norm()) < 0.05


def test_a_layer_of_few_wide_groups_takes_the_memory_of_those_groups():
    """As in a ResNeSt or a large RegNet: by the number of its outputs it would be far too large."""
    model = nn.Sequential(nn.Conv2d(3, 64, 1), nn.ReLU(), nn.Conv2d(64, 96, 3, groups=2), nn.Conv2d(96, 2, 1))
    graph = ifso.trace(model, torch.zeros(1, 3, 4, 4))
    (reader,) = (reader for reader in readers(graph) if reader.parameter == "2.weight")
    assert fitting._size(model[2].weight, reader) == (288, 2 * 4 * 2 * 288**2)
