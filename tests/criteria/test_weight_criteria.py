"""Criteria that look at weights alone, against loops over slices written out by hand."""

from __future__ import annotations

import pytest
import torch
from cases import CASES
from reference.criteria import NETS, filter_of, inputs_of, outputs_of, per_unit, reading_slice
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import ifso
from ifso.criteria.scorer import score
from ifso.criteria.weights import Random
from ifso.errors import ScoreError

ALL = pytest.mark.parametrize("name", NETS)


def scored(name, criterion, **options):
    case = CASES[name]
    model = case.model()
    return model, score(model, case.graph(), None, None, criterion, **options)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-12, atol=1e-14, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("p", [1, 2])
@ALL
def test_magnitude(name, p):
    model, found = scored(name, "magnitude", p=p)
    wanted = {}
    for group, spec in NETS[name].items():
        wanted[group] = torch.zeros(spec.size, dtype=torch.float64)
        for layer in spec.read:
            module = model.get_submodule(layer.name)
            wanted[group] += per_unit(
                spec.size, layer, inputs_of(module), lambda i, m=module: (reading_slice(m, i).abs() ** p).sum()
            )
        for layer in spec.out:
            module = model.get_submodule(layer.name)
            own = module.weight.detach().abs() ** p, module.bias.detach().abs() ** p
            wanted[group] += own[0].sum(1) + own[1]
    assert_same(found, wanted)


@ALL
def test_magnitude_average(name):
    model, found = scored(name, "magnitude-average")
    wanted = {}
    for group, spec in NETS[name].items():
        wanted[group] = torch.zeros(spec.size, dtype=torch.float64)
        for layer in spec.made:
            module = model.get_submodule(layer.name)
            units = layer.units(outputs_of(module))
            for unit in range(spec.size):
                own = [filter_of(module, channel) for channel, owner in enumerate(units) if owner == unit]
                wanted[group][unit] += torch.stack(own).abs().mean()
    assert_same(found, wanted)


def test_magnitude_average_counts_only_weights_that_are_left():
    case = CASES["plain"]
    model, graph = case.model(), case.graph()
    keep = {"stem.conv": torch.arange(8) < 3}
    found = score(model, graph, None, None, "magnitude-average", keep=keep)
    torch.testing.assert_close(found["body.conv"], model.body.conv.weight.detach()[:, :3].abs().mean((1, 2, 3)))


def test_magnitude_average_of_a_parametrised_layer_is_that_of_the_weight_it_uses():
    net = nn.Sequential(weight_norm(nn.Conv2d(2, 4, 1)), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
    with torch.no_grad():
        net[0].parametrizations.weight.original1.mul_(torch.tensor([1.0, 10.0, 0.1, 3.0])[:, None, None, None])
    found = score(net, ifso.trace(net, torch.zeros(1, 2, 4, 4).double()), None, None, "magnitude-average")
    torch.testing.assert_close(next(iter(found.values())), net[0].weight.detach().abs().mean((1, 2, 3)))


@ALL
def test_fpgm(name):
    model, found = scored(name, "fpgm")
    wanted = {}
    for group, spec in NETS[name].items():
        wanted[group] = torch.zeros(spec.size, dtype=torch.float64)
        for layer in spec.made:
            module = model.get_submodule(layer.name)
            filters = [filter_of(module, channel) for channel in range(outputs_of(module))]
            wanted[group] += per_unit(
                spec.size, layer, len(filters), lambda i, f=filters: sum((f[i] - other).norm() for other in f)
            )
    assert_same(found, wanted)


def test_fpgm_measures_distances_to_all_filters_of_the_layer_that_are_left():
    """The eight filters of ``stem`` are four units that pass by and four that go through the branch."""
    case = CASES["shufflenet-v2"]
    model, graph = case.model(), case.graph()
    keep = {"stem.conv": torch.tensor([1, 0, 1, 1]).bool(), "stem.conv#2": torch.tensor([1, 1, 1, 0]).bool()}
    keep |= {"unit.pw2.conv": torch.tensor([1, 1, 0, 1]).bool()}
    found = score(model, graph, None, None, "fpgm", keep=keep)
    filters = model.stem.conv.weight.detach()
    left = [0, 2, 3, 4, 5, 6]
    wanted = [sum(float((filters[i] - filters[j]).norm()) for j in left) if i in left else 0.0 for i in range(8)]
    torch.testing.assert_close(torch.cat([found["stem.conv"], found["stem.conv#2"]]).tolist(), wanted)


@pytest.mark.parametrize("name", ["residual", "grouped", "depthwise", "shared-module"])
def test_bn_scale(name):
    model, found = scored(name, "bn-scale")
    wanted = {}
    for group, spec in NETS[name].items():
        wanted[group] = torch.zeros(spec.size, dtype=torch.float64)
        for layer in spec.norms:
            gain = model.get_submodule(layer.name).weight.detach()
            wanted[group] += per_unit(spec.size, layer, len(gain), lambda i, g=gain: g[i].abs())
    assert_same(found, wanted)


class FrozenNorm(nn.Module):
    """As detectors have them: a norm whose numbers are buffers."""

    def __init__(self, size):
        super().__init__()
        for key in ("weight", "bias"):
            self.register_buffer(key, torch.linspace(-1, 1, size)[:, None, None])

    def forward(self, x):
        return x * self.weight + self.bias


@pytest.mark.parametrize("norm", [FrozenNorm(4), nn.GroupNorm(4, 4), nn.InstanceNorm2d(4, affine=True)])
def test_bn_scale_takes_other_norms(norm):
    net = nn.Sequential(nn.Conv2d(2, 4, 1), norm, nn.ReLU(), nn.Conv2d(4, 2, 1))
    norm.weight.data.copy_(torch.tensor([1.0, -2.0, 0.5, 0.0]).view(norm.weight.shape))
    found = score(net, ifso.trace(net, torch.zeros(1, 2, 4, 4)), None, None, "bn-scale")
    assert found["0"].tolist() == [1.0, 2.0, 0.5, 0.0]


@pytest.mark.parametrize("name", ["transposed", "norms-without-gains", "prelu"])
def test_bn_scale_without_a_norm_names_the_group_and_what_to_use(name):
    first = {"transposed": "up", "norms-without-gains": "conv1", "prelu": "conv1"}[name]
    with pytest.raises(ScoreError, match=f"group '{first}' .* no norm layer .* magnitude"):
        scored(name, "bn-scale")


def test_a_group_without_filters_is_refused():
    graph = CASES["plain"].graph()
    makers = {member.parameter for member in graph.groups[0].members if member.role == "produces"}
    members = tuple(member for member in graph.groups[0].members if member.role != "produces")
    other = ifso.Group("stem.conv", 0, 8, members)
    assert makers
    bare = type(graph)(**{**vars_of(graph), "groups": (other, *graph.groups[1:])})
    for criterion in ("magnitude-average", "fpgm"):
        with pytest.raises(ScoreError, match=r"'stem\.conv' is made by no filters"):
            score(CASES["plain"].model(), bare, None, None, criterion)


def vars_of(graph):
    return {name: getattr(graph, name) for name in graph.__dataclass_fields__}


def test_random_is_its_own_generator():
    case = CASES["residual"]
    model, graph = case.model(), case.graph()
    state = torch.random.get_rng_state()
    first = score(model, graph, None, None, "random")
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(5)
    again, other = score(model, graph, None, None, Random()), score(model, graph, None, None, "random", seed=1)
    values, others = torch.cat(list(first.values())), torch.cat(list(other.values()))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert values.unique().numel() == graph.num_units
    assert bool(((values >= 0) & (values < 1)).all())
    assert not torch.equal(values, others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_added_up_in_full(dtype):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 5000))
    net[1].weight.data.fill_(256.0)
    graph = ifso.trace(net, torch.zeros(1, 2))
    assert score(net.to(dtype), graph, None, None, "magnitude", p=2)["0"].tolist() == [5000 * 256.0**2] * 2
