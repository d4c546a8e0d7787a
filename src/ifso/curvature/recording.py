"""Work recorded as a CUDA graph, to be replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ifso.curvature.capturing import NotCaptured, capturing

Pair = tuple[Tensor | None, Tensor | None]
"""A number and its tangent."""

Work = Callable[[], list[Pair]]
Recorded = tuple[list[Pair], Callable[[], None]]
"""What the work gave, in tensors that stay, and what fills them anew. They hold nothing before that was called."""

Record = Callable[[Work, Any], Recorded]
"""Records work; of two with the same pool, which is any object, neither needs its memory while the other runs."""


class GraphRecord:
    """Records work as CUDA graphs."""

    def __init__(self) -> None:
        self._pools: dict[Any, Any] = {}

    def __call__(self, work: Work, pool: Any) -> Recorded:
        """The work as a CUDA graph."""
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, pool=self._pools[pool]):
                found = work()
        except NotCaptured:
            del self._pools[pool]
            raise
        return found, graph.replay
