"""One rule per kind of ATen call: how channel ids pass through it. A new rule is one function and its registration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ifso.graph.channel_ids import Labels
from ifso.graph.tape import Call

Rule = Callable[[Call, Labels], None]
RULES: dict[str, Rule] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen operators, named without overload (``"aten.convolution"``)."""

    def register(function: Rule) -> Rule:
        for op in ops:
            RULES[op] = function
        return function

    return register


def find(call: Call) -> Rule:
    """The rule for a call: by name, by PyTorch's own pointwise tag, or the one that freezes."""
    for name in (call.op, call.op.removesuffix("_")):
        if name in RULES:
            return RULES[name]
        if _is_pointwise(name):
            return pointwise.pointwise
    return unknown


def _is_pointwise(op: str) -> bool:
    """Return whether any overload of the operator carries the tag."""
    namespace, _, name = op.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def unknown(call: Call, labels: Labels) -> None:
    """No rule: that is the reason, with the operator's name."""
    hold(call, labels, f"passes through {call.op}, for which there is no rule")


def hold(call: Call, labels: Labels, reason: str) -> None:
    """Whatever channels go into a call must stay, and none come out."""
    labels.freeze_all(call.inputs, reason)
    first = next(call.inputs, None)
    for output in call.outputs:
        labels.set(output, (), like=first)


from ifso.graph.rules import joins, layout, pointwise, products, spatial, statistics  # noqa: E402, F401
