"""``true-loss`` (and Group Fisher within attention) against regressions and samples that run one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, FEW, Case, image, random_keep, run, tensors
from reference.criteria import Truth, samples_of
from torch import Tensor, nn

import ifso
from ifso.criteria import true_loss
from ifso.criteria.scorer import score
from ifso.errors import ScoreError

DAMPING = 0.02

OTHERWISE = {
    "data-dependent": "samples along the first dim",
    "einsum": "used by einsum, not as the weight",
}
"""Networks that it refuses, and what it says."""
NOT_HERE = (
    "weight-standardised", "weight-standardised-batch-norm", "cross-attention", "nested-inputs", "in-place-shape",
    "group-norm", "multihead-sequence-first", "weight-norm", "weight-norm-hooked", "wavenet", "experts",
    "chosen-positions",
)  # fmt: skip
"""The truth knows no weights that are computed, no lists, no samples but along the first dim, no constant network."""
NETS = [name for name in CASES if CASES[name].prunable and name not in OTHERWISE and name not in NOT_HERE]


@pytest.fixture(autouse=True)
def all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(true_loss, "POSITIONS", 10**9)


def losses(model: nn.Module, batch: Any) -> Tensor:
    """One loss for each sample [N]."""
    return sum(
        (out.sin() * torch.linspace(0.5, 1.5, out[0].numel(), dtype=out.dtype).view(out.shape[1:])).flatten(1).sum(1)
        for out in tensors(run(model, batch))
    )


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch).mean()


def batches_of(case: Case, number: int = 2) -> list[Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return [case.make_inputs() for _ in range(number)]


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-7, atol=1e-9 * float(values.max()))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in NETS])
def test_of_a_loss_it_is_half_the_mean_square_of_what_residuals_change(name):
    case = CASES[name]
    model, batches = case.model(), batches_of(case)
    found = score(model, case.graph(), mean_loss, batches, "true-loss", target="loss", damping=DAMPING)
    truth = Truth(model, case.graph(), DAMPING)
    wanted = truth.scores(batches, lambda net, batch, number, sample: mean_loss(net, sample))
    assert max(float(values.max()) for values in wanted.values()) > 1e-8
    assert_close(found, wanted)


@pytest.mark.parametrize(
    "name", ["plain", "residual", "grouped", "flatten", "transposed", "multihead", "mlp-batch-norm", "many-outputs"]
)
def test_of_the_outputs_it_takes_a_random_direction_for_each_sample(name):
    """Directions are standard normal, divided by the spread of the outputs; one number seeds those of each batch."""
    case, seed = CASES[name], 5
    model, batches = case.model(), batches_of(case)
    found = score(model, case.graph(), mean_loss, batches, "true-loss", damping=DAMPING, seed=seed)

    def along(net, batch, number, sample):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + batch)
        with torch.no_grad():
            whole = list(tensors(run(net, batches[batch])))
        directions = [torch.randn(out.shape, generator=generator).double() / out.std() for out in whole]
        return sum(
            (out[0] * wanted[number]).sum() for out, wanted in zip(tensors(run(net, sample)), directions, strict=True)
        )

    assert_close(found, Truth(model, case.graph(), DAMPING).scores(batches, along))


@pytest.mark.parametrize("name", ["attention", "multihead", "multihead-weights", "encoder-layer", "vit"])
def test_group_fisher_looks_into_attention(name):
    case = CASES[name]
    model, batch = case.model(), batches_of(case, 1)
    found = score(model, case.graph(), mean_loss, batch, "group-fisher")
    wanted = Truth(model, case.graph(), DAMPING).scores(batch, lambda net, _, __, x: mean_loss(net, x), plain=True)
    assert_close(found, wanted)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("criterion", ["true-loss", "group-fisher"])
def test_attention_has_its_samples_wherever_they_are(criterion, batch_first):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.attn = nn.MultiheadAttention(8, 2, batch_first=batch_first)

        def forward(self, x):
            x = self.embed(x)
            y = x if batch_first else x.transpose(0, 1)
            y = self.attn(y, y, y)[0]
            return self.head(F.relu(x + (y if batch_first else y.transpose(0, 1))))

    case = Case("attending", Attending, image(4, 5, 6))
    model, batches = case.model(), batches_of(case)
    options = {"target": "loss", "damping": DAMPING} if criterion == "true-loss" else {}
    found = score(model, case.graph(), mean_loss, batches[:1], criterion, **options)
    truth = Truth(model, case.graph(), DAMPING)
    assert_close(
        found, truth.scores(batches[:1], lambda net, _, __, x: mean_loss(net, x), plain=criterion != "true-loss")
    )


@pytest.mark.parametrize("name", ["weight-standardised", "weight-standardised-batch-norm"])
def test_weights_that_are_computed_count_as_those_they_stand_for(name):
    """The same network with plain convolutions of the computed weights has the same scores."""
    case = CASES[name]
    model, plain, batches = case.model(), case.model(), batches_of(case)
    for key in ("stem", "body"):
        old = getattr(model, key)
        conv = nn.Conv2d(old.in_channels, old.out_channels, old.kernel_size).double()
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "conv2d", lambda x, weight, *_, conv=conv: conv.weight.copy_(weight))
            old(torch.zeros(1, old.in_channels, 8, 8, dtype=torch.float64))
        conv.bias.data = old.bias.data
        setattr(plain, key, conv)
    found = score(model, case.graph(), mean_loss, batches, "true-loss")
    assert all(float(values.max()) > 0 for values in found.values())
    assert_close(found, score(plain, ifso.trace(plain, batches[0]), mean_loss, batches, "true-loss"))


def test_cross_attention_reads_the_memory():
    case = CASES["cross-attention"]
    model, batches = case.model(), batches_of(case)
    found = score(model, case.graph(), lambda net, x: net(*x)[0].square().mean(), batches, "true-loss")
    assert all(float(values.min()) > 0 for values in found.values())


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_cannot_be_seen_is_refused_in_one_line(name):
    case = CASES[name]
    with pytest.raises(ScoreError, match=OTHERWISE[name]) as caught:
        score(case.model(), case.graph(), lambda net, x: net(x).sum(), [case.inputs()], "true-loss")
    assert "\n" not in str(caught.value)


def test_a_unit_that_others_can_say_costs_nothing():
    model = CASES["plain"].model()
    for tensor in (model.stem.conv.weight, *(getattr(model.stem.bn, key) for key in ("weight", "bias"))):
        tensor.data[3] = tensor.data[5]
    for key in ("running_mean", "running_var"):
        getattr(model.stem.bn, key)[3] = getattr(model.stem.bn, key)[5]
    found = score(model, CASES["plain"].graph(), mean_loss, batches_of(CASES["plain"]), "true-loss", damping=1e-9)
    values = found["stem.conv"]
    assert float(values[[3, 5]].max()) < 1e-9 * float(values.max())
    assert int((values < 1e-9 * values.max()).sum()) == 2


@pytest.mark.parametrize("name", ["residual", "encoder-layer"])
def test_the_same_twice_and_nothing_is_touched(name):
    case = CASES[name]
    model, batches = case.model().train(), batches_of(case)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    once, twice = (score(model, case.graph(), mean_loss, batches, "true-loss") for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(torch.equal(values, twice[key]) for key, values in once.items())
    other = score(model, case.graph(), mean_loss, batches, "true-loss", seed=1)
    assert not torch.equal(torch.cat(list(once.values())), torch.cat(list(other.values())))


def test_batches_of_different_sizes_count_alike():
    case = CASES["plain"]
    model, batches = case.model(), [image(size, 3, 8, 8)() for size in (1, 4, 2)]
    found = score(model, case.graph(), mean_loss, batches, "true-loss", target="loss", damping=DAMPING)
    wanted = Truth(model, case.graph(), DAMPING).scores(batches, lambda net, _, __, x: mean_loss(net, x))
    assert_close(found, wanted)
    assert len(samples_of(batches[1])) == 4


@pytest.mark.parametrize(
    "name", ["sigmoid", "grouped", "concat", "multihead", "encoder-layer", "mixer", "shufflenet-v1"]
)
def test_units_that_are_gone_say_nothing_of_others(name):
    """Masked, they may be constants (sigmoid of 0): neither the prediction nor λ may know of them."""
    if name == "sigmoid":
        case = Case(name, lambda: nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 3)), image(9, 4))
    else:
        case = CASES[name]
    model, graph, batches = case.model(), case.graph(), batches_of(case)
    keep = random_keep(graph, seed=3, share=0.3)
    soft = score(model, graph, mean_loss, batches, "true-loss", keep=keep)
    ifso.compact_(model, graph, keep)
    hard = score(model, ifso.trace(model, case.inputs()), mean_loss, batches, "true-loss")
    assert_close({group: soft[group][choice] for group, choice in keep.items()}, hard)


@pytest.mark.parametrize("size", [1, 12])
def test_few_samples_do_not_make_channels_seem_predictable(size):
    """24 independent channels: on 24 samples each is a sum of the others by chance, which on new ones says nothing."""

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 5)).double()
    nn.init.eye_(model[0].weight)
    data = torch.randn(2400, 24, dtype=torch.float64)
    graph = ifso.trace(model, data[:2])
    few, many = ([*part.split(size)] for part in (data[:24], data))
    scores = [
        score(model, graph, lambda net, x: net(x).sum(1).mean(), batches, "true-loss", target="loss")
        for batches in (few, many)
    ]
    assert graph.num_units == 24
    few, many = (torch.cat(list(found.values())).mean() for found in scores)
    assert 0.5 < float(few / many) < 5
