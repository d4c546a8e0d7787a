"""The loss over fixed batches as a function of the flat weights, and what solvers of its curvature take and give.

Curvature is the Hessian, or the Gauss-Newton matrix: the Hessian without the curvature of the network itself.
Write the loss as L(W) = ℓ(f(W), W), where f is what ``model(...)`` returns and the second argument stands for the
weights that ``loss_fn`` uses directly (an L2 term). With J = ∂f/∂W and K = [J; I],

    G = Kᵀ ∇²ℓ K,        H = G + Σ_o (∂ℓ/∂f_o) ∂²f_o/∂W².

G is exact in everything but the second derivative of f, and positive semidefinite where ℓ is convex.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ifso.common.batches import pieces
from ifso.common.loss_fn import LossFn, checked, scalar
from ifso.common.torch_state import ALONE, undisturbed
from ifso.curvature.decompositions import load_forward_mode
from ifso.curvature.dual_mode import DualMode, ParameterPlan, PassOptions, below_other_modes, twice_differentiable
from ifso.curvature.products import Products
from ifso.curvature.weight_space import sum_present
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
        """G·vector."""

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


class QuadraticModel(ABC):
    """The model at one point, for one gradient g and curvature C."""

    @abstractmethod
    def solve(self, damping: float) -> Tensor:
        """u = (C + λI)⁻¹g."""

    @abstractmethod
    def decrease(self, damping: float) -> float:
        """gᵀu − ½uᵀCu at that u, without damping: by how much the model says the loss falls."""

    @abstractmethod
    def inverse(self, vector: Tensor, damping: float) -> Tensor:
        """(C + λI)⁻¹·vector for any vector, as well as the model knows C."""

    def with_gradient(self, gradient: Tensor) -> QuadraticModel | None:  # noqa: ARG002 (most know C along g only)
        """The same C with another g; None if C is not known well enough for that."""
        return None


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


def gauss_newton_product(
    model: nn.Module, loss_fn: LossFn, batch: Any, tensors: Mapping[str, Tensor], dots: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """G·dots by parameter name: one forward pass on dual numbers, one through the loss, one plain backward pass."""
    load_forward_mode()
    with _reraise_as_score_error(), twice_differentiable(model):
        with ALONE, forward_ad.dual_level():
            split = _Linearization(tensors, dots)
            before = model.register_forward_pre_hook(split.enter, with_kwargs=True)
            after = model.register_forward_hook(split.leave)
            with before, after, below_other_modes(DualMode(split.plans, PassOptions(fused=False))):
                loss = checked(loss_fn(model, batch))
            if not split.outputs:
                raise ScoreError(
                    "loss_fn never calls model(...), so the Gauss-Newton matrix has no output to linearise; "
                    "call the model in loss_fn, or choose curvature='hessian'"
                )
            direct = [leaf for leaf in split.direct.values() if leaf is not None]
            leaves = [leaf for _, leaf in split.outputs]
            grads = torch.autograd.grad(loss, [*leaves, *direct], allow_unused=True)
            tangents = [None if grad is None else forward_ad.unpack_dual(grad).tangent for grad in grads]
        back = [
            (primal, tangent)
            for (primal, _), tangent in zip(split.outputs, tangents[: len(leaves)], strict=True)
            if tangent is not None and primal.requires_grad
        ]
        through = _pull_back(back, list(split.inside.values()))
    beside = dict(zip(split.direct, tangents[len(leaves) :], strict=True))
    return {name: sum_present(through.get(id(split.inside.get(name))), beside.get(name)) for name in tensors}


_SIGNS = ("forward AD", "jvp", "forward-mode", "forward mode", "Batching rule", "functorch")


@contextlib.contextmanager
def _reraise_as_score_error() -> Iterator[None]:
    """What forward mode cannot differentiate is refused in one line, with what can; other errors pass."""
    try:
        yield
    except (RuntimeError, ScoreError) as error:
        cause = error.__cause__ if isinstance(error, ScoreError) and error.__cause__ is not None else error
        text = " ".join(str(cause).split())
        if not any(sign in text for sign in _SIGNS):
            raise
        raise ScoreError(
            "the Gauss-Newton matrix takes forward mode, by which the model or loss cannot be differentiated: "
            f"{text[:200]}; choose curvature='hessian', or write that operation out in plain tensor operations"
        ) from error


def _pull_back(back: list[tuple[Tensor, Tensor]], inside: list[Tensor]) -> dict[int, Tensor | None]:
    """Σ Jᵀ tangent over the outputs, by ``id`` of the parameter's stand-in."""
    if not back or not inside:
        return {}
    outputs, tangents = zip(*back, strict=True)
    primals = torch.autograd.grad(outputs, inside, [tangent.detach() for tangent in tangents], allow_unused=True)
    return {id(leaf): grad for leaf, grad in zip(inside, primals, strict=True)}


class _Linearization:
    """Parameters as dual numbers, one leaf inside the model and another outside it; outputs of the model as leaves."""

    def __init__(self, tensors: Mapping[str, Tensor], dots: Mapping[str, Tensor]) -> None:
        self._tensors, self._dots = tensors, dots
        self._depth = 0
        self.inside: dict[str, Tensor] = {}
        self.direct: dict[str, Tensor] = {}
        self.outputs: list[tuple[Tensor, Tensor]] = []
        self.plans = {
            id(tensor): ParameterPlan(stand_in=partial(self._stand_in, name), in_layers=False)
            for name, tensor in tensors.items()
        }

    def _stand_in(self, name: str) -> Tensor:
        leaves = self.inside if self._depth else self.direct
        if name not in leaves:
            leaf = self._tensors[name].detach().requires_grad_()
            leaves[name] = forward_ad.make_dual(leaf, self._dots[name])
        return leaves[name]

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise ScoreError(
                    "the model is called on something that depends on its own weights, which the Gauss-Newton matrix "
                    "does not follow; choose curvature='hessian'"
                )

    def leave(self, _: nn.Module, args: Any, output: Any) -> Any:
        del args
        self._depth -= 1
        values, shape = tree_flatten(output)
        return tree_unflatten([self._as_leaf(value) for value in values], shape)

    def _as_leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        primal, tangent = forward_ad.unpack_dual(value)
        leaf = primal.detach().requires_grad_()
        dual = leaf if tangent is None else forward_ad.make_dual(leaf, tangent.detach())
        self.outputs.append((primal, dual))
        return dual
