"""The Gauss-Newton matrix: the Hessian without the curvature of the network itself.

Write the loss as L(W) = ℓ(f(W), W), where f is what ``model(...)`` returns and the second argument stands for the
weights that ``loss_fn`` uses directly (an L2 term). With J = ∂f/∂W and K = [J; I],

    G = Kᵀ ∇²ℓ K,        H = G + Σ_o (∂ℓ/∂f_o) ∂²f_o/∂W².

G is exact in everything but the second derivative of f, and positive semidefinite where ℓ is convex.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ifso.common.loss_fn import LossFn, checked
from ifso.common.torch_state import ALONE
from ifso.curvature.decompositions import load_forward_mode
from ifso.curvature.dual_mode import DualMode, ParameterPlan, PassOptions, below_other_modes, twice_differentiable
from ifso.curvature.weight_space import sum_present
from ifso.errors import ScoreError


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
