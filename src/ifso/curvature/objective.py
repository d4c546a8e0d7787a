"""The loss over fixed batches as a function of the flat weight vector, and what asking for it has cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.batches import tensor_pieces
from ifso.common.torch_state import undisturbed
from ifso.curvature.gauss_newton import gauss_newton_product
from ifso.curvature.products import Products
from ifso.errors import ScoreError

GRADIENT, PRODUCT, LOSS = 1.0, 2.0, 1 / 3
"""What a gradient, a product with a curvature matrix and a loss cost, in gradients over all batches."""

CURVATURES = ("gauss-newton", "hessian")


class Objective:
    """L(W) = mean over the batches of ``loss_fn(model, batch)``; every batch counts the same, whatever its size.

    ``curvature_batches`` limits the products :meth:`hessian` and :meth:`gauss_newton` to the first so many batches;
    they then cost that share. ``spent`` adds up in units of one gradient over all batches: a gradient 1, a product 2,
    a loss 1/3.
    """

    def __init__(self, products: Products, batches: Iterable[Any], *, curvature_batches: int | None = None) -> None:
        self.products, self.batches = products, list(batches)
        if not self.batches:
            raise ScoreError("there are no batches; give at least one (a generator can be used up only once)")
        if curvature_batches is not None and not 1 <= curvature_batches <= len(self.batches):
            raise ScoreError(f"curvature_batches={curvature_batches}, but there are {len(self.batches)} batches")
        self.curvature_batches = self.batches[:curvature_batches]
        self.space, self.model, self.loss_fn = products.space, products.model, products.loss_fn
        self.spent = 0.0

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.space.size

    def loss(self, *, or_infinity: bool = False) -> float:
        """L(W); a loss that is not finite is an error, or infinity if asked for (when trying a step)."""
        self.spent += LOSS
        values = []
        with undisturbed(self.model), torch.no_grad():
            for batch in self.batches:
                loss = self.loss_fn(self.model, batch)
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    raise ScoreError("loss_fn must return a scalar tensor (a mean or a sum)")
                values.append(float(loss))
        mean = sum(values) / len(values)
        if or_infinity and not math.isfinite(mean):
            return math.inf
        return _finite_number(mean, "the loss")

    def gradient(self, *, or_infinity: bool = False) -> tuple[float, Tensor]:
        """L(W) and ∂L/∂W; with ``or_infinity``, numbers that are not finite make the loss infinite."""
        self.spent += GRADIENT
        loss, total = 0.0, None
        for batch in self.batches:
            value, gradient = self.products.gradient(batch)
            loss += float(value)
            total = gradient if total is None else total.add_(gradient)
        assert total is not None
        count = len(self.batches)
        if or_infinity and not (math.isfinite(loss) and bool(torch.isfinite(total).all())):
            return math.inf, total
        return _finite_number(loss / count, "the loss"), finite(total.div_(count), "the gradient of the loss")

    def hessian(self, vector: Tensor) -> Tensor:
        """H·vector."""
        return self._mean_product(vector, self.products.hessian, "a product with the Hessian")

    def gauss_newton(self, vector: Tensor) -> Tensor:
        """G·vector, see :mod:`ifso.curvature.gauss_newton`."""

        def product(batch: Any, vector: Tensor) -> Tensor:
            dots = self.space.split(vector)
            parts = gauss_newton_product(self.model, self.loss_fn, batch, self.space.tensors, dots)
            return self.space.flat(parts)

        return self._mean_product(vector, product, "a product with the Gauss-Newton matrix")

    def _mean_product(self, vector: Tensor, product: Callable[[Any, Tensor], Tensor], what: str) -> Tensor:
        self.spent += PRODUCT * len(self.curvature_batches) / len(self.batches)
        total = torch.zeros_like(vector)
        for batch in self.curvature_batches:
            total += product(batch, vector)
        return finite(total.div_(len(self.curvature_batches)), what)

    def sample_gradients(self, group_size: int = 1) -> Iterator[Tensor]:
        """The gradient of every sample's own loss, one vector after another: the rows of the empirical Fisher.

        Every tensor of a batch is cut along its first dim; ``group_size`` samples make up one "sample" (batch norm in
        train mode needs more than one).
        """
        self._refuse_lonely_samples(group_size)
        self.spent += GRADIENT
        for batch in self.batches:
            for part in tensor_pieces(batch, group_size):
                yield finite(self.products.gradient(part)[1], "the gradient of a sample")

    def _refuse_lonely_samples(self, group_size: int) -> None:
        norms = nn.modules.batchnorm._BatchNorm
        if group_size == 1 and any(isinstance(m, norms) and m.training for m in self.model.modules()):
            raise ScoreError(
                "gradients per sample are not defined with batch norm in train mode; call model.eval(), "
                "or set group_size to 2 or more"
            )


class System:
    """What an inverse-curvature solver may ask for: products with P C P, where C is G or H.

    ``support`` is 1 for the weights that may move and 0 for the others (P = diag(support)); None means all may.
    """

    def __init__(self, objective: Objective, curvature: str = "gauss-newton", support: Tensor | None = None) -> None:
        if curvature not in CURVATURES:
            raise ScoreError(f"curvature={curvature!r} is unknown; choose one of {', '.join(CURVATURES)}")
        self.objective, self.curvature, self.support = objective, curvature, support

    @property
    def size(self) -> int:
        """Length of the vectors."""
        return self.objective.size

    def product(self, vector: Tensor) -> Tensor:
        """P C P·vector."""
        multiply = self.objective.gauss_newton if self.curvature == "gauss-newton" else self.objective.hessian
        return self.restrict(multiply(self.restrict(vector)))

    def restrict(self, vector: Tensor) -> Tensor:
        """P·vector."""
        return vector if self.support is None else vector * self.support

    def sample_gradients(self, group_size: int = 1) -> Iterator[Tensor]:
        """Rows of the empirical Fisher, restricted."""
        return (self.restrict(row) for row in self.objective.sample_gradients(group_size))


def finite(vector: Tensor, what: str) -> Tensor:
    """The vector, if all its entries are finite numbers."""
    if not bool(torch.isfinite(vector).all()):
        bad = int((~torch.isfinite(vector)).sum())
        raise ScoreError(f"{what} has {bad} entries that are not finite; check the batches, or use a smaller step")
    return vector


def _finite_number(value: float, what: str) -> float:
    if not math.isfinite(value):
        raise ScoreError(f"{what} is {value}; check the batches and the weights")
    return value
