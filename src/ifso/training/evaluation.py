"""Evaluate networks: accuracy of classifiers, average precision of detectors, the mean of a loss of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.common.batches import size_of
from ifso.common.cuda_graphs import NotCaptured, captures_go_to, capturing
from ifso.common.devices import out_of_memory
from ifso.common.distributed import collective_device, is_distributed, sum_over_ranks, together
from ifso.common.loss_fn import LossFn, WatchedLoss
from ifso.common.module_state import device_of
from ifso.common.text import describe_error
from ifso.common.torch_state import eval_mode
from ifso.data.base import AVERAGES, Data, detects, has_own_loss
from ifso.errors import DataError, IfsoError, TrainingError, users_line
from ifso.pruning.recovery import mean_loss
from ifso.tasks.classification import logits_in
from ifso.training.average_precision import AveragePrecision, check_evaluator, evaluate_detector
from ifso.training.optimizers import no_parameters_error
from ifso.training.precision import autocast, tensor_cores
from ifso.training.settings import TrainSettings
from ifso.training.trainer import Measures
from ifso.training.triton_layers import triton_layers

FIVE = 5

NOTHING = "there is nothing to evaluate on: the batches ran out before the first one"


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers in percent; ``loss`` is the mean cross entropy. ``top5`` is None for few classes."""

    top1: float
    top5: float | None
    loss: float
    samples: int


def evaluate(model: nn.Module, batches: Iterable[Any], *, over_ranks: bool = False) -> Accuracy:
    """The accuracy of ``model`` in eval mode over all batches; every module then has its mode back.

    With ``over_ranks`` every process of ``torch.distributed`` brings batches of its own, and all return the joint
    result; if one fails, none goes on. The device is waited for once, after the last batch.

    >>> logits = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 3.0], [3.0, 0.0]])
    >>> found = evaluate(nn.Identity(), [(logits, torch.tensor([0, 0, 1, 1]))])
    >>> found.top1, found.top5, round(found.loss, 4), found.samples
    (75.0, None, 0.7986, 4)
    """
    total = total_over_ranks(lambda: _total(model, batches), over_ranks=over_ranks)
    return accuracy_of(total[:-1], round(float(total[-1])))


def total_over_ranks(sums: Callable[[], Tensor], *, over_ranks: bool) -> Tensor:
    """The result of ``sums``; with ``over_ranks`` its sum over all processes, and if one fails, none goes on."""
    return sum_over_ranks(together(sums).to(collective_device())) if over_ranks and is_distributed() else sums()


def accuracy_of(sums: Tensor, samples: int) -> Accuracy:
    """The accuracy from the total [3] of :func:`accuracy_sums` over all batches.

    >>> accuracy_of(torch.tensor([2.0, 6.0, 8.0]), 8)
    Accuracy(top1=75.0, top5=100.0, loss=0.25, samples=8)
    """
    if not samples:
        raise DataError(NOTHING)
    loss, first, five = (value / samples for value in sums.tolist())
    return Accuracy(100 * first, None if math.isnan(five) else 100 * five, loss, samples)


def accuracy_sums(logits: Any, labels: Tensor) -> Tensor:
    """Sums over a batch, in float64 [3]: cross entropy, right answers, right ones among the first five (else NaN).

    Nothing waits for the device. Samples with a cross entropy that is not finite count as wrong; otherwise ``argmax``
    would read NaN as class 0. A label outside the classes, which would crash a GPU kernel, counts as the nearest class
    in the cross entropy; :func:`evaluate` refuses it after the last batch.
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(labels):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise DataError(f"the model gave {shape} for {len(labels)} labels; a classifier gives logits [N, classes]")
    if labels.dim() != 1 or labels.dtype.is_floating_point:
        raise DataError(
            f"labels of shape {tuple(labels.shape)} and {labels.dtype} cannot be compared with answers; "
            "give the number of the class for each image"
        )
    losses = F.cross_entropy(logits.float(), labels.long().clamp(0, logits.shape[1] - 1), reduction="none").double()
    sound, loss = losses.isfinite(), losses.sum()
    first = ((logits.argmax(1) == labels) & sound).sum()
    if logits.shape[1] > FIVE:
        five = ((logits.topk(FIVE, 1).indices == labels[:, None]) & sound[:, None]).sum()
    else:
        five = torch.full_like(loss, float("nan"))
    return torch.stack([loss, first.double(), five.double()])


@torch.no_grad()
def _total(model: nn.Module, batches: Iterable[Any]) -> Tensor:
    """The sums over all batches and the number of samples [4], if all labels are classes of the network."""
    samples = classes = 0
    sums: list[Tensor] = []
    ends: list[Tensor] = []
    with eval_mode(model):
        for images, labels in batches:
            logits = logits_in(model(images))
            sums.append(accuracy_sums(logits, labels))
            if len(labels):
                samples, classes = samples + len(labels), logits.shape[1]
                ends.append(torch.stack([labels.min(), labels.max()]))
    if not samples:
        return torch.zeros(4, dtype=torch.float64)
    _refuse_outside(torch.cat(ends), classes)
    total = torch.stack(sums).sum(0)
    return torch.cat([total, total.new_tensor([samples])])


def _refuse_outside(labels: Tensor, classes: int) -> None:
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= classes:
        raise DataError(
            f"label {lowest if lowest < 0 else highest} is none of the {classes} classes of the network "
            f"(0 to {classes - 1}); give the data that the network was trained for, or a network with as many outputs "
            "as the data has classes"
        )


GPU_BATCH, CPU_BATCH, DETECTOR_BATCH = 2000, 500, 8
"""Images in an evaluated batch: of a classifier on a GPU or a CPU, and of a detector."""


def evaluation_batches(data: Data, device: torch.device | str, *, validation: bool) -> Any:
    """The batches a network on ``device`` is evaluated on: of the validation part, or of the test set."""
    size = DETECTOR_BATCH if detects(data) else GPU_BATCH if torch.device(device).type == "cuda" else CPU_BATCH
    return data.validation_batches(size) if validation else data.test_batches(size)


class Evaluator:
    """``evaluator(model)`` is the accuracy on batches that stay the same, in a precision.

    On a GPU the evaluation is captured as a CUDA graph, unless the network waits for the GPU or memory is short.
    """

    def __init__(self, batches: Any, precision: str = "float32") -> None:
        self._batches, self._precision = batches, precision
        self._capturable = hasattr(batches, "images") and not is_distributed()
        self._model: nn.Module | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._total = torch.zeros(0)

    def __call__(self, model: nn.Module) -> Accuracy:
        """The accuracy of ``model`` over the batches of all processes."""
        if self._graph is None or self._model is not model:
            # Not captured at first: a graph does not see labels that do not fit.
            with tensor_cores(self._precision), autocast(self._precision, next(model.parameters()).device):
                accuracy = evaluate(model, self._batches, over_ranks=True)
            if not self._captured(model):
                return accuracy
        assert self._graph is not None
        self._graph.replay()
        return accuracy_of(self._total, len(self._batches.images))

    def _captured(self, model: nn.Module) -> bool:
        """Capture the evaluation and return whether that was possible."""
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
        with tensor_cores(self._precision), autocast(self._precision, device), triton_layers(self._precision, device):
            return torch.stack(
                [accuracy_sums(logits_in(model(images)), labels) for images, labels in self._batches]
            ).sum(0)


@dataclass(frozen=True)
class Evaluation:
    """The accuracy in percent and the mean loss on ``samples`` images.

    Where the data has a loss of its own there is no accuracy, and ``loss`` is the mean over batches. A detector has
    average precision in place of both.
    """

    loss: float | None
    samples: int
    top1: float | None = None
    top5: float | None = None
    detection: AveragePrecision | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        if self.detection is None:
            return {name: getattr(self, name) for name in ("loss", "samples", "top1", "top5")}
        values = asdict(self.detection)
        return {"samples": values.pop("images"), **values}

    def measures(self) -> Measures:
        """``top1``, ``top5`` and ``eval_loss``, or ``map`` and its kin, as far as they are known and finite."""
        if self.detection is None:
            values = {"top1": self.top1, "top5": self.top5, "eval_loss": self.loss}
        else:
            values = {name: getattr(self.detection, name) for name in AVERAGES}
        return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def quality(model: nn.Module, data: Data, batches: Iterable[Any], precision: str, *, over_ranks: bool) -> Evaluation:
    """The quality of the network on ``batches`` of the data."""
    with tensor_cores(precision), autocast(precision, device_of(model)), clear_errors(f"batches of {data.name}"):
        if detects(data):
            detection = evaluate_detector(model, batches, over_ranks=over_ranks)
            return Evaluation(None, detection.images, detection=detection)
        if has_own_loss(data):
            return _by_loss(model, WatchedLoss(data.loss_fn), batches, over_ranks)
        return Evaluation(**asdict(evaluate(model, batches, over_ranks=over_ranks)))


def _by_loss(model: nn.Module, loss_fn: LossFn, batches: Iterable[Any], over_ranks: bool) -> Evaluation:
    """The mean loss over the batches, of all processes where each brings its own."""

    def sums() -> Tensor:
        whole = list(batches)
        loss = mean_loss(model, loss_fn, whole) if whole else 0.0
        return torch.tensor([len(whole) * loss, len(whole), sum(map(size_of, whole))], dtype=torch.float64)

    loss, count, samples = total_over_ranks(sums, over_ranks=over_ranks).tolist()
    if not count:
        raise DataError(NOTHING)
    return Evaluation(loss / count, round(samples))


class Measuring:
    """The :meth:`Evaluation.measures` of networks like ``model`` on the validation part of the data or the test set.

    ``samples`` is how many the last one was evaluated on.
    """

    def __init__(self, model: nn.Module, data: Data, settings: TrainSettings, *, validation: bool) -> None:
        if detects(data):
            check_evaluator()
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise no_parameters_error(model)
        self._data, self._precision, self.samples = data, settings.precision, 0
        self._batches = evaluation_batches(data, parameter.device, validation=validation)
        self._accuracy = Evaluator(self._batches, settings.precision)

    def __call__(self, network: nn.Module) -> Measures:
        """Evaluate a network."""
        if detects(self._data) or has_own_loss(self._data):
            found = quality(network, self._data, self._batches, self._precision, over_ranks=True)
        else:
            with clear_errors(f"evaluation batches of {self._data.name}"):
                found = Evaluation(**asdict(self._accuracy(network)))
        self.samples = found.samples
        return found.measures()


def evaluate_once(model: nn.Module, data: Data, settings: TrainSettings, *, validation: bool) -> Measures:
    """The measures of :class:`Measuring`; nothing where a user's data has no test set."""
    try:
        measures = Measuring(model, data, settings, validation=validation)
    except DataError:
        if validation:
            raise
        return {}
    return measures(model)


Result = TypeVar("Result")


def with_clear_errors(loss_fn: Callable[[nn.Module, Any], Result], data: Data) -> Callable[[nn.Module, Any], Result]:
    """The loss, or losses by name, with one clear line where a batch does not fit the network."""
    boxes = detects(data)
    what = "images and boxes" if boxes else "images and labels"
    gives = "a dict of losses for (images, targets)" if boxes else "[N, classes]"

    def loss(model: nn.Module, batch: Any) -> Result:
        try:
            return loss_fn(model, batch)
        except (IfsoError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            said = f"{describe_error(error)}{users_line(error)}"
            raise TrainingError(
                f"a batch of {data.name} cannot be learned from ({said}); check its {what}, "
                f"and that the network gives {gives} in train mode"
            ) from error

    return loss


@contextmanager
def clear_errors(what: str) -> Iterator[None]:
    """Turn what is raised where memory runs out, or where the network fails, into one clear line."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError, MemoryError, IfsoError) as error:
        if out_of_memory(error):
            raise IfsoError(f"there is not enough memory for {what}; give smaller batches") from error
        if isinstance(error, IfsoError):
            raise
        raise DataError(
            f"the network fails on {what} ({describe_error(error)}{users_line(error)}); check that they fit together"
        ) from error
