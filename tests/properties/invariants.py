"""What must hold for every network, and a tally of what was seen.

``examine`` takes a description, traces, removes units at random, and compares: masked with compacted, costs with a
recount, files with the network they came from, removal in two steps with removal at once.
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cases import difference, outputs, removed, run, tensors
from random_layouts import Einsum
from random_networks import Net, RandomNetwork, build, inputs_of
from random_tokens import Multihead, ResidualWidthAttention, SeparateAttention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ifso
from ifso.costs.cost import recount
from ifso.errors import CompactionError, IfsoError, KeepError

EXACT = 1e-8
VISIBLE = 1e-6
CAUGHT = "computes something else than the masked one"
"""Numbers of channels that are computed with are seen only on fake tensors; elsewhere ``compact_`` refuses them."""

Keep = dict[str, Tensor]
Tags = dict[str, Tensor]
"""For each parameter the numbers its elements had in the whole network, in the shape it has now."""


@dataclass
class Tally:
    """What a run has seen."""

    networks: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    refused_removals: Counter[str] = field(default_factory=Counter)
    caught: int = 0
    nothing_to_remove: int = 0
    pruned: int = 0
    units: int = 0
    removed_units: int = 0
    visible: int = 0
    on_real_tensors: int = 0
    balanced: int = 0
    in_two_steps: int = 0
    partitions: int = 0
    parts: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Count what another run has seen, too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def examine(net: Net, tally: Tally, full: bool = True) -> None:
    """The invariants of one network; if not ``full``, those of a second trace only of every third network."""
    model, inputs = build(net), inputs_of(net)
    tally.networks += 1
    try:
        graph = ifso.trace(model, inputs)
    except IfsoError as error:
        assert_one_line(error)
        tally.refused[f"{type(error).__name__}: {error}"] += 1
        return
    tally.parts += model.built
    tally.units += graph.num_units
    tally.on_real_tensors += graph.on_real_tensors
    tally.balanced += bool(graph.balances)
    again = full or tally.networks % 3 == 0
    if again:
        assert description(ifso.trace(model, inputs)) == description(graph), "two traces of one network differ"
    assert_outputs_are_protected(model, graph)
    keep = legal_keep(model, graph, net.seed)
    if not removed(keep):
        tally.nothing_to_remove += 1
        return
    tally.pruned += 1
    tally.removed_units += removed(keep)
    try:
        smaller = check_removal(net, model, graph, keep, inputs, tally)
        check_files(net, smaller.model, inputs)
        if again:
            check_second_removal(net, graph, smaller, inputs, tally)
    except CompactionError as error:
        assert_one_line(error)
        if graph.on_real_tensors and CAUGHT in str(error):
            tally.caught += 1
        else:
            tally.refused_removals[str(error).split(";")[0]] += 1


def assert_one_line(error: IfsoError) -> None:
    """An error that a user meets is one line of words."""
    text = str(error)
    assert text, type(error)
    assert "\n" not in text, text


def description(graph: ifso.ChannelGraph) -> tuple[Any, ...]:
    """A graph as something that can be compared."""
    groups = [(group.name, group.first, group.size, sorted(group.flags), members(group)) for group in graph.groups]
    balances = [(one.where, one.blocks.tolist()) for one in graph.balances]
    attributes = [(item.module, item.name, item.position, item.labels.tolist()) for item in graph.attributes]
    return groups, list(graph.frozen), balances, attributes, graph.notes, str(graph)


def members(group: ifso.Group) -> list[tuple[Any, ...]]:
    """What a group is made of."""
    return [(member.parameter, member.dim, member.role, member.owner.tolist()) for member in group.members]


def assert_outputs_are_protected(model: RandomNetwork, graph: ifso.ChannelGraph) -> None:
    """What the last layers make is never offered."""
    offered = {(member.parameter, member.dim) for group in graph.groups for member in group.members}
    for number in range(len(model.ends)):
        assert not offered & {(f"ends.{number}.last.weight", 0), (f"ends.{number}.last.bias", 0)}


# ---- choosing -------------------------------------------------------------------------------------------------------


def legal_keep(model: nn.Module, graph: ifso.ChannelGraph, seed: int) -> Keep:
    """A random choice: of each group some units, all or none; made legal, units brought back where none is left."""
    random = torch.Generator().manual_seed(seed)
    keep = {}
    for group in graph.groups:
        share = (0.0, 0.3, 0.5, 0.7, 1.0)[int(torch.randint(5, (), generator=random))]
        keep[group.name] = torch.rand(group.size, generator=random) >= share
    if not removed(keep):
        keep = {group.name: torch.arange(group.size) % 2 == seed % 2 for group in graph.groups}
    legal = ifso.balance(graph, keep)
    why = refusal(model, graph, legal)
    if why:
        assert why.startswith("keep removes every channel"), why
        for group in graph.groups:
            keep[group.name][int(torch.randint(group.size, (), generator=random))] = True
        legal = ifso.balance(graph, keep)
        assert refusal(model, graph, legal) == ""
    return legal


def refusal(model: nn.Module, graph: ifso.ChannelGraph, keep: Keep) -> str:
    """Why the choice is not accepted, in one line; nothing if it is."""
    try:
        with ifso.masked(model, graph, keep):
            return ""
    except KeepError as error:
        assert_one_line(error)
        return str(error)


# ---- one removal ----------------------------------------------------------------------------------------------------


@dataclass
class Smaller:
    """A compacted network with the tags of its elements."""

    model: RandomNetwork
    tags: Tags


def check_removal(
    net: Net, model: RandomNetwork, graph: ifso.ChannelGraph, keep: Keep, inputs: Any, tally: Tally
) -> Smaller:
    """Masked and compacted agree in train mode, in eval mode and in gradients; costs are what was promised."""
    plain = outputs(model, inputs)
    with ifso.masked(model, graph, keep):
        train_outputs = _step(model.train(), inputs)
        soft = outputs(model.eval(), inputs)
    whole, promised = ifso.cost(model, graph), ifso.cost(model, graph, keep)
    assert (2 * whole.macs, whole.params) == recounted(model, inputs), "cost of the whole network"
    tally.visible += difference(plain, soft) > VISIBLE
    tags = compact_with_tags(model, graph, keep, number_elements(model))
    assert_cost_of_what_is_left(model, promised, inputs)
    assert difference(soft, outputs(model, inputs)) <= EXACT, "eval mode"
    gradients = _gradients(model)
    statistics = [buffer.clone() for buffer in model.buffers() if buffer.is_floating_point()]
    compacted = copy.deepcopy(model)
    assert difference(train_outputs, _step(compacted.train(), inputs)) <= EXACT, "train mode"
    moved = [buffer for buffer in compacted.buffers() if buffer.is_floating_point()]
    for one, other in zip(statistics, moved, strict=True):
        torch.testing.assert_close(other, one, rtol=EXACT, atol=EXACT, msg="running statistics")
    _compare_gradients(gradients, _gradients(compacted))
    model.zero_grad()
    return Smaller(model, tags)


def _step(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Outputs; gradients are left in the parameters."""
    model.zero_grad()
    found = list(tensors(run(model, inputs)))
    weights = (torch.linspace(0.5, 1.5, tensor.numel(), dtype=tensor.dtype).view(tensor.shape) for tensor in found)
    sum((tensor.sin() * weight).sum() for tensor, weight in zip(found, weights, strict=True)).backward()
    return [tensor.detach() for tensor in found]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _compare_gradients(soft: Mapping[str, Tensor], hard: Mapping[str, Tensor]) -> None:
    assert soft.keys() == hard.keys(), "parameters with gradients"
    scale = max((float(grad.abs().max()) for grad in hard.values()), default=1.0)
    for name, grad in hard.items():
        assert grad.shape == soft[name].shape, name
        assert float((soft[name] - grad).abs().max()) <= EXACT * max(scale, 1.0), f"gradient of {name}"


def assert_cost_of_what_is_left(model: nn.Module, promised: ifso.Cost, inputs: Any) -> None:
    """PyTorch multiplies element by element where an einsum sums over one channel only, and counts nothing there."""
    flops, params = recounted(model, inputs)
    assert promised.params == params, "parameters of what is left"
    assert 2 * promised.macs == flops or (has_thin_einsum(model) and 2 * promised.macs > flops), "MACs of what is left"


def has_thin_einsum(model: nn.Module) -> bool:
    """Is there an einsum with an axis of one channel?"""
    return any(isinstance(module, Einsum) and 1 in module.matrix.shape for module in model.modules())


def is_counted_otherwise(model: nn.Module) -> bool:
    """Does PyTorch take other functions for what is left: a thin einsum, attention with values of another size?"""
    attentions = [module for module in model.modules() if isinstance(module, SeparateAttention)]
    return has_thin_einsum(model) or any(one.q.out_features != one.v.out_features for one in attentions)


@torch.no_grad()
def recounted(model: nn.Module, inputs: Any) -> tuple[int, int]:
    """(2 × MACs, parameters) by PyTorch's own counter, attention written out in functions that it knows."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return counter.get_total_flops(), sum(parameter.numel() for parameter in model.parameters())


# ---- files ----------------------------------------------------------------------------------------------------------


def check_files(net: Net, model: RandomNetwork, inputs: Any) -> None:
    """Saved and loaded: the same outputs; saved again: the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        ifso.save(model, first)
        loaded = ifso.load(first, build(net))
        ifso.save(loaded, second)
        for name in ("recipe.json", "model.safetensors"):
            assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert difference(outputs(model, inputs), outputs(loaded.eval(), inputs)) == 0


# ---- two removals ---------------------------------------------------------------------------------------------------


def number_elements(model: nn.Module) -> Tags:
    """A number of its own for every element of every parameter."""
    tags, first = {}, 0
    for name, parameter in model.named_parameters():
        tags[name] = torch.arange(first, first + parameter.numel()).view(parameter.shape)
        first += parameter.numel()
    return tags


def compact_with_tags(model: nn.Module, graph: ifso.ChannelGraph, keep: Keep, tags: Tags) -> Tags:
    """Compact the model; the tags shrink along as the state of an optimizer does."""
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD(list(named.values()), lr=1.0)
    for name, parameter in named.items():
        optimizer.state[parameter] = {"tag": tags[name]}
    ifso.compact_(model, graph, keep, optimizer=optimizer)
    return {name: optimizer.state[parameter]["tag"] for name, parameter in named.items()}


def elements(graph: ifso.ChannelGraph, tags: Tags) -> dict[tuple[str, int], frozenset[int]]:
    """For each unit (group, number) the tags of the elements that would go with it."""
    found: dict[tuple[str, int], set[int]] = {}
    for group in graph.groups:
        for member in group.members:
            if member.parameter not in tags:
                continue
            tag = tags[member.parameter]
            owner = member.owner.view(_owner_shape(member, tag)).expand(tag.shape)
            for unit in range(group.size):
                found.setdefault((group.name, unit), set()).update(tag[owner == unit].tolist())
    return {unit: frozenset(tags) for unit, tags in found.items()}


def _owned(member: ifso.Member) -> tuple[int, ...]:
    return (member.dim,) if member.owner.dim() == 1 else (0, member.dim)


def _owner_shape(member: ifso.Member, tag: Tensor) -> list[int]:
    owned = _owned(member)
    return [tag.shape[d] if d in owned else 1 for d in range(tag.dim())]


def check_second_removal(net: Net, graph: ifso.ChannelGraph, smaller: Smaller, inputs: Any, tally: Tally) -> None:
    """The smaller network's own graph; removing more of it equals removing everything at once."""
    again = ifso.trace(smaller.model, inputs)
    model = build(net)
    before, after = elements(graph, number_elements(model)), elements(again, smaller.tags)
    left = _numbers_in(smaller.tags)
    kept = graph.kept(survivors(graph, before, left))
    if not is_counted_otherwise(smaller.model):
        assert recount(graph, kept, again) == [], "costs that the smaller network's own graph counts"
    wanted = {own & left for own in before.values() if own & left}
    if is_roomy(graph, kept) and not any(map(_takes_head_size_from_elsewhere, smaller.model.modules())):
        assert set(after.values()) == wanted, "the partition of the smaller network"
        tally.partitions += 1
    more = legal_keep(smaller.model, again, net.seed + 1)
    for (group, unit), own in after.items():
        more[group][unit] |= own not in wanted
    more = ifso.balance(again, more)
    if not removed(more) or any(not more[group][unit] and own not in wanted for (group, unit), own in after.items()):
        return
    tags = compact_with_tags(smaller.model, again, more, smaller.tags)
    at_once = survivors(graph, before, _numbers_in(tags))
    if not is_roomy(graph, kept) and refusal(model, graph, at_once):
        return
    found = compact_with_tags(model, graph, at_once, number_elements(model))
    tally.in_two_steps += 1
    for name, tag in tags.items():
        assert torch.equal(tag, found[name]), f"{name} after two removals and after one"


def _numbers_in(tags: Tags) -> set[int]:
    return set(torch.cat([tag.flatten() for tag in tags.values()]).tolist())


def survivors(graph: ifso.ChannelGraph, units: Mapping[tuple[str, int], frozenset[int]], left: set[int]) -> Keep:
    """The choice that kept every unit of which an element is left."""
    keep = graph.keep_all()
    for (group, unit), own in units.items():
        keep[group][unit] = bool(own & left)
    return keep


def is_roomy(graph: ifso.ChannelGraph, kept: Tensor) -> bool:
    """Is every axis and every group left with two units or more, every block with two channels?

    Otherwise the smaller network may offer other units: the last one of an axis must stay, a single head is made of
    channels again, a grouped convolution with one channel in each group is a depthwise one.
    """
    layers = [layer for layout in graph.layouts.values() for layer in layout.layers]
    rows = [row[kept[row]] for layer in layers for row in _rows(layer)]
    return (
        all(row.numel() == 0 or len(row.unique()) > 1 for row in rows)
        and all(int(kept[group.units].sum()) > 1 for group in graph.groups)
        and all(int(one.counts(kept).min()) > 1 for one in graph.balances)
    )


def _takes_head_size_from_elsewhere(module: nn.Module) -> bool:
    """Attention whose units depend on more than its layers.

    Written out, the layer that stands for PyTorch's divides by its head size, which then stays. Where the head size
    comes from the input's width, rehearsals decide what is offered, and those of another network may differ.
    """
    slim = isinstance(module, Multihead) and module.weights and type(module.attn) is not nn.MultiheadAttention
    return slim or isinstance(module, ResidualWidthAttention)


def _rows(layer: Tensor) -> Tensor:
    varying = [dim for dim, size in enumerate(layer.shape) if size > 1]
    return layer.reshape(1, -1) if len(varying) < 2 else layer.reshape(layer.shape[0], -1)
