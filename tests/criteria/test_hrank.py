"""HRank against ranks counted one map at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import CASES
from reference.criteria import NETS, inputs_of
from torch import nn

import ifso
from ifso.criteria.scorer import score
from ifso.errors import ScoreError


def no_loss(model, batch):
    return model(batch).sum()


def ranks_of(maps):
    """Mean of the ranks of maps [N, H, W] or of single numbers [N]."""
    return np.mean([np.linalg.matrix_rank(np.atleast_2d(one)) for one in maps])


@pytest.mark.parametrize("name", ["residual", "grouped", "depthwise", "shared-module"])
def test_mean_rank_of_what_the_reading_layers_see(name):
    model = CASES[name].model()
    batch = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    batch[:, :, 2:] = 0
    batch[0] = batch[0, :, :1] * torch.ones(8, 1)
    seen = {}
    for spec in NETS[name].values():
        for layer in spec.read:
            module = model.get_submodule(layer.name)
            module.register_forward_pre_hook(
                lambda _, args, key=layer.name: seen.setdefault(key, []).append(args[0].detach().numpy())
            )
    no_loss(model, batch)
    wanted = {}
    for group, spec in NETS[name].items():
        ranks = [[] for _ in range(spec.size)]
        for layer in spec.read:
            for features in seen[layer.name]:
                for channel, unit in enumerate(layer.units(inputs_of(model.get_submodule(layer.name)))):
                    ranks[unit].append(ranks_of(features[:, channel]))
        wanted[group] = torch.tensor([np.mean(values) for values in ranks])
    for module in model.modules():
        module._forward_pre_hooks.clear()
    found = score(model, CASES[name].graph(), no_loss, [batch], "hrank")
    for group, values in wanted.items():
        torch.testing.assert_close(found[group], values)
    assert len({float(value) for value in torch.cat(list(wanted.values()))}) > 2


def identity(size):
    """A network that copies its input channels, so that their maps are what the second layer reads."""
    net = nn.Sequential(nn.Conv2d(size, size, 1, bias=False), nn.ReLU(), nn.Conv2d(size, 2, 1)).double()
    net[0].weight.data = torch.eye(size, dtype=torch.float64)[:, :, None, None]
    return net, ifso.trace(net, torch.zeros(1, size, 6, 6, dtype=torch.float64))


def test_known_ranks():
    net, graph = identity(4)
    maps = torch.zeros(1, 4, 6, 6, dtype=torch.float64)
    for rank in range(4):
        maps[0, rank, range(rank), range(rank)] = 1
    assert score(net, graph, no_loss, [maps, maps * 2], "hrank")["0"].tolist() == [0, 1, 2, 3]


def test_single_numbers_count_where_they_are_not_zero():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2)).double()
    net[0].weight.data = torch.eye(2, dtype=torch.float64)
    batch = torch.tensor([[1.0, -1.0], [1.0, 1.0], [2.0, -3.0], [1.0, 0.0]], dtype=torch.float64)
    assert score(net, ifso.trace(net, batch), no_loss, [batch], "hrank")["0"].tolist() == [1.0, 0.25]


def test_maps_along_one_or_three_dims():
    line = nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.Conv1d(3, 2, 1))
    assert score(line, ifso.trace(line, torch.ones(1, 2, 5)), no_loss, [torch.ones(1, 2, 5)], "hrank")["0"].max() <= 1
    cube = nn.Sequential(nn.Conv3d(1, 2, 1, bias=False), nn.Conv3d(2, 2, 1))
    batch = torch.zeros(1, 1, 3, 4, 4)
    batch[0, 0, range(3), range(3), range(3)] = 1
    assert score(cube, ifso.trace(cube, batch), no_loss, [batch], "hrank")["0"].tolist() == [3, 3]


def test_it_needs_no_gradient():
    net, graph = identity(3)
    net.requires_grad_(False)

    def loss_fn(model, batch):
        assert not torch.is_grad_enabled()
        return model(batch).sum()

    assert score(net, graph, loss_fn, [torch.rand(1, 3, 6, 6).double()], "hrank")["0"].tolist() == [6, 6, 6]


def test_features_that_are_not_finite():
    net, graph = identity(3)
    batch = torch.full((1, 3, 6, 6), torch.nan).double()
    with pytest.raises(ScoreError, match=r"the features read by 2\.weight are not finite"):
        score(net, graph, lambda model, x: model(x).nan_to_num().sum(), [batch], "hrank")


def test_a_layer_it_cannot_look_into_is_named():
    case = CASES["einsum"]
    with pytest.raises(ScoreError, match="saw no feature map of group 'embed'"):
        score(case.model(), case.graph(), no_loss, [case.inputs()], "hrank")
