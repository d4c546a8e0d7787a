"""Models and settings of torch that are changed for a moment, and put back."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from ifso.common.module_state import named_tensors
from ifso.common.snapshot import Image

ALONE = threading.RLock()
"""Held by whoever changes a model for a moment, or a setting of the whole process."""


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[Image]:
    """Put back afterwards every attribute of every module, what hangs on them, and what the buffers hold."""
    with ALONE:
        image = Image(model)
        contents = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        try:
            yield image
        finally:
            image.restore()
            with torch.no_grad():
                for buffer, content in contents:
                    buffer.copy_(content)


def forget_caches(model: nn.Module) -> None:
    """Empty what modules keep: dicts (``…cache…``) of tensors, methods with ``functools.lru_cache``; and autocast's."""
    _forget_caches_of(model.modules())
    kinds: set[Any] = {type(module) for module in model.modules()}
    for kind in kinds:
        for cached in _cached_methods(kind):
            cached.cache_clear()


@functools.cache
def _cached_methods(kind: Any) -> tuple[functools._lru_cache_wrapper[Any], ...]:
    """Methods of a class with ``functools.lru_cache``, bare or within another decorator."""
    own = (base for base in kind.__mro__ if base.__module__.partition(".")[0] != "torch")
    found = [value for base in own for value in vars(base).values()]
    found = [value.__func__ if isinstance(value, (staticmethod, classmethod)) else value for value in found]
    for cell in [cell for value in found if isinstance(value, FunctionType) for cell in value.__closure__ or ()]:
        with contextlib.suppress(ValueError):  # empty: nothing was put there yet
            found.append(cell.cell_contents)
    return tuple(value for value in found if isinstance(value, functools._lru_cache_wrapper))


def _forget_caches_of(modules: Iterable[nn.Module]) -> None:
    """The same for modules that are known: to find all of a model takes long."""
    torch.clear_autocast_cache()
    for module in modules:
        for name, value in vars(module).items():
            if "cache" in name and isinstance(value, dict) and any(isinstance(item, Tensor) for item in value.values()):
                value.clear()


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Within it ``torch.autocast`` casts weights anew each time, and keeps none of them."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """No gradients, no fused attention kernels, no log lines about shapes we try; random state put back.

    Weights that ``torch.autocast`` has cast are not kept: the cache would mix those of this run with others.
    """
    with ALONE, no_autocast_cache():
        fused = torch.backends.mha.get_fastpath_enabled()
        log = logging.getLogger("torch._subclasses.fake_tensor")
        disabled = log.disabled
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            log.disabled = True  # another level would empty the caches of all loggers
            with torch.no_grad(), torch.random.fork_rng():
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            log.disabled = disabled


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave running statistics, other buffers, cached tensors and the random state as they were.

    So two passes in a row also see the same dropout. Checkpoints of the reentrant kind are made passable, and so are
    recurrent layers in eval mode: cuDNN has gradients in train mode only, which is the same without dropout.
    """
    modules = list(model.modules())
    recurrent = [
        (module, module.dropout) for module in modules if isinstance(module, nn.RNNBase) and not module.training
    ]
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
    _forget_caches_of(modules)
    try:
        for module in norms:
            module.track_running_stats = False
        for part, _ in recurrent:
            part.training, part.dropout = True, 0.0
        with torch.random.fork_rng(devices=sorted(devices, key=str), enabled=not capturing), not_reentrant():
            yield
    finally:
        _forget_caches_of(modules)
        for module in norms:
            module.track_running_stats = True
        for part, dropout in recurrent:
            part.training, part.dropout = False, dropout
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
def not_reentrant() -> Iterator[None]:
    """Within it reentrant checkpoints, which ``torch.autograd.grad`` cannot pass, are made of the other kind."""
    with mock.patch.object(checkpoint.CheckpointFunction, "apply", staticmethod(_of_the_other_kind)):
        yield


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Within it functions that are checkpointed keep their activations.

    What is computed again on the way back would not be seen by a mode that was on before: it would be no dual number.
    """
    with (
        mock.patch.object(checkpoint.CheckpointFunction, "apply", staticmethod(_called)),
        mock.patch.object(checkpoint, "_checkpoint_hook", contextlib.nullcontext),
    ):
        yield


def _of_the_other_kind(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _called(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:  # noqa: ARG001 (torch's order)
    return function(*args)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode within, and afterwards for every module the mode it had."""
    with same_modes(model):
        model.eval()
        yield


def conv_settings() -> Any:
    """The setting for convolutions alone: reading the one for all of cuDNN fails where a user has set them apart."""
    return getattr(torch.backends.cudnn, "conv")  # noqa: B009 (torch's types do not know it)


@contextlib.contextmanager
def full_float32(yes: bool = True) -> Iterator[None]:
    """Within it convolutions do not round their factors to TF32; with False they do."""
    conv = conv_settings()
    before = conv.fp32_precision
    conv.fp32_precision = "ieee" if yes else "tf32"
    try:
        yield
    finally:
        conv.fp32_precision = before


@contextlib.contextmanager
def in_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within it parameters and buffers hold numbers of another precision; afterwards each is the one that it was."""
    before = [(tensor, tensor.data) for tensor in named_tensors(model).values() if tensor.is_floating_point()]
    try:
        for tensor, data in before:
            tensor.data = data.to(dtype)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data
