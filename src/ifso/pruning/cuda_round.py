"""A round of scores and steps as a CUDA graph, and what a graph cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from ifso.common.cuda_graphs import CONSTANTS, NotCaptured, captures_go_to, capturing, draws
from ifso.common.distributed import is_distributed
from ifso.pruning.shrinking_network import ShrinkingNetwork

T = TypeVar("T")


def can_capture(network: ShrinkingNetwork) -> bool:
    """Return whether rounds can be captured: on the current GPU alone, without data-dependent control flow."""
    plain = not (network.graph.reductions or network.graph.on_real_tensors)
    return captures_go_to(network.device) and not is_distributed() and plain


def side_by_side(jobs: Sequence[Callable[[], T]], apart: bool = True) -> list[T]:
    """The results of all jobs; while a CUDA graph is captured, on parallel streams if they may run ``apart``."""
    if not apart or not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        return [job() for job in jobs]
    main, results = torch.cuda.current_stream(), []
    streams = [torch.cuda.Stream() for _ in jobs]
    for job, stream in zip(jobs, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            results.append(job())
    for stream in streams:
        main.wait_stream(stream)
    return results


class CapturedRound:
    """A captured round. What it was made from must live as long as it does."""

    def __init__(self, work: Callable[[Sequence[Any]], None], held: Sequence[Any], graph: torch.cuda.CUDAGraph) -> None:
        self._work, self._graph = work, graph
        self._leaves, self._spec = tree_flatten(list(held))

    @classmethod
    def make(cls, work: Callable[[Sequence[Any]], None], batches: Sequence[Any]) -> CapturedRound | str:
        """Capture ``work`` on batches like these, without running it; or why that cannot be."""
        leaves, spec = tree_flatten(list(batches))
        odd = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *CONSTANTS))]
        if odd:
            return f"a batch holds a {type(odd[0]).__name__}"
        held = tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph):
                work(held)
        except NotCaptured as error:
            return str(error)
        return cls(work, held, graph)

    def takes(self, batches: Sequence[Any]) -> bool:
        """Return whether these batches have the shapes and types of the captured ones."""
        leaves, spec = tree_flatten(list(batches))
        return spec == self._spec and all(map(_alike, leaves, self._leaves))

    def __call__(self, batches: Sequence[Any]) -> None:
        """The round on these batches."""
        leaves, _ = tree_flatten(list(batches))
        for mine, leaf in zip(self._leaves, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(leaf, non_blocking=True)
        self._graph.replay()


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return type(one) is type(other) and one == other


class SideEffects:
    """Whether passes within :meth:`watched` draw random numbers or change buffers.

    Running statistics of batch norms do not count: scores leave them alone.
    """

    def __init__(self, model: nn.Module) -> None:
        others = (module for module in model.modules() if not isinstance(module, _BatchNorm))
        self._buffers = [buffer for module in others for buffer in module.buffers(recurse=False)]
        self.draws = self.changes_buffers = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A pass."""
        drawn, versions = draws(), [buffer._version for buffer in self._buffers]
        yield
        self.draws |= drawn()
        self.changes_buffers |= versions != [buffer._version for buffer in self._buffers]


def has_host_counters(optimizer: Optimizer) -> bool:
    """Return whether a step may depend on a number on the host, such as that of the steps so far.

    A CUDA graph would keep that number for ever.

    >>> import torch
    >>> weights = [torch.zeros(1, requires_grad=True)]
    >>> [has_host_counters(make(weights, lr=0.1)) for make in (torch.optim.SGD, torch.optim.Adam)]
    [False, True]
    """
    return not isinstance(optimizer, SGD) and not all(group.get("capturable") for group in optimizer.param_groups)
