"""Operators of ATen spelt out for forward mode, which has no formula for them.

They are met in the backward pass and inside other functions, where :mod:`ifso.curvature.decompositions` does not see
them: dropout on a GPU, also that of attention, and sampling at a grid. PyTorch keeps a table of such forms, which it
looks into where it would otherwise refuse; nothing else in the process changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual

aten = torch.ops.aten

_NEAREST, _CUBIC = 1, 2
_BORDER, _REFLECTION = 1, 2


@cache
def load_forward_mode() -> None:
    """Let torch load its formulas, and take ours; it warns of deprecated functions that it calls itself in doing so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table: Any = import_module("torch._decomp.decompositions_for_jvp")
        for operator, rule in RULES.items():
            rule.__annotations__ = get_type_hints(rule)
            table.register_decomposition_for_jvp(operator)(rule)
            table._register_jit_decomposition_for_jvp(operator, use_python=True)


def native_dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    """λ times the mask that was drawn."""
    return grad_output * (mask * scale)


def grid_sampler_backward(
    grad_output: Tensor,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients of the image and of the places where it is sampled."""
    first, second = backward_of(
        lambda image, places: grid_sample(image, places, interpolation_mode, padding_mode, align_corners),
        grad_output,
        (input, grid),
        output_mask,
    )
    return first, second


def backward_of(
    function: Callable[..., Tensor], grad: Tensor, inputs: Sequence[Tensor], asked: Sequence[bool]
) -> list[Tensor]:
    """Gradients of the inputs that are ``asked``, zeros of others, all of them dual numbers where the inputs are."""
    with torch.enable_grad():
        leaves = [_leaf(tensor, wanted) for tensor, wanted in zip(inputs, asked, strict=True)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(function(*leaves), wanted, grad, allow_unused=True) if wanted else ())
    grads = [next(found) if leaf.requires_grad else None for leaf in leaves]
    return [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(grads, inputs, strict=True)]


def _leaf(tensor: Tensor, wanted: bool) -> Tensor:
    number, dot = unpack_dual(tensor)
    leaf = number.detach().requires_grad_(wanted)
    return leaf if dot is None else make_dual(leaf, dot.detach())


def grid_sample(image: Tensor, grid: Tensor, interpolation: int, padding: int, align_corners: bool) -> Tensor:
    """``F.grid_sample`` of an image [N, C, (D,) H, W] at a grid [N, (d,) h, w, 2 or 3], by plain indexing.

    The numbers of ``interpolation`` (linear, nearest, cubic) and ``padding`` (zeros, border, reflection) are ATen's.
    """
    sides = image.shape[2:]
    places = [
        ((one + 1) * (side - 1) / 2) if align_corners else (((one + 1) * side - 1) / 2)
        for one, side in zip(grid.unbind(-1)[::-1], sides, strict=True)
    ]
    if interpolation != _CUBIC:
        places = [_inside(place, side, padding, align_corners) for place, side in zip(places, sides, strict=True)]
    corners = [_corners(place, interpolation) for place in places]
    total = torch.zeros((), dtype=image.dtype, device=image.device)
    for corner in product(*corners):
        weight = torch.ones_like(places[0])
        index = []
        for (at, share), side in zip(corner, sides, strict=True):
            at = at if interpolation != _CUBIC else _inside(at, side, padding, align_corners).detach()
            weight = weight * share * ((at >= 0) & (at < side))
            index.append(at.clamp(0, side - 1).nan_to_num().long())
        total = total + _picked(image, index) * weight.unsqueeze(1)
    return total


def _picked(image: Tensor, index: Sequence[Tensor]) -> Tensor:
    """The pixels [N, C, …] at whole numbers [N, …]."""
    flat = torch.zeros_like(index[0])
    for one, side in zip(index, image.shape[2:], strict=True):
        flat = flat * side + one
    flat = flat.unsqueeze(1).expand(-1, image.shape[1], *flat.shape[1:])
    return image.flatten(2).gather(2, flat.flatten(2)).view(flat.shape)


def _corners(place: Tensor, interpolation: int) -> list[tuple[Tensor, Tensor]]:
    """Whole numbers around a place along one side, each with its share of the result."""
    number = place.detach()
    if interpolation == _NEAREST:
        return [(number.round(), torch.ones_like(number))]
    low = number.floor()
    part = place - low
    if interpolation != _CUBIC:
        return [(low, 1 - part), (low + 1, part)]
    shares = (_far(part + 1), _near(part), _near(1 - part), _far(2 - part))
    return [(low + shift, share) for shift, share in zip((-1, 0, 1, 2), shares, strict=True)]


def _near(x: Tensor, a: float = -0.75) -> Tensor:
    """Keys' cubic, up to 1 away."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _far(x: Tensor, a: float = -0.75) -> Tensor:
    """Keys' cubic, from 1 to 2 away."""
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def _inside(place: Tensor, side: int, padding: int, align_corners: bool) -> Tensor:
    """A place outside of the image led back to its border, or mirrored at it."""
    if padding == _REFLECTION:
        low, span = (0.0, side - 1.0) if align_corners else (-0.5, float(side))
        if not span:
            return torch.zeros_like(place)
        beyond = (place - low).abs()
        turns = (beyond.detach() / span).floor()
        rest = beyond - turns * span
        place = torch.where(turns % 2 == 0, rest + low, span + low - rest)
    return place.clamp(0, side - 1) if padding in (_BORDER, _REFLECTION) else place


RULES: dict[Any, Callable[..., Any]] = {
    aten.native_dropout_backward.default: native_dropout_backward,
    aten.grid_sampler_2d_backward.default: grid_sampler_backward,
    aten.grid_sampler_3d_backward.default: grid_sampler_backward,
}
