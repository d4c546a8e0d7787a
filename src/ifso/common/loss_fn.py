"""The user's loss: what it must return, and one clear line where it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ifso.common.devices import devices_apart, out_of_memory
from ifso.common.text import describe_error
from ifso.common.torch_state import undisturbed
from ifso.errors import IfsoError, ScoreError, users_line

LossFn = Callable[[nn.Module, Any], Tensor]
"""``loss_fn(model, batch)`` gives a scalar: the mean loss of the batch."""


def scalar(loss: Any) -> Tensor:
    """The loss, if it is a number."""
    if not isinstance(loss, Tensor):
        raise ScoreError(f"loss_fn returned {type(loss).__name__}; it must return a scalar tensor")
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise ScoreError(f"loss_fn returned a tensor of shape {shape}; it must return a scalar (a mean or a sum)")
    if not loss.is_floating_point():
        raise ScoreError(f"loss_fn returned {loss.dtype}; it must return a floating-point scalar")
    return loss.reshape(())


def checked(loss: Any) -> Tensor:
    """The loss, if it is a scalar that can be differentiated."""
    loss = scalar(loss)
    if not loss.requires_grad:
        raise ScoreError(
            "the loss has no gradient: loss_fn must not detach it, run under no_grad or inference_mode, "
            "or freeze all weights"
        )
    return loss


@contextlib.contextmanager
def outputs_of(model: nn.Module) -> Iterator[list[Any]]:
    """What the model returns within the context, call after call."""
    caught: list[Any] = []
    handle = model.register_forward_hook(lambda _module, _args, output: caught.append(output))
    try:
        yield caught
    finally:
        handle.remove()


def output_tensors(caught: list[Any]) -> list[Tensor]:
    """The tensors of numbers among what a model returned, without single ones: those are losses."""
    leaves = (leaf for leaf in tree_leaves(caught) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() and leaf.numel() > 1]


class WatchedLoss:
    """The user's loss, with one clear line where it fails or is not finite. ``where`` says on which batch."""

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn
        self._last: Tensor | None = None
        self.where = ""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """``loss_fn(model, batch)``."""
        try:
            loss = self._loss_fn(model, batch)
        except IfsoError:
            raise
        except (Exception, SystemExit) as error:
            hint = devices_apart(model, batch) or _hint(error)
            raise ScoreError(
                f"loss_fn failed{self.where}: {describe_error(error)}{users_line(error)}; {hint}"
            ) from error
        self._last = loss.detach() if isinstance(loss, Tensor) else None
        return loss

    def refuse_infinite(self) -> None:
        """Raise if the last loss was NaN or infinite; looked at after the pass, so that a GPU need not wait."""
        if self._last is not None and not bool(self._last.isfinite().all()):
            raise ScoreError(
                f"the loss{self.where} is not finite ({self._last.flatten()[0].item()}); "
                "check data, weights and learning rate"
            )


def _hint(error: BaseException) -> str:
    text = str(error).lower()
    if out_of_memory(error):
        return "give smaller batches"
    if "jvp function" in text:
        return (
            "an autograd.Function without jvp, or a full backward hook of a module, stands in the way of second "
            "derivatives: remove it, or use a criterion of first ones, such as taylor"
        )
    if "more than 1 value per channel" in text:
        return "a norm has one value to take the variance of: give larger batches or images, or keep more units"
    if "dtype" in text or " type" in text:
        return "give inputs in the dtype and on the device of the weights, e.g. convert images with .float()"
    if "shape" in text or "size" in text or "channels" in text:
        return "give batches of the shape that the model takes"
    return "check that loss_fn(model, batch) works"


_RANDOM = ("drop", "stochasticdepth")
"""Beginnings or parts of the class names of modules that leave something out at random."""


def steady_(model: nn.Module, loss_fn: LossFn, batch: Any) -> None:
    """Eval mode or, for a model that has no loss there (a detector), train mode with dropout off."""
    model.eval()
    try:
        with torch.no_grad(), undisturbed(model):
            scalar(loss_fn(model, batch))
    except Exception:
        model.train()
        for module in model.modules():
            if is_random(module):
                module.eval()


def is_random(module: nn.Module) -> bool:
    """Return whether a module, by the name of its class, leaves something out at random, as dropout does."""
    return any(sign in type(module).__name__.lower() for sign in _RANDOM) and not list(module.children())
