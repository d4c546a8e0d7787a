"""Evaluating a network again and again while it is trained: on a GPU as one CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ifso.curvature.capturing import NotCaptured, captures_go_to, capturing
from ifso.data.sets import Data
from ifso.processes import several
from ifso.training.evaluation import Accuracy, accuracy_of, evaluate, sums_of
from ifso.training.headline import detects
from ifso.training.losses import logits_in
from ifso.training.modes import eval_mode
from ifso.training.narrow import narrow_layers
from ifso.training.precision import autocast, tensor_cores

LARGE, SMALL = 2000, 500
"""Images in an evaluated batch on a GPU, and on a CPU."""

PHOTOGRAPHS = 8
"""Images with boxes in an evaluated batch."""


def evaluated_batches(data: Data, device: torch.device | str, *, validation: bool) -> Any:
    """What a network on ``device`` is evaluated on: the validation part, or the test set."""
    size = LARGE if torch.device(device).type == "cuda" else SMALL
    size = PHOTOGRAPHS if detects(data) else size
    return data.validation_batches(size) if validation else data.test_batches(size)


class Examiner:
    """``examiner(model)`` is the accuracy on batches that stay the same, in a precision.

    A network that cannot be captured, because it waits for the GPU or memory is short, is evaluated as it comes.
    """

    def __init__(self, batches: Any, precision: str = "float32") -> None:
        self._batches, self._precision = batches, precision
        self._capturable = hasattr(batches, "images") and not several()
        self._model: nn.Module | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._total = torch.zeros(0)

    def __call__(self, model: nn.Module) -> Accuracy:
        """The accuracy of ``model``, summed over all processes."""
        if self._graph is None or self._model is not model:
            found = self._plainly(model)
            if not self._captured(model):
                return found
        assert self._graph is not None
        self._graph.replay()
        return accuracy_of(self._total, len(self._batches.images))

    def _plainly(self, model: nn.Module) -> Accuracy:
        """Refuses labels that do not fit, which a graph does not see."""
        with tensor_cores(self._precision), autocast(self._precision, next(model.parameters()).device):
            return evaluate(model, self._batches, over_ranks=True)

    def _captured(self, model: nn.Module) -> bool:
        """Is the evaluation a graph now?"""
        if not self._capturable or not captures_go_to(next(model.parameters()).device):
            return False
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        try:
            with torch.no_grad(), eval_mode(model), capturing(graph, stream=stream):
                self._total = self._sums(model)
        except NotCaptured:
            self._capturable = False
            return False
        self._model, self._graph = model, graph
        return True

    def _sums(self, model: nn.Module) -> Tensor:
        device = next(model.parameters()).device
        with tensor_cores(self._precision), autocast(self._precision, device), narrow_layers(self._precision, device):
            return torch.stack([sums_of(logits_in(model(images)), labels) for images, labels in self._batches]).sum(0)
