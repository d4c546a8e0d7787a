"""The loss over fixed batches as a function of the flat weights, and what solvers of its curvature take and give."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ifso.common.batches import pieces
from ifso.common.loss_fn import scalar
from ifso.common.torch_state import forget_caches, undisturbed
from ifso.costs.cost import check_fits
from ifso.curvature.gauss_newton import gauss_newton_product
from ifso.curvature.products import Products
from ifso.curvature.weight_space import survivors
from ifso.errors import ScoreError
from ifso.graph.balancing import check_keep
from ifso.graph.channel_graph import STAYS, ChannelGraph, Keep
from ifso.graph.reductions import ExactReductions
from ifso.surgery.mask import masked

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
        with undisturbed(self.model), torch.no_grad():
            mean = sum(float(scalar(self.loss_fn(self.model, batch))) for batch in self.batches) / len(self.batches)
        return math.inf if or_infinity and not math.isfinite(mean) else _finite_number(mean)

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
        return _finite_number(loss / count), finite(total.div_(count), "the gradient of the loss")

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
        norms = nn.modules.batchnorm._BatchNorm
        if group_size == 1 and any(isinstance(m, norms) and m.training for m in self.model.modules()):
            raise ScoreError(
                "gradients per sample are not defined with batch norm in train mode; call model.eval(), "
                "or set group_size to 2 or more"
            )
        self.spent += GRADIENT
        for batch in self.batches:
            for part in pieces(batch, group_size):
                yield finite(self.products.gradient(part)[1], "the gradient of a sample")


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


class SolverWarning(UserWarning):
    """A solver did not reach what it was asked for; the message has the residual."""


@dataclass(frozen=True)
class Solution:
    """u ≈ (C + λI)⁻¹ v.

    Attributes:
        u: the solution.
        residual: ‖v − (C + λI)u‖/‖v‖ for the matrix the solver inverts, None where it was not measured.
        iterations: how many it took.
        note: what went wrong, empty if nothing did.
    """

    u: Tensor
    residual: float | None
    iterations: int
    note: str = ""


class Solver(Protocol):
    """Anything with ``solve``."""

    def solve(self, system: System, v: Tensor) -> Solution:
        """u ≈ C⁻¹v."""
        ...


def checked_vector(system: System, v: Tensor) -> Tensor:
    """v restricted to the weights that may move, if its shape and numbers are right."""
    if v.shape != (system.size,):
        raise ScoreError(f"v has shape {tuple(v.shape)}; the system has {system.size} weights")
    return system.restrict(finite(v, "the vector v to solve for"))


def warn_note(note: str) -> str:
    """Warn, and give the note back."""
    warnings.warn(note, SolverWarning, stacklevel=3)
    return note


def checked_positive(solver: str, *, or_zero: bool = False, **values: float) -> None:
    """Refuse options that are not above zero, or not zero."""
    for name, value in values.items():
        if not (value > 0 or (or_zero and value == 0)):
            raise ScoreError(f"solver {solver!r}: {name} must be {'0 or more' if or_zero else 'above 0'}, got {value}")


def finite(vector: Tensor, what: str) -> Tensor:
    """The vector, if all its entries are finite numbers."""
    if not bool(torch.isfinite(vector).all()):
        bad = int((~torch.isfinite(vector)).sum())
        raise ScoreError(f"{what} has {bad} entries that are not finite; check the batches, or use a smaller step")
    return vector


def _finite_number(loss: float) -> float:
    if not math.isfinite(loss):
        raise ScoreError(f"the loss must be finite, got {loss}; check the batches and the weights")
    return loss


class MaskedModel:
    """A model from which ``keep`` removes units by a mask, and the weights that survive them.

    ``support`` is 1 over the surviving weights of W and 0 over the others; the mask scales the slices that read the
    removed units. At m = 0 the state is that of :func:`ifso.masked`.
    """

    def __init__(self, products: Products, graph: ChannelGraph, keep: Keep) -> None:
        check_fits(products.model, graph)
        self._kept = graph.kept(keep)
        check_keep(graph, self._kept)
        self._products, self._graph, self._keep = products, graph, keep
        self.space = products.space
        named = dict(products.model.named_parameters())
        self._reading = {reader.parameter: named[reader.parameter] for reader in products.readers}
        self._tensors = {**self._reading, **self.space.tensors}
        self._originals = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        self._alive = survivors(self.space, graph, self._kept)
        self.support = self.space.flat(
            {name: alive.to(self._tensors[name].dtype) for name, alive in self._alive.items()}
        )

    @property
    def removed(self) -> int:
        """How many units go."""
        return int((~self._kept).sum())

    @property
    def has_reductions(self) -> bool:
        """Whether functions over channels (layer norm …) make the path start away from the model."""
        return bool(self._graph.reductions)

    def start(self) -> Tensor:
        """W as the model had it."""
        return self.space.flat({name: self._originals[name] for name in self.space.tensors})

    def direction(self) -> Tensor:
        """∂U/∂m for U = m ⊙ W: the slices of W that read removed units, as they were; zero elsewhere."""
        names = self.space.tensors.keys() & self._reading
        return self.space.flat({name: self._originals[name] * (1 - self._factor(name, 0.0)) for name in names})

    @contextlib.contextmanager
    def at(self, m: float) -> Iterator[None]:
        """Set the removed units' mask to m; surviving weights stay as they are assigned, before and after."""
        if m == 0:
            with masked(self._products.model, self._graph, self._keep):
                yield
            return
        forget_caches(self._products.model)
        factors = {name: self._factor(name, m) for name in self._reading}
        try:
            self._scale_(factors, masked=True)
            reductions = self._graph.reductions
            exact = ExactReductions(self._products.model, reductions, self._kept) if reductions else None
            with exact or contextlib.nullcontext():
                yield
        finally:
            self._scale_(factors, masked=False)

    @torch.no_grad()
    def _scale_(self, factors: Mapping[str, Tensor], *, masked: bool) -> None:
        """Scale the slices that read removed units, or put them back."""
        for name, factor in factors.items():
            original = self._originals[name]
            tensor = self._reading[name]
            tensor.copy_(torch.where(factor == 1, tensor, original * factor if masked else original))

    def _factor(self, name: str, m: float) -> Tensor:
        tensor = self._reading[name]
        entries = torch.full((self._kept.numel(),), m, dtype=tensor.dtype, device=tensor.device)
        entries[self._kept.to(tensor.device)] = 1
        entries[STAYS] = 1
        factor = torch.ones((), dtype=tensor.dtype, device=tensor.device)
        for reader in self._products.readers:
            if reader.parameter == name:
                factor = factor * reader.spread(entries, tensor.shape)
        return factor

    @torch.no_grad()
    def assign_(self, weights: Tensor) -> None:
        """Put surviving weights into the model; the others stay as they are."""
        for name, part in self.space.split(weights).items():
            tensor = self.space.tensors[name]
            tensor.copy_(torch.where(self._alive[name], part, tensor))

    @torch.no_grad()
    def restore(self) -> None:
        """Put every weight back as it was."""
        for name, tensor in self._tensors.items():
            tensor.copy_(self._originals[name])
