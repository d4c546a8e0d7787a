"""Slow float64 truth for second derivatives of a loss L(W, M): the network run on M ⊙ W, differentiated twice.

Nothing here comes from ``ifso.curvature``. Of the channel graph only the members are used: a mask entry scales the
slices that read its unit (role ``"consumes"``), or, where nothing reads it, the slices and biases that make it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._decomp.decompositions import grid_sampler_2d
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import ifso

Place = tuple[str, int]
"""A parameter and the dim along which masks scale it."""


def mask_places(graph: ifso.ChannelGraph) -> dict[Place, Tensor]:
    """For every place the number of the unit that owns each position, -1 where none does."""
    places: dict[Place, Tensor] = {}
    for group in graph.groups:
        for member in _masked(group, graph):
            owner = torch.where(member.owner < 0, -1, member.owner + group.first)
            before = places.setdefault((member.parameter, member.dim), owner)
            places[member.parameter, member.dim] = torch.where(owner < 0, before, owner)
    return places


def _masked(group: ifso.Group, graph: ifso.ChannelGraph) -> list[ifso.Member]:
    consumers = [member for member in group.members if member.role == "consumes"]
    normed = [parameter for parameter, _ in graph.gains.values()]
    if consumers and not any(member.parameter in normed for member in consumers):
        return consumers
    makers = [member for member in group.members if member.role == "produces"]
    ends = ("weight_g", "parametrizations.weight.original0", "weight")
    layers = [next(m.parameter.removesuffix(end) for end in ends if m.parameter.endswith(end)) for m in makers]
    return makers + [member for member in group.members if member.parameter in [f"{layer}bias" for layer in layers]]


def layer_weights(model: nn.Module) -> list[str]:
    """Names of the weights of conv and linear modules."""
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    return [f"{name}.weight" if name else "weight" for name, _ in modules]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    rest = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    return v * (g / v.square().sum(rest, keepdim=True).sqrt())


def _multi_margin(x: Tensor, target: Tensor, **_: Any) -> Tensor:
    right = x.gather(1, target[:, None])
    others = F.one_hot(target, x.shape[1]) == 0
    return ((1 - right + x).clamp(min=0) * others).mean()


def _grid_sample(
    x: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False
) -> Tensor:
    modes = ("bilinear", "nearest", "bicubic").index(mode), ("zeros", "border", "reflection").index(padding_mode)
    return grid_sampler_2d(x, grid, *modes, align_corners)


class _WrittenOut(TorchFunctionMode):
    """Formulas for functions whose second derivative PyTorch lacks or, for weight norm on a CPU, has wrong."""

    formulas: ClassVar[dict[Any, Callable[..., Tensor]]] = {
        torch._weight_norm: _weight_norm,
        F.hardsigmoid: lambda x, inplace=False: (x / 6 + 0.5).clamp(0, 1),
        F.multi_margin_loss: _multi_margin,
        F.grid_sample: _grid_sample,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.formulas.get(func, func)(*args, **(kwargs or {}))


class _Loss(nn.Module):
    """``loss_fn(model, batch)`` as a module, so that ``functional_call`` can put in other weights."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor]):
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> Tensor:
        return self.loss_fn(self.model, batch)


class Reference:
    """L(W, M) of a network, its gradient and every second derivative, with one mask per place and unit [P, U].

    ``weights`` names the parameters of W, laid end to end in that order.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ifso.ChannelGraph,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        batch: Any,
        weights: Iterable[str],
    ) -> None:
        self._module = _Loss(copy.deepcopy(model), loss_fn)
        self._batch = batch
        self.places = mask_places(graph)
        self.units = graph.num_units
        named = dict(self._module.model.named_parameters())
        self.w = {name: named[name].detach().clone().requires_grad_() for name in weights}
        self._rest = {name: tensor.detach() for name, tensor in named.items() if name not in self.w}
        self.m = torch.ones(len(self.places), self.units, dtype=next(iter(self.w.values())).dtype).requires_grad_()

    def loss(self, w: dict[str, Tensor] | None = None, m: Tensor | None = None) -> Tensor:
        """L(W, M), by default at the network's own weights and M = 1."""
        tensors = {**self._rest, **(self.w if w is None else w)}
        for row, ((name, dim), owner) in zip(self.m if m is None else m, self.places.items(), strict=True):
            entries = torch.cat([row, row.new_ones(1)])[owner]
            sizes = [1] * tensors[name].dim()
            sizes[dim] = tensors[name].shape[dim]
            if owner.dim() > 1:
                sizes[0] = tensors[name].shape[0]
            tensors[name] = tensors[name] * entries.reshape(sizes)
        parameters = {f"model.{name}": tensor for name, tensor in tensors.items()}
        buffers = {name: tensor.clone() for name, tensor in self._module.named_buffers()}
        with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH), _WrittenOut():
            return torch.func.functional_call(self._module, {**buffers, **parameters}, (self._batch,)).reshape(())

    @cached_property
    def _first(self) -> tuple[Tensor, Tensor]:
        """∂L/∂W [W] and ∂L/∂M [P, U], to be differentiated again."""
        loss = self.loss()
        inputs = [*self.w.values(), self.m]
        grads = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]
        return torch.cat([grad.flatten() for grad in grads[:-1]]), grads[-1]

    def _again(self, value: Tensor, inputs: list[Tensor], rows: Tensor | None = None) -> Tensor:
        """Gradient of a value, or of each row's combination of values, end to end."""
        if not value.requires_grad:
            found: list[Tensor | None] = [None] * len(inputs)
        else:
            found = self._grads(value, inputs, rows)
        lead = (len(rows),) if rows is not None else ()
        parts = [x.new_zeros(*lead, *x.shape) if p is None else p for x, p in zip(inputs, found, strict=True)]
        return torch.cat([part.reshape(*lead, -1) for part in parts], -1).detach()

    @staticmethod
    def _grads(value: Tensor, inputs: list[Tensor], rows: Tensor | None) -> list[Tensor | None]:
        """Of all rows at once; one by one where torch cannot batch one of their operators (2.11 has such)."""
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
        try:
            return list(torch.autograd.grad(value, inputs, rows, is_grads_batched=rows is not None, **options))
        except RuntimeError:
            if rows is None:
                raise
        each = [torch.autograd.grad(value, inputs, row, **options) for row in rows]
        return [None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True)]

    @property
    def gradient(self) -> Tensor:
        """∂L/∂W [W]."""
        return self._first[0].detach()

    @property
    def mask_gradient(self) -> Tensor:
        """∂L/∂M [P, U]."""
        return self._first[1].detach()

    @cached_property
    def hessian(self) -> Tensor:
        """H = ∂²L/∂W∂W [W, W]."""
        rows = torch.eye(len(self.gradient), dtype=self.gradient.dtype)
        return self._again(self._first[0], list(self.w.values()), rows)

    @cached_property
    def mixed(self) -> Tensor:
        """∂²L/∂M∂W [P, U, W]: a mask for each place; its sum over places is that of masks shared by all places."""
        rows = torch.eye(self.m.numel(), dtype=self.m.dtype)
        found = self._again(self._first[1].flatten(), list(self.w.values()), rows)
        return found.reshape(len(self.places), self.units, len(self.gradient))

    def hessian_times(self, vector: Tensor) -> Tensor:
        """H·vector [W] without H."""
        return self._again(self._first[0] @ vector, list(self.w.values()))

    def mixed_sum(self, moving: Tensor | None = None) -> Tensor:
        """v = 1ᵀ ∂²L/∂M∂W [W] without the matrix; ``moving`` [U] is what to put for 1."""
        grad = self._first[1] if moving is None else self._first[1] * moving
        return self._again(grad.sum(), list(self.w.values()))

    def mixed_times(self, vector: Tensor) -> Tensor:
        """∂²L/∂M∂W·vector [P, U] without the matrix."""
        return self._again(self._first[0] @ vector, [self.m]).reshape(self.m.shape)
