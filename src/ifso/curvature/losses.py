"""Calling the user's loss: what it must return, and leaving no trace in the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ifso.curvature.checkpoints import not_reentrant
from ifso.curvature.memory import out_of_memory
from ifso.errors import IfsoError, ScoreError, users_line
from ifso.graph.running import devices_apart, forget_caches_of

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
            "the loss has no gradient: loss_fn must not detach it, run under no_grad, or freeze all weights"
        )
    return loss


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave running statistics, other buffers, cached tensors and the random state as they were.

    So two passes in a row also see the same dropout. Checkpoints of the reentrant kind are made passable.
    """
    modules = list(model.modules())
    norms = [
        module
        for module in modules
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats
    ]
    quiet = {id(buffer) for module in norms for buffer in module.buffers(recurse=False)}
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers(recurse=False)}
    others = [buffer for number, buffer in buffers.items() if number not in quiet]
    copies = [buffer.clone() for buffer in others]
    parameters = (tensor for module in modules for tensor in module.parameters(recurse=False))
    devices = {tensor.device for tensor in parameters if tensor.is_cuda}
    capturing = bool(devices) and torch.cuda.is_current_stream_capturing()
    forget_caches_of(modules)
    try:
        for module in norms:
            module.track_running_stats = False
        with torch.random.fork_rng(devices=sorted(devices, key=str), enabled=not capturing), not_reentrant():
            yield
    finally:
        forget_caches_of(modules)
        for module in norms:
            module.track_running_stats = True
        if others:
            with torch.no_grad():
                torch._foreach_copy_(others, copies)


@contextlib.contextmanager
def differentiable(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Within it all tensors take part in gradients, frozen weights too."""
    frozen = [tensor for tensor in tensors if not tensor.requires_grad]
    try:
        for tensor in frozen:
            tensor.requires_grad_()
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


@contextlib.contextmanager
def same_modes(model: nn.Module) -> Iterator[None]:
    """Put every module back into train or eval mode, as it was."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


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
            raise ScoreError(f"loss_fn failed{self.where}: {one_line(error)}{users_line(error)}; {hint}") from error
        self._last = loss.detach() if isinstance(loss, Tensor) else None
        return loss

    def refuse_infinite(self) -> None:
        """Raise if the last loss was NaN or infinite; looked at after the pass, so that a GPU need not wait."""
        if self._last is not None and not bool(self._last.isfinite().all()):
            raise ScoreError(
                f"the loss{self.where} is not finite ({self._last.flatten()[0].item()}); "
                "check data, weights and learning rate"
            )


def one_line(error: BaseException) -> str:
    """An error's kind and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


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
