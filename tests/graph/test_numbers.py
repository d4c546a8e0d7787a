"""A number of channels that is computed with is seen wherever it goes: in arguments, constants, numpy and Python."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import difference, outputs
from torch import Tensor, nn

import ifso
from ifso.graph.scalar_arguments import SIZES, values_of

EXACT = 1e-10


class Net(nn.Module):
    """Two linear layers with a function of the features and their number between them."""

    def __init__(self, between: Callable[[Tensor, int], Tensor]):
        super().__init__()
        self.a, self.between, self.b = nn.Linear(6, 8), between, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(self.between(h, h.shape[-1]))


ARGUMENTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "add alpha": lambda h, c: torch.add(h, h, alpha=c),
    "sub alpha": lambda h, c: torch.sub(h, h * h, alpha=c),
    "rsub": lambda h, c: torch.rsub(h, h * h, alpha=c),
    "add_ alpha": lambda h, c: h.add_(h.clone(), alpha=c),
    "addcmul value": lambda h, c: torch.addcmul(h, h, h, value=c),
    "addcdiv value": lambda h, c: torch.addcdiv(h, h, h.abs() + 1, value=c),
    "addmm alpha": lambda h, c: torch.addmm(h, torch.ones(4, 4, dtype=h.dtype), h, alpha=1 / c),
    "addmm beta": lambda h, c: torch.addmm(h, torch.ones(4, 4, dtype=h.dtype), h, beta=1 / c),
    "baddbmm alpha": lambda h, c: torch.baddbmm(
        h[None], torch.ones(1, 4, 4, dtype=h.dtype), h[None], alpha=c**-0.5)[0],
    "lerp": lambda h, c: torch.lerp(h, h * h, 1 / c),
    "leaky_relu": lambda h, c: F.leaky_relu(h, 1 / c),
    "leaky_relu_": lambda h, c: F.leaky_relu(h.clone(), 1 / c, inplace=True),
    "elu": lambda h, c: F.elu(h, c / 4),
    "celu": lambda h, c: F.celu(h, c / 4),
    "hardtanh": lambda h, c: F.hardtanh(h, -1 / c, 1 / c),
    "hardshrink": lambda h, c: F.hardshrink(h, 1 / c),
    "softshrink": lambda h, c: F.softshrink(h, 1 / c),
    "softplus": lambda h, c: F.softplus(h, beta=c),
    "threshold": lambda h, c: F.threshold(h, 1 / c, 0.1),
    "clamp min": lambda h, c: h.clamp(min=-1 / c),
    "clamp max": lambda h, c: h.clamp(max=1 / c),
    "clamp_min": lambda h, c: torch.clamp_min(h, 1 / c),
    "masked_fill": lambda h, c: h.masked_fill(h > 0, 1 / c),
    "where": lambda h, c: torch.where(h > 0, h, 1 / c),
    "greater": lambda h, c: h * (h > 1 / c),
    "maximum": lambda h, c: torch.maximum(h, torch.tensor(1 / c, dtype=h.dtype)),
    "layer_norm eps": lambda h, c: F.layer_norm(h, (c,), eps=c),
    "rms_norm eps": lambda h, c: F.rms_norm(h, (c,), eps=c),
    "batch_norm eps": lambda h, c: F.batch_norm(h, None, None, training=True, eps=c),
    "group_norm eps": lambda h, c: F.group_norm(h, 1, eps=c),
    "normalize eps": lambda h, c: F.normalize(h, eps=c),
    "normalize p": lambda h, c: F.normalize(h, p=c / 2),
    "nan_to_num": lambda h, c: torch.nan_to_num(h.log(), nan=c),
    "pow": lambda h, c: h.abs() ** (c / 8),
    "pow of a number": lambda h, c: (c / 8) ** h,
    "remainder": lambda h, c: torch.remainder(h, 1 / c),
    "fmod": lambda h, c: h.fmod(1 / c),
    "mul_": lambda h, c: h.mul_(c),
    "div rounding": lambda h, c: torch.div(h, 1 / c, rounding_mode="floor"),
    "xlogy": torch.xlogy,
    "full": lambda h, c: h * torch.full((1,), c, dtype=h.dtype),
    "full_like": lambda h, c: h * torch.full_like(h, c),
    "new_full": lambda h, c: h * h.new_full((1,), c),
    "fill_": lambda h, c: h * torch.empty(1, dtype=h.dtype).fill_(c),
    "scalar_tensor": lambda h, c: h * torch.scalar_tensor(c, dtype=h.dtype),
    "tensor": lambda h, c: h * torch.tensor(c),
    "tensor of a list": lambda h, c: h * torch.tensor([[c]]),
    "as_tensor": lambda h, c: h * torch.as_tensor(float(c)),
    "new_tensor": lambda h, c: h * h.new_tensor(c),
    "from_numpy": lambda h, c: h * torch.from_numpy(np.full(1, c)),
    "linspace": lambda h, c: h * torch.linspace(1, c, 3, dtype=h.dtype).sum(),
    "arange step": lambda h, c: h * torch.arange(0, 1, 0.25 + 0.01 * c).max(),
    "roll of the batch": lambda h, c: h + h.detach().roll(c % 3, 0),
    "tril": lambda h, c: torch.ones(4, 4, dtype=h.dtype).tril(c - 7) @ h,
    "slice of the batch": lambda h, c: h + h[c % 4 : c % 4 + 1],
    "row of the batch": lambda h, c: h + h[c % 4],
    "sdpa scale": lambda h, c: F.scaled_dot_product_attention(h[None], h[None], h[None], scale=1 / c)[0],
}  # fmt: skip

LEAVING: dict[str, Callable[[Tensor, int], Tensor]] = {
    "numpy mean": lambda h, c: h * float(h.detach().numpy().mean()),
    "numpy size": lambda h, c: h * h.detach().numpy().size,
    "numpy std": lambda h, c: h * float(np.std(h.detach().numpy())),
    "numpy argmax": lambda h, c: h * int(h.detach().numpy().argmax()),
    "asarray": lambda h, c: h * float(np.asarray(h.detach()).sum()),
    "tolist": lambda h, c: h * statistics.mean(h[0].tolist()),
    "length of a list": lambda h, c: h * len(h[0].tolist()),
    "item": lambda h, c: h * h.sum().item(),
    "float": lambda h, c: h * float(h.mean()),
}


@pytest.mark.parametrize("between", (ARGUMENTS | LEAVING).values(), ids=(ARGUMENTS | LEAVING).keys())
def test_what_is_computed_with_stays_or_is_exact(between):
    torch.manual_seed(0)
    model, x = Net(between).double(), torch.randn(4, 6, dtype=torch.float64)
    graph = ifso.trace(model, x)
    if not graph.groups:
        assert any("computes with how many there are" in item.reason or "aten" in item.reason or "leave torch" in
                   item.reason or "size that is fixed" in item.reason for item in graph.frozen)  # fmt: skip
        return
    keep = {"a": torch.arange(8) >= 3}
    with ifso.masked(model, graph, keep):
        soft = outputs(model, x)
    ifso.compact_(model, graph, keep, verify=False)
    assert difference(soft, outputs(model, x)) <= EXACT


def test_numbers_of_other_things_hold_nothing_fast():
    """Arguments that do not depend on the channels, and sizes that follow them."""
    free = [
        lambda h, c: F.leaky_relu(torch.add(h, h, alpha=0.5), 0.2).clamp(max=3),
        lambda h, c: F.layer_norm(h, (c,), eps=1e-3),
        lambda h, c: h.view(2, 2, c).reshape(4, c) * torch.tensor(2.0),
        lambda h, c: h * torch.full((1,), 3.0),
        lambda h, c: h[1:3].repeat(2, 1),
    ]
    for between in free:
        graph = ifso.trace(Net(between).double(), torch.randn(4, 6, dtype=torch.float64))
        assert [group.size for group in graph.groups] == [8]


def _schemas() -> list[tuple[object, object]]:
    """(operator, argument) of every ATen operator that takes a number and is called by tensors."""
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            func = getattr(packet, overload)
            if any("Tensor" in str(argument.type) for argument in func._schema.arguments):
                found += [(func, argument) for argument in func._schema.arguments]
    return found


def test_every_number_in_the_schemas_is_a_value_or_a_named_size():
    """Each argument of each operator in turn: other numbers there are other values, unless it is known as a size."""
    seen = 0
    for func, argument in _schemas():
        kind = str(argument.type)
        whole = kind in ("int", "SymInt", "Optional[int]", "List[int]", "Optional[List[int]]")
        if not whole and not any(word in kind for word in ("number", "float")):
            continue
        one, other = (3, 5) if whole else (0.25, 0.75)
        if "List" in kind:
            one, other = [one], [other]
        found = [values_of(func, (), {argument.name: number}, lambda tensor: None) for number in (one, other)]
        if not argument.kwarg_only:
            place = [item.name for item in func._schema.arguments].index(argument.name)
            args = [(*(None,) * place, number) for number in (one, other)]
            found = [values_of(func, arg, {}, lambda tensor: None) for arg in args]
        is_size = whole and (argument.name in SIZES or argument.name in ("start", "end", "index"))
        assert (found[0] != found[1]) or is_size, (func, argument.name)
        seen += found[0] != found[1]
    assert seen > 1000
