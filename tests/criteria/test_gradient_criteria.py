"""Criteria of first derivatives, against masks that hooks put in front of the layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, image, run, tensors
from nets import attention
from reference.criteria import NETS, mask_gradients, places
from torch import nn

import ifso
from ifso.criteria.scorer import score
from ifso.errors import ScoreError

SAMPLES = 3
ALL = pytest.mark.parametrize("name", NETS)


def batch_of(name):
    shape = {"fpn": (SAMPLES, 3, 16, 16), "one-head": (SAMPLES, 7, 6)}.get(name, (SAMPLES, 3, 8, 8))
    return image(*shape)()


def losses(model, batch):
    """One loss for each sample [N]."""
    return sum(
        (out.sin() * torch.linspace(0.5, 1.5, out[0].numel(), dtype=out.dtype).view(out.shape[1:])).flatten(1).sum(1)
        for out in tensors(run(model, batch))
    )


def mean_loss(model, batch):
    return losses(model, batch).mean()


def sum_loss(model, batch):
    return losses(model, batch).sum()


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert values.abs().max() > 1e-8
        torch.testing.assert_close(found[name], values, rtol=1e-9, atol=1e-12)


def whole_batch(name, mode):
    """The model, and |∂L/∂M| on the batch by hooks."""
    model, batch = CASES[name].model().train(mode == "train"), batch_of(name)
    buffers = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = mask_gradients(model, NETS[name], lambda model: mean_loss(model, batch))
    model.load_state_dict(buffers)
    return model, batch, {group: grad.abs() for group, grad in gradients.items()}


@pytest.mark.parametrize("mode", ["train", "eval"])
@ALL
def test_taylor(name, mode):
    model, batch, wanted = whole_batch(name, mode)
    assert_close(score(model, CASES[name].graph(), mean_loss, [batch], "taylor"), wanted)


def test_taylor_reaches_weights_that_are_frozen():
    model, batch, wanted = whole_batch("residual", "eval")
    model.requires_grad_(False)
    assert_close(score(model, CASES["residual"].graph(), mean_loss, [batch], "taylor"), wanted)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@ALL
def test_group_fisher_is_the_sum_of_squares_over_single_samples(name, reduction):
    model, batch = CASES[name].model(), batch_of(name)
    wanted = {group: torch.zeros(spec.size, dtype=torch.float64) for group, spec in NETS[name].items()}
    for sample in batch:
        for group, grad in mask_gradients(model, NETS[name], lambda model, x=sample[None]: mean_loss(model, x)).items():
            wanted[group] += grad**2
    loss_fn = {"mean": mean_loss, "sum": sum_loss}[reduction]
    assert_close(score(model, CASES[name].graph(), loss_fn, [batch], "group-fisher", reduction=reduction), wanted)


def test_group_fisher_in_train_mode_has_a_mask_for_each_sample():
    """Batch norm mixes the samples: the reference masks one sample of the batch at a time."""
    name = "plain"
    net = {
        "stem.conv": (("body.conv",), 8),
        "body.conv": (("head.fc",), 6),
    }
    model, batch = CASES[name].model().train(), batch_of("residual")
    wanted = {}
    for group, (layers, size) in net.items():
        mask = torch.ones(SAMPLES, size, dtype=torch.float64, requires_grad=True)
        handles = [
            model.get_submodule(layer).register_forward_pre_hook(
                lambda _, args, mask=mask: (args[0] * mask.view(*mask.shape, *[1] * (args[0].dim() - 2)),)
            )
            for layer in layers
        ]
        (grad,) = torch.autograd.grad(mean_loss(model, batch), mask)
        wanted[group] = ((SAMPLES * grad) ** 2).sum(0)
        for handle in handles:
            handle.remove()
    assert_close(score(model, CASES[name].graph(), mean_loss, [batch], "group-fisher"), wanted)


def test_group_fisher_with_windows_of_samples():
    """The middle layer sees each sample in two windows, one after the other."""

    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            x = F.relu(self.embed(x))
            windows = self.inner(x.unflatten(1, (2, 3)).flatten(0, 1)).tanh()
            return self.head(windows.unflatten(0, (-1, 2)).flatten(1, 2))

    model, batch = Windows().double(), torch.randn(SAMPLES, 6, 4, dtype=torch.float64)
    graph = ifso.trace(model, batch)
    found = score(model, graph, mean_loss, [batch], "group-fisher")
    parts = [score(model, graph, mean_loss, [sample[None]], "taylor") for sample in batch]
    assert_close(found, {name: sum(part[name] ** 2 for part in parts) for name in found})


def test_group_fisher_of_cross_attention():
    """Its weight is split for queries and memory; samples do not meet, so each has the first order of its own."""

    def loss_fn(model, inputs):
        return model(*inputs)[0].sin().mean()

    case = CASES["cross-attention"]
    model, inputs = case.model(), case.inputs()
    found = score(model, case.graph(), loss_fn, [inputs], "group-fisher")
    samples = [tuple(part[n : n + 1] for part in inputs) for n in range(len(inputs[0]))]
    parts = [score(model, case.graph(), loss_fn, [sample], "taylor") for sample in samples]
    assert len(samples) > 1
    assert_close(found, {name: sum(part[name] ** 2 for part in parts) for name in found})


class TokensFirst(nn.Module):
    """Samples come first, go second through attention that takes tokens first, and are first again in the head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(self.embed(x).transpose(0, 1)).transpose(0, 1).tanh())


@pytest.mark.parametrize("tokens", [6, 5, 3])
def test_group_fisher_where_attention_takes_tokens_first(tokens):
    """Also where tokens are a multiple of the samples, here 3."""
    torch.manual_seed(0)
    model, batch = TokensFirst().double(), torch.randn(3, tokens, 5, dtype=torch.float64)
    graph = ifso.trace(model, batch)
    if tokens == len(batch):
        for criterion in ("group-fisher", "true-loss"):
            with pytest.raises(ScoreError, match="sees 3 of each; give batches of another size"):
                score(model, graph, mean_loss, [batch], criterion)
        return
    found = score(model, graph, mean_loss, [batch], "group-fisher")
    parts = [score(model, graph, mean_loss, [sample[None]], "taylor") for sample in batch]
    assert_close(found, {name: sum(part[name] ** 2 for part in parts) for name in found})


def test_true_loss_where_attention_takes_tokens_first():
    torch.manual_seed(0)
    model, batch = TokensFirst().double(), torch.randn(4, 6, 5, dtype=torch.float64)
    found = score(model, ifso.trace(model, batch), mean_loss, [batch], "true-loss")
    assert set(found) == {"embed", "layer.self_attn", "layer.linear1"}
    assert all(float(values.min()) > 0 for values in found.values())


def test_group_fisher_reads_the_input_of_a_grouped_transposed_convolution():
    model, graph, batch = CASES["transposed-grouped"].model(), CASES["transposed-grouped"].graph(), batch_of("grouped")
    net = {"stem.conv": places(8, "up")}
    parts = [mask_gradients(model, net, lambda model, x=sample[None]: mean_loss(model, x)) for sample in batch]
    found = score(model, graph, mean_loss, [batch], "group-fisher")
    assert_close({"stem.conv": found["stem.conv"]}, {"stem.conv": sum(part["stem.conv"] ** 2 for part in parts)})


class Written(nn.Module):
    """Layers and a mean over channels in one module, so that their calls are counted together."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 3, 1, 1)), nn.Parameter(torch.randn(6, 6, 1, 1))
        self.last = nn.Parameter(torch.randn(2, 6))

    def forward(self, x):
        x = F.conv2d(F.conv2d(x, self.first).tanh(), self.second)
        x = x - x.mean(1, keepdim=True)
        return F.linear(x.tanh().mean((2, 3)), self.last)


@pytest.mark.parametrize("criterion", ["taylor", "group-fisher", "hrank", "ifso"])
def test_masked_functions_over_channels_are_still_found(criterion):
    model, batch = Written().double(), image(SAMPLES, 3, 4, 4)()
    graph = ifso.trace(model, batch)
    assert any("reduced over channels" in group.flags for group in graph.groups)
    keep = {group.name: torch.arange(group.size) % 3 != 1 for group in graph.groups}
    soft = score(model, graph, mean_loss, [batch], criterion, keep=keep)
    ifso.compact_(model, graph, keep)
    hard = score(model, ifso.trace(model, batch), mean_loss, [batch], criterion)
    assert_close({name: values[keep[name]] for name, values in soft.items()}, hard)


def test_group_fisher_without_a_batch_dim():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    picture = torch.randn(3, 8, 8, dtype=torch.float64)
    graph = ifso.trace(net, picture)
    found = score(net, graph, lambda model, x: model(x).sin().sum(), [picture], "group-fisher")
    first = score(net, graph, lambda model, x: model(x).sin().sum(), [picture], "taylor")
    assert_close(found, {name: values**2 for name, values in first.items()})


@pytest.mark.parametrize(
    ("name", "parameter", "function"),
    [
        ("einsum", "weight", "einsum"),
        ("weight-standardised", r"body\.weight", "mean"),
    ],
)
def test_group_fisher_refuses_a_reading_parameter_in_another_use(name, parameter, function):
    case = CASES[name]
    with pytest.raises(ScoreError, match=f"^{parameter} reads units but is used by {function}.* taylor"):
        score(case.model(), case.graph(), mean_loss, [case.inputs()], "group-fisher")


def test_group_fisher_allows_looking_at_a_reading_weight():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    batch = torch.randn(2, 4, dtype=torch.float64)

    def loss_fn(model, x):
        weight = model[2].weight
        assert weight.shape == (2, 4)
        assert bool(weight.detach().isfinite().all())
        return mean_loss(model, x)

    graph = ifso.trace(net, batch)
    plain = score(net, graph, mean_loss, [batch], "group-fisher")
    assert_close(score(net, graph, loss_fn, [batch], "group-fisher"), plain)


def test_group_fisher_refuses_rows_that_are_no_samples():
    case = CASES["data-dependent"]
    with pytest.raises(ScoreError, match=r"deep\.weight sees 5 rows, another 2"):
        score(case.model(), case.graph(), lambda model, x: model(x).sum(), [case.inputs()], "group-fisher")


def test_group_fisher_of_a_loss_that_runs_no_layer():
    case = CASES["plain"]
    with pytest.raises(ScoreError, match="no layer that reads units ran"):
        score(
            case.model(), case.graph(), lambda model, x: model.stem.conv.weight.sum(), [case.inputs()], "group-fisher"
        )


@pytest.mark.parametrize("criterion", ["taylor", "group-fisher"])
def test_under_autocast(criterion):
    model, batch = CASES["residual"].model().float(), batch_of("residual").float()

    def loss_fn(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return mean_loss(model, x)

    graph = CASES["residual"].graph()
    exact, found = (
        torch.cat(list(score(model, graph, function, [batch], criterion).values())) for function in (mean_loss, loss_fn)
    )
    assert torch.corrcoef(torch.stack([exact, found]))[0, 1] > 0.99


@pytest.mark.parametrize("criterion", ["taylor", "group-fisher"])
def test_what_modules_keep_between_calls_is_forgotten(criterion):
    """A module that caches what it computed from a parameter would hold on to the graph of the first batch."""
    model, batch = attention.attention_caching().double().eval(), torch.randn(2, 7, 6, dtype=torch.float64)
    graph = ifso.trace(model, batch)
    once = score(model, graph, mean_loss, [batch], criterion)
    assert model.attn.cache == {}
    model.attn.cache["bias"] = torch.randn(4, 7, 7, dtype=torch.float64)
    assert_close(score(model, graph, mean_loss, [batch, batch], criterion), once)
