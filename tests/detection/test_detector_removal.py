"""Masked equals compacted on every detector of torchvision: losses in train mode, boxes in eval mode; and its cost."""

from __future__ import annotations

import copy

import pytest
import torch
from mini import MiniRetina, scene
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from zoo_of_boxes import QUICK, SLOW, boxes_for, detector, leaves, relative_error, seeded

import ifso
from ifso.costs.cost import recount
from ifso.tasks.detection import detection_losses

TOLERANCE = 1e-4
VISIBLE = 1e-2
HEADS = ("cls_logits.weight", "bbox_reg.weight", "bbox_pred.weight", "cls_score.weight")

EVERY = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def thinned(graph: ifso.ChannelGraph, share: float = 0.3) -> dict[str, torch.Tensor]:
    """A legal choice that leaves out this share of every group."""
    random = torch.Generator().manual_seed(0)
    keep = graph.keep_all()
    for group in graph.groups:
        gone = min(round(share * group.size), group.size - 1)
        keep[group.name][torch.randperm(group.size, generator=random)[:gone]] = False
    return ifso.balance(graph, keep)


def answers(model: nn.Module, batch) -> dict[str, object]:
    """Boxes in eval mode, and losses with the statistics of the batch and with the running ones."""
    images, targets = batch
    kept = copy.deepcopy(model.state_dict())
    found = {"boxes": seeded(lambda: model.eval()(images))}
    for mode in (False, True):
        model.train(mode)
        found[f"losses, train={mode}"] = seeded(lambda: detection_losses(model, (images, copy.deepcopy(targets))))
    model.load_state_dict(kept)
    model.eval()
    return found


@pytest.mark.parametrize("name", EVERY)
def test_removal(name):
    """Of 30 % of the units: exact, at the cost that was promised, and of nothing that the head says."""
    model, batch = detector(name), boxes_for(name)
    graph = ifso.trace(model, (batch[0][:1],))
    keep = thinned(graph)
    shapes, whole = shapes_of(model), answers(model, batch)
    assert ifso.cost(model, graph).macs == counted(model, graph)
    with ifso.masked(model, graph, keep):
        soft = answers(model, batch)
    promised = ifso.cost(model, graph, keep)
    ifso.compact_(model, graph, keep)
    check_same(whole, soft, answers(model, batch))
    check_cost(promised, model, graph)
    check_heads(name, shapes, shapes_of(model), graph)


def check_same(whole, soft, hard) -> None:
    """Masked equals compacted, and both differ from the whole."""
    assert sum(len(each["boxes"]) for each in whole["boxes"]) > 0
    for what in whole:
        assert all(bool(leaf.isfinite().all()) for leaf in leaves(hard[what])), what
        assert relative_error(soft[what], hard[what]) <= TOLERANCE, what
        assert relative_error(whole[what], soft[what]) >= VISIBLE, f"{what}: the comparison proves nothing"


def check_cost(promised: ifso.Cost, model: nn.Module, graph: ifso.ChannelGraph) -> None:
    """MACs as the flop counter has them, where values do not decide how many regions there are."""
    assert promised.params == sum(parameter.numel() for parameter in model.parameters())
    if not promised.linear_macs:
        assert promised.macs == counted(model, graph)
    assert recount(graph, graph.kept(None), graph) == []


def check_heads(name: str, before, after, graph: ifso.ChannelGraph) -> None:
    """Classes and corners of boxes keep their number, and all else shrinks."""
    frozen = {(axis.parameter, axis.dim) for axis in graph.frozen}
    outputs = [key for key in before if key.endswith(HEADS)]
    assert outputs or name.startswith("ssd")
    assert all(before[key][0] == after[key][0] and (key, 0) in frozen for key in outputs)
    assert sum(before[key] != after[key] for key in before) > 0.5 * len(before)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def counted(model: nn.Module, graph: ifso.ChannelGraph) -> int:
    """MACs of the flop counter, which sees a shared head once for each level."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*graph.inputs)
    return counter.get_total_flops() // 2


def test_mini_macs_count_the_shared_head_once_for_each_level():
    model = MiniRetina().eval()
    graph = ifso.trace(model, (scene()[0][:1],))
    places = 8 * 10 + 4 * 5
    head = [term for term in graph.terms if term.where == "tower" and term.kind == "conv"]
    assert sum(term.count(graph.kept(None)) for term in head) == places * 4 * 4 * 9
    assert ifso.cost(model, graph).macs == counted(model, graph)
