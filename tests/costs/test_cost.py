"""Costs against PyTorch's own counter on the compacted network, against brute force, and against numbers by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from cases import ALL, CASES, FEW, Case, enliven_, prunable_cases, random_keep, removed, run
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ifso
from ifso.errors import KeepError, StaleGraphError


@torch.no_grad()
def flops(model: nn.Module, inputs: Any) -> int:
    """What PyTorch counts, with attention written out in functions that it knows."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run(model, inputs)
        return counter.get_total_flops()
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check_against_the_counter(model: nn.Module, graph: ifso.ChannelGraph, keep: dict[str, Tensor], inputs: Any) -> None:
    """The whole model now, and what is left of it after compaction."""
    whole, left = ifso.cost(model, graph), ifso.cost(model, graph, keep)
    assert (2 * whole.macs, whole.params) == (flops(model, inputs), parameters(model))
    ifso.compact_(model, graph, keep)
    assert (2 * left.macs, left.params) == (flops(model, inputs), parameters(model))
    assert not removed(keep) or left.params < whole.params


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@prunable_cases()
def test_macs_and_params(case, seed):
    check_against_the_counter(case.model(), case.graph(), random_keep(case.graph(), seed), case.inputs())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_cost_the_same_whether_they_are_one_kernel_or_not(kind):
    """In float32 a CPU runs an LSTM as one kernel, which PyTorch's counter does not know."""
    net, x = kind(6, 8, num_layers=2, bidirectional=True), torch.randn(5, 2, 6)
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    macs = 5 * 2 * 2 * gates * 8 * ((6 + 8) + (16 + 8))
    for dtype in (torch.float32, torch.float64):
        cost = ifso.cost(net.to(dtype), ifso.trace(net, x.to(dtype)))
        assert (cost.macs, cost.activations) == (macs, 5 * 2 * 2 * 2 * 2 * gates * 8)


def test_attention_costs_what_was_promised_whichever_kernel_its_new_sizes_take():
    case = CASES["one-head-alike"]
    model, graph = case.model(), case.graph()
    keep = {"q": torch.arange(8) < 7, "v": torch.arange(8) < 4}
    promised = ifso.cost(model, graph, keep)
    ifso.compact_(model, graph, keep)
    found = ifso.cost(model, ifso.trace(model, case.inputs()))
    assert (found.macs, found.activations, found.params) == (promised.macs, promised.activations, promised.params)


def vit() -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2)


def torchvision(name: str) -> Callable[[], nn.Module]:
    from torchvision import models

    return lambda: models.get_model(name, weights=None)


LARGER = {
    "resnet18": (torchvision("resnet18"), 32),
    "mobilenet_v3_small": (torchvision("mobilenet_v3_small"), 32),
    "shufflenet_v2_x0_5": (torchvision("shufflenet_v2_x0_5"), 32),
    "convnext_tiny": (torchvision("convnext_tiny"), 32),
    "vit_tiny": (vit, 64),
}
LARGEST = ("resnet18", "mobilenet_v3_small", "convnext_tiny")


@pytest.mark.parametrize(
    "name", ["shufflenet_v2_x0_5", "vit_tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGEST)]
)
def test_macs_and_params_of_known_networks(name):
    build, size = LARGER[name]
    model, inputs = build().eval(), torch.randn(1, 3, size, size)
    graph = ifso.trace(model, inputs)
    keep = random_keep(graph, seed=0, share=0.3)
    assert removed(keep) > 0
    check_against_the_counter(model, graph, keep, inputs)


@pytest.mark.parametrize("case", [case for case in ALL if not case.prunable], ids=lambda case: case.name)
def test_macs_and_params_where_nothing_can_go(case):
    model = case.model()
    cost = ifso.cost(model, case.graph())
    assert (2 * cost.macs, cost.params) == (flops(model, case.inputs()), parameters(model))


# ---- by hand --------------------------------------------------------------------------------------------------------


def test_plain_network_by_hand():
    """Two images of 8×8; 3 → 8 → 6 channels by 3×3 kernels; 6 → 5 linear."""
    case = CASES["plain"]
    cost = ifso.cost(case.model(), case.graph())
    positions = 2 * 8 * 8
    assert cost.conv_macs == positions * 9 * (3 * 8 + 8 * 6)
    assert cost.linear_macs == 2 * 6 * 5
    assert cost.matmul_macs == 0
    assert cost.macs == cost.conv_macs + cost.linear_macs
    assert cost.params == 9 * (3 * 8 + 8 * 6) + 2 * (8 + 6) + 6 * 5 + 5
    assert cost.activations == positions * (8 + 6) + 2 * 5


def test_plain_network_with_less_by_hand():
    case = CASES["plain"]
    keep = {"stem.conv": torch.arange(8) < 3, "body.conv": torch.arange(6) != 2}
    cost = ifso.cost(case.model(), case.graph(), keep)
    assert cost.conv_macs == 2 * 8 * 8 * 9 * (3 * 3 + 3 * 5)
    assert cost.linear_macs == 2 * 5 * 5
    assert cost.params == 9 * (3 * 3 + 3 * 5) + 2 * (3 + 5) + 5 * 5 + 5
    assert cost.activations == 2 * 8 * 8 * (3 + 5) + 2 * 5


def test_grouped_and_depthwise_by_hand():
    positions = 2 * 8 * 8
    cost = ifso.cost(CASES["grouped"].model(), CASES["grouped"].graph())
    assert cost.conv_macs == positions * 9 * (3 * 8 + 2 * 12 + 12 * 6)
    cost = ifso.cost(CASES["depthwise"].model(), CASES["depthwise"].graph())
    assert cost.conv_macs == positions * (9 * (3 * 8 + 8 + 16) + 16 * 6)


def test_transposed_convolution_by_hand():
    """Every input position meets every kernel position."""
    cost = ifso.cost(CASES["transposed"].model(), CASES["transposed"].graph())
    assert cost.conv_macs == 2 * (4 * 4 * 9 * 3 * 8 + 4 * 4 * 4 * 8 * 6 + 8 * 8 * 9 * 6 * 3)


def test_attention_by_hand():
    """2 × 7 tokens, width 8, 4 heads of 3: products of activations are counted apart."""
    case = CASES["attention"]
    cost = ifso.cost(case.model(), case.graph())
    assert cost.matmul_macs == 2 * 4 * (7 * 3 * 7) * 2
    assert cost.linear_macs == 2 * 7 * (6 * 8 + 8 * 36 + 12 * 8 + 8 * 10 + 10 * 8 + 8 * 5)
    assert cost.conv_macs == 0
    half = ifso.cost(case.model(), case.graph(), {"attn.qkv": torch.arange(4) < 2})
    assert half.matmul_macs == cost.matmul_macs // 2
    assert cost.linear_macs - half.linear_macs == 2 * 7 * (8 * 18 + 6 * 8)


def test_shared_head_counts_every_time_it_runs():
    """The tower of the FPN runs on 8×8, 4×4 and 2×2, its parameters exist once."""
    case = CASES["fpn"]
    graph = case.graph()
    saved = ifso.unit_costs(graph)["tower"]
    positions = 8 * 8 + 4 * 4 + 2 * 2
    assert saved.macs.tolist() == [positions * 9 * (8 + 3 + 4)] * 8
    assert saved.params.tolist() == [9 * (8 + 3 + 4) + 1 + 2] * 8
    assert saved.activations.tolist() == [positions] * 8


def test_resnet32_of_the_paper():
    """69.12 M multiply-adds: convolutions 69,124,096 and the last layer 640."""
    model = ifso.create_model("ifso:resnet32").eval()
    graph = ifso.trace(model, torch.zeros(1, 3, 32, 32))
    cost = ifso.cost(model, graph)
    assert (cost.macs, cost.linear_macs) == (69_124_736, 640)
    assert cost.conv_macs == 69_124_736 - 640


def test_all_numbers_by_name_and_in_words():
    case = CASES["plain"]
    cost = ifso.cost(case.model(), case.graph())
    assert cost.as_dict() == {
        name: getattr(cost, name)
        for name in ("macs", "conv_macs", "linear_macs", "matmul_macs", "params", "activations")
    }
    assert f"{cost.macs:,} MACs" in str(cost)
    assert "conv" in str(cost)


# ---- units ----------------------------------------------------------------------------------------------------------


FIELDS = ("macs", "conv_macs", "params", "activations")


@cache
def unbalanced(case: Case) -> tuple[ifso.Group, ...]:
    """Groups from which single units can go."""
    units = {unit for balance in case.graph().balances for unit in balance.blocks.flatten().tolist()}
    return tuple(
        group for group in case.graph().groups if not units & set(range(group.first, group.first + group.size))
    )


@pytest.mark.parametrize("share", [0.0, 0.4], ids=["whole", "pruned"])
@prunable_cases(few=FEW)
def test_unit_costs_are_what_removing_one_unit_saves(case, share):
    model, graph = case.model(), case.graph()
    keep = random_keep(graph, seed=1, share=share)
    now = ifso.cost(model, graph, keep)
    saved = ifso.unit_costs(graph, keep)
    assert saved.keys() == {group.name for group in graph.groups}
    for group in unbalanced(case):
        for unit in range(group.size):
            less = {**keep, group.name: keep[group.name] & (torch.arange(group.size) != unit)}
            then = ifso.cost(model, graph, less)
            for field in FIELDS:
                wanted = getattr(now, field) - getattr(then, field)
                assert int(getattr(saved[group.name], field)[unit]) == wanted, (group.name, unit, field)


def test_most_cases_have_groups_to_try():
    """Guards the test above."""
    assert sum(bool(unbalanced(case)) for case in ALL if case.prunable) > 0.8 * len(ALL)


@pytest.mark.parametrize(
    "name", ["plain", "residual", "concat", "depthwise", "grouped", "unet", "fpn", "shared-module", "flatten"]
)
def test_activations_are_what_the_layers_write(name):
    """All layers of these networks are modules, so their outputs can be counted one by one."""
    case = CASES[name]
    model, graph = case.model(), case.graph()
    keep = random_keep(graph, seed=0)
    counted = ifso.cost(model, graph, keep).activations
    ifso.compact_(model, graph, keep)
    sizes: list[int] = []
    for module in model.modules():
        if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
            module.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.numel()))
    run(model, case.inputs())
    assert counted == sum(sizes)


def test_balanced_units_add_up():
    """Where single units cannot go, what a whole balanced choice saves is still the difference."""
    case = CASES["grouped"]
    model, graph = case.model(), case.graph()
    keep = {"gconv.conv": torch.tensor([True, True, False] * 4)}
    saved = ifso.unit_costs(graph)["gconv.conv"]
    whole, left = ifso.cost(model, graph), ifso.cost(model, graph, keep)
    assert int(saved.macs[2::3].sum()) == whole.macs - left.macs
    assert int(saved.params[2::3].sum()) == whole.params - left.params
    assert int(saved.activations[2::3].sum()) == whole.activations - left.activations


def test_units_that_are_gone_save_nothing():
    case = CASES["plain"]
    saved = ifso.unit_costs(case.graph(), {"stem.conv": torch.arange(8) < 5})["stem.conv"]
    for field in FIELDS:
        assert getattr(saved, field)[5:].tolist() == [0, 0, 0]
        assert (getattr(saved, field)[:5] > 0).all()


def test_cost_needs_the_traced_model_and_its_groups():
    case = CASES["plain"]
    with pytest.raises(StaleGraphError, match="another model"):
        ifso.cost(CASES["residual"].model(), case.graph())
    with pytest.raises(KeepError, match="no group named 'nobody'"):
        ifso.cost(case.model(), case.graph(), {"nobody": torch.ones(8, dtype=torch.bool)})


def test_counting_does_not_run_the_model():
    case = CASES["plain"]
    model = case.model()
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    ifso.cost(model, case.graph(), random_keep(case.graph(), seed=0))
    ifso.unit_costs(case.graph())


def test_enlivened_models_keep_their_size():
    """Guards the cases: conditioning changes values only."""
    model = CASES["attention"].build()
    before = parameters(model)
    assert parameters(enliven_(model)) == before
