"""Slow float64 truth for small networks: whole matrices by double backward and plain loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

L2 = 0.05


class Residual(nn.Module):
    """Conv, BN, a residual add, one layer used twice, a linear head. 3 classes."""

    def __init__(self, width: int = 3, norm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.shared = nn.Conv2d(width, width, 1, bias=False)
        self.inner = nn.Conv2d(width, 2, 3, padding=1)
        self.back = nn.Conv2d(2, width, 1)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.stem(x)))
        x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        x = x + self.back(torch.tanh(self.inner(x)))
        return self.head(x.mean((2, 3)))


class Plain(nn.Module):
    """Conv, conv, linear, all with biases. 3 classes."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.second = nn.Conv2d(width, 4, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))).flatten(1))


def batches(sizes: tuple[int, ...] = (5, 4), side: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Random images and labels."""
    random = torch.Generator().manual_seed(7)
    return [
        (torch.randn(n, 1, side, side, generator=random).double(), torch.randint(3, (n,), generator=random))
        for n in sizes
    ]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Mean over the batch, nothing else."""
    return F.cross_entropy(model(batch[0]), batch[1])


def regularised(model: nn.Module, batch: Any) -> Tensor:
    """With an L2 term over all parameters."""
    return cross_entropy(model, batch) + L2 * sum(parameter.square().sum() for parameter in model.parameters())


class _Caller(nn.Module):
    def __init__(self, net: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self._call = net, call

    def forward(self, *args: Any) -> Any:
        return self._call(self.net, *args)


def of_weights(model: nn.Module, tensors: dict[str, Tensor], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call(model, …)`` as a function of the flat weight vector."""
    caller = _Caller(model, call)

    def function(vector: Tensor, *args: Any) -> Any:
        pieces = vector.split([tensor.numel() for tensor in tensors.values()])
        pairs = zip(tensors.items(), pieces, strict=True)
        swapped = {f"net.{name}": piece.view(like.shape) for (name, like), piece in pairs}
        return functional_call(caller, swapped, args)

    return function


def eye(size: int) -> Tensor:
    """The identity in float64."""
    return torch.eye(size, dtype=torch.float64)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])


def mean_loss(
    model: nn.Module, tensors: dict[str, Tensor], loss_fn: Any, data: list[Any]
) -> Callable[[Tensor], Tensor]:
    function = of_weights(model, tensors, loss_fn)
    return lambda vector: sum(function(vector, batch) for batch in data) / len(data)


def hessian(model: nn.Module, tensors: dict[str, Tensor], loss_fn: Any, data: list[Any]) -> Tensor:
    return torch.autograd.functional.hessian(mean_loss(model, tensors, loss_fn, data), flat(tensors)).detach()


def gradient(model: nn.Module, tensors: dict[str, Tensor], loss_fn: Any, data: list[Any]) -> Tensor:
    return torch.autograd.functional.jacobian(mean_loss(model, tensors, loss_fn, data), flat(tensors)).detach()


def gauss_newton(model: nn.Module, tensors: dict[str, Tensor], data: list[Any], l2: float) -> Tensor:
    """Jᵀ ∇²ℓ J for the mean cross entropy, written out with softmax, plus the L2 term's 2·l2·I."""
    forward = of_weights(model, tensors, lambda net, x: net(x))
    total = 2 * l2 * eye(flat(tensors).numel())
    for x, _ in data:
        jacobian = torch.autograd.functional.jacobian(lambda vector, x=x: forward(vector, x), flat(tensors))
        probabilities = forward(flat(tensors), x).softmax(1)
        for row, p in zip(jacobian, probabilities, strict=True):
            total += row.t() @ (torch.diag(p) - torch.outer(p, p)) @ row / (len(x) * len(data))
    return total


def fisher(model: nn.Module, tensors: dict[str, Tensor], loss_fn: Any, data: list[Any]) -> Tensor:
    """1/N Σ g gᵀ by a loop over samples."""
    rows = [gradient(model, tensors, loss_fn, [(x[n : n + 1], y[n : n + 1])]) for x, y in data for n in range(len(x))]
    return sum(torch.outer(row, row) for row in rows) / len(rows)


def layer_patches(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """[N, T, in]: what every output position of a convolution sees, by loops over positions."""
    padding, stride, kernel = conv.padding[0], conv.stride[0], conv.kernel_size[0]
    padded = F.pad(x, [padding] * 4)
    starts = range(0, padded.shape[2] - kernel + 1, stride)
    return torch.stack(
        [padded[:, :, i : i + kernel, j : j + kernel].flatten(1) for i in starts for j in starts], 1
    )  # fmt: skip
