"""``ifso.score``: a criterion over batches, with bounded memory and over all ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ifso.common.batches import looks_like_one_batch
from ifso.common.distributed import Sum, over_ranks
from ifso.common.loss_fn import LossFn, WatchedLoss
from ifso.common.module_state import named_tensors
from ifso.common.text import describe_error
from ifso.common.torch_state import ALONE, forget_caches, same_modes
from ifso.costs.cost import check_fits
from ifso.criteria.base import Criterion, Task
from ifso.criteria.registry import create, names
from ifso.errors import IfsoError, ScoreError
from ifso.graph.balancing import check_keep
from ifso.graph.channel_graph import ChannelGraph, Keep
from ifso.graph.tracing import check_model
from ifso.surgery.mask import masked


class ScoreWarning(UserWarning):
    """Scores were computed in another way than usual; the message says which, why, and how exact it is."""


def score(
    model: nn.Module,
    graph: ChannelGraph,
    loss_fn: LossFn,
    batches: Iterable[Any] | None,
    criterion: str | Criterion = "ifso",
    *,
    keep: Keep | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Scores of all units: ``{group name: float64 tensor [size]}`` on the CPU, the mean over the batches.

    ``loss_fn(model, batch)`` gives the mean loss of a batch. ``batches`` is gone through once; criteria that need no
    data take None. ``criterion`` is a name, with its ``options``, or an object. With ``keep`` the model is scored as it
    is without the units that ``keep`` drops; those score 0. The model is left as it was.

    Where the model or the loss uses what PyTorch's forward mode cannot differentiate, ``ifso`` goes another way, and a
    :class:`ScoreWarning` says which, why and how exact it is.

    When ``torch.distributed`` is initialised, the mean runs over the batches of all ranks and is the same on each.

    >>> from ifso.graph.tracing import trace
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> net[2].weight.data = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    >>> score(net, trace(net, torch.zeros(1, 2)), None, None, "magnitude")
    {'0': tensor([4., 6.], dtype=torch.float64)}
    """
    outcome: Sum | Exception
    try:
        outcome = _score_here(model, graph, loss_fn, batches, _criterion(criterion, options), keep)
    except Exception as error:
        outcome = error
    found = over_ranks(outcome, graph.num_units)
    if not found.count:
        raise ScoreError(
            "batches ran out before the first one; give an iterable with a batch in it (a generator can be used once)"
        )
    mean = found.total / found.count
    return {group.name: mean[group.units].clone() for group in graph.groups}


def _criterion(criterion: str | Criterion, options: Mapping[str, Any]) -> Criterion:
    if isinstance(criterion, str):
        return create(criterion, **options)
    if not isinstance(criterion, Criterion):
        raise ScoreError(f"criterion is {criterion!r}; give a Criterion object or one of {', '.join(names())}")
    if options:
        raise ScoreError(
            f"option {next(iter(options))!r} beside a criterion object: set it in {type(criterion).__name__}(…)"
        )
    return criterion


def _score_here(
    model: nn.Module,
    graph: ChannelGraph,
    loss_fn: LossFn,
    batches: Iterable[Any] | None,
    criterion: Criterion,
    keep: Keep | None,
) -> Sum:
    """The sum over the batches of this rank."""
    check_model(model)
    check_fits(model, graph)
    if not graph.num_units:
        raise ScoreError(f"nothing in {type(model).__name__} can be pruned, so there is no score; see graph.frozen")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ScoreError(
            f"{type(model).__name__} is on the meta device, which holds no numbers; load its weights first"
        )
    watched = WatchedLoss(loss_fn)
    task = Task(model, graph, watched, graph.kept(keep))
    check_keep(graph, task.kept)
    soft = contextlib.nullcontext() if keep is None or criterion.masks_itself else masked(model, graph, keep)
    with same_modes(model), soft, _written_back(model, graph):
        if not criterion.needs_batches:
            return Sum(_on_batch(criterion, task, None, watched), 1)
        total, count = torch.zeros(graph.num_units, dtype=torch.float64, device="cpu"), 0
        found = _iterable(batches, criterion)
        if criterion.prepares:
            found = list(found)
            with ALONE:
                criterion.prepare(task, found)
        for batch in found:
            count += 1
            watched.where = f" on batch {count}"
            total += _on_batch(criterion, task, batch, watched)
        note = criterion.note(task) if count else ""
        if note:
            warnings.warn(f"criterion {criterion.name!r}: {note}", ScoreWarning, stacklevel=3)
        return Sum(total, count)


@contextlib.contextmanager
def _written_back(model: nn.Module, graph: ChannelGraph) -> Iterator[None]:
    """Put back the weights that the model itself changes whenever it runs."""
    tensors = named_tensors(model)
    before = [
        (tensors[name], tensors[name].data, tensors[name].detach().clone()) for name in graph.written if name in tensors
    ]
    try:
        yield
    finally:
        for tensor, data, content in before:
            data.copy_(content)
            tensor.data = data


def _iterable(batches: Any, criterion: Criterion) -> Iterable[Any]:
    """The batches, unless they are one batch by mistake."""
    if looks_like_one_batch(batches):
        raise ScoreError(f"batches is a {type(batches).__name__} of tensors; give an iterable of batches, e.g. [batch]")
    if not isinstance(batches, Iterable):
        raise ScoreError(
            f"criterion {criterion.name!r} needs data, and batches is {type(batches).__name__}; "
            "give an iterable of batches, e.g. [batch]"
        )
    return batches


def _on_batch(criterion: Criterion, task: Task, batch: Any, watched: WatchedLoss) -> Tensor:
    """Scores of one batch on the CPU, 0 for units that are gone; finite, or an error."""
    forget_caches(task.model)
    try:
        with ALONE:
            values = criterion.units(task, batch)
    except (IfsoError, RuntimeError) as error:
        watched.refuse_infinite()
        if isinstance(error, IfsoError):
            raise
        raise ScoreError(f"criterion {criterion.name!r} failed{watched.where}: {describe_error(error)}") from error
    finally:
        forget_caches(task.model)
    watched.refuse_infinite()
    if values.shape != (task.graph.num_units,):
        raise ScoreError(
            f"criterion {criterion.name!r} gave scores of shape {tuple(values.shape)} for {task.graph.num_units} units"
        )
    values = values.detach().to("cpu", torch.float64).masked_fill(~task.kept[:-1], 0)
    for group in task.graph.groups:
        if not bool(values[group.units].isfinite().all()):
            raise ScoreError(
                f"criterion {criterion.name!r}{watched.where}: the score of group {group.name!r} is not finite; "
                "check weights and data, or work in float32"
            )
    return values
