"""Give a freshly built network parameters on which a wrong removal or score shows.

Fresh networks are degenerate: zero-initialised gains switch whole branches off, layer scales of 1e-6 hide them, biases
and running means are zero. An error there would not reach the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = (nn.modules.conv._ConvNd, nn.Linear)
"""Layers with a weight matrix, whose output is brought to size one."""


@torch.no_grad()
def perturb_(model: nn.Module, seed: int) -> None:
    """Move every parameter and running statistic that sits at a constant or is a norm's or a bias."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            parameter.copy_(_perturbed(module, name, parameter, generator))
        for name, buffer in module.named_buffers(recurse=False):
            if name == "running_mean":
                buffer.copy_(0.2 * _normal(buffer, generator))
            elif name == "running_var":
                buffer.copy_(_uniform(buffer, 0.5, 1.5, generator))


def _perturbed(module: nn.Module, name: str, value: Tensor, generator: torch.Generator) -> Tensor:
    """The new value of one parameter."""
    is_norm = "norm" in type(module).__name__.lower() or hasattr(module, "running_var")
    if is_norm and name == "weight":
        return _uniform(value, 0.6, 1.4, generator)
    if name.endswith("bias") and value.ndim == 1:
        return value + 0.2 * _normal(value, generator)
    if value.numel() > 1 and value.min() != value.max():
        return value
    if isinstance(module, LAYERS) and name == "weight":
        return _normal(value, generator) / value[0].numel() ** 0.5
    if sum(size > 1 for size in value.shape) > 1:
        return 0.5 * _normal(value, generator)
    return _uniform(value, 0.5, 1.0, generator)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def _uniform(like: Tensor, low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(like.shape, generator=generator, dtype=like.dtype)


@torch.no_grad()
def calibrate_(model: nn.Module, run: Callable[[], Any]) -> set[str]:
    """Scale every convolution and linear layer so that its output has root mean square one; return the layers that ran.

    One pass in the order of execution, as in layer-sequential unit-variance initialisation, so that nothing saturates
    or dies out on the way to the output. A layer that runs several times is scaled by its first run.
    """
    seen: set[str] = set()

    def hook(name: str) -> Callable[..., Tensor | None]:
        def scale(module: nn.Module, _: Any, output: Tensor) -> Tensor | None:
            if name in seen:
                return None
            seen.add(name)
            size = float(output.double().square().mean().sqrt()) if output.numel() else 0.0
            if not 1e-12 < size < 1e12 or "weight" not in module._parameters:
                return None
            for parameter in module.parameters(recurse=False):
                parameter.div_(size)
            return output / size

        return scale

    handles = [m.register_forward_hook(hook(n)) for n, m in model.named_modules() if isinstance(m, LAYERS)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen
