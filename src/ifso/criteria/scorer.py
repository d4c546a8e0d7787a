"""One pipeline of scores: ``ifso.score`` is a :class:`Scorer` over batches and ranks, a pruning run has another one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifso.common.batches import looks_like_one_batch, micro_batches
from ifso.common.distributed import over_ranks
from ifso.common.loss_fn import LossFn, WatchedLoss
from ifso.common.module_state import named_tensors
from ifso.common.snapshot import Image
from ifso.common.tensors import Writes, storage_of
from ifso.common.text import describe_error
from ifso.common.torch_state import ALONE, forget_caches, same_modes
from ifso.costs.cost import check_fits
from ifso.criteria.base import Criterion, Task
from ifso.criteria.registry import create, names
from ifso.errors import IfsoError, ScoreError
from ifso.graph.balancing import check_keep
from ifso.graph.channel_graph import ChannelGraph, Keep, by_group
from ifso.graph.execution import trainable
from ifso.graph.tracing import check_model
from ifso.surgery.mask import masked


class ScoreWarning(UserWarning):
    """Scores were computed in another way than usual; the message says which, why, and how exact it is."""


class Scorer:
    """Scores the units of a network by one criterion, batch after batch.

    ``kept`` [units + 1] says which units are in the network. Where it ``shrinks``, as in a run, units go meanwhile:
    their weights are zero then, and :meth:`narrow_` is called.
    """

    def __init__(
        self,
        criterion: Criterion,
        model: nn.Module,
        graph: ChannelGraph,
        loss_fn: WatchedLoss,
        kept: Tensor,
        *,
        shrinks: bool = False,
    ) -> None:
        self.criterion, self.loss_fn = criterion, loss_fn
        self.task = Task(model, graph, loss_fn, kept, shrinks)
        self._survivors = criterion.survivors(self.task) if shrinks else {}
        self._micro_batch: int | None = None

    @torch.no_grad()
    def narrow_(self, kept: Tensor, alive: Mapping[str, Tensor]) -> None:
        """Units have gone; ``alive`` has 1 for the weights that are left, for each parameter that has lost some."""
        self.task.kept.copy_(kept)
        for name in self._survivors.keys() & alive.keys():
            self._survivors[name].copy_(alive[name])

    def cut_batches(self, size: int) -> None:
        """From now on look at so many samples at a time, to fit into less memory."""
        cutting = self.criterion.micro_batched(size)
        if cutting is None:
            self._micro_batch = size
        else:
            self.criterion = cutting

    def free_captured(self) -> bool:
        """Give the memory of replayed submodules back; return whether there was any."""
        parts = self.criterion.replayed_parts(self.task)
        return parts is not None and parts.free()

    def notes(self) -> Iterator[tuple[str, str]]:
        """(key, line) of what is not as usual: submodules without a CUDA graph, and scores computed another way."""
        parts = self.criterion.replayed_parts(self.task)
        for name, reason in ({} if parts is None else parts.refused).items():
            yield f"{name}: {reason}", f"{name} is scored without a CUDA graph: {reason}"
        note = self.criterion.note(self.task)
        if note:
            yield "note", note

    def prepare(self, batches: Iterable[Any]) -> None:
        """Let the criterion look at all batches, if it wants to."""
        if self.criterion.prepares:
            with ALONE, same_modes(self.task.model):
                self.criterion.prepare(self.task, batches)

    def units(self, batch: Any) -> Tensor:
        """Scores [units] in float64 on the device of the weights; nothing waits for their numbers."""
        task = self.task
        total = torch.zeros(task.graph.num_units, dtype=torch.float64, device=task.device)
        with ALONE, same_modes(task.model):
            for part, share in micro_batches(batch, self._micro_batch):
                values = self.criterion.units(task, part)
                if values.shape != total.shape:
                    raise ScoreError(
                        f"criterion {self.criterion.name!r} must give {len(total)} scores, one for each unit, "
                        f"got shape {tuple(values.shape)}"
                    )
                total += values.detach().to(total) * share
        return total

    def checked_units(self, batch: Any) -> Tensor:
        """Scores of one batch on the CPU, 0 for units that are gone; finite, or an error."""
        task, name, where = self.task, self.criterion.name, self.loss_fn.where
        forget_caches(task.model)
        try:
            values = self.units(batch)
        except (IfsoError, RuntimeError) as error:
            self.loss_fn.refuse_infinite()
            if isinstance(error, IfsoError):
                raise
            raise ScoreError(f"criterion {name!r} failed{where}: {describe_error(error)}") from error
        finally:
            forget_caches(task.model)
        self.loss_fn.refuse_infinite()
        values = values.cpu().masked_fill(~task.kept[:-1], 0)
        for group in task.graph.groups:
            if not bool(values[group.units].isfinite().all()):
                raise ScoreError(
                    f"criterion {name!r}{where}: the score of group {group.name!r} is not finite; "
                    "check weights and data, or work in float32"
                )
        return values


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
    """Score all units by a criterion, as the mean over the batches.

    Args:
        model: left as it was.
        graph: from :func:`ifso.trace`.
        loss_fn: ``loss_fn(model, batch)`` gives the mean loss of a batch.
        batches: gone through once. Criteria that need no data take None. When ``torch.distributed`` is initialised, the
            mean runs over the batches of all ranks and is the same on each.
        criterion: a name, with its ``options``, or an object.
        keep: score the model without the units that ``keep`` drops; those score 0.
        options: of the criterion.

    Returns:
        ``{group name: float64 tensor [size]}`` on the CPU, higher where a unit matters more.

    Raises:
        ScoreError: the criterion does not fit the network, or a loss or score is not finite.

    Warns:
        ScoreWarning: ``ifso`` met what PyTorch's forward mode cannot differentiate and took another way, which the
            message names with its error.

    >>> from ifso.graph.tracing import trace
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> net[2].weight.data = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    >>> score(net, trace(net, torch.zeros(1, 2)), None, None, "magnitude")
    {'0': tensor([4., 6.], dtype=torch.float64)}
    """
    outcome: Tensor | Exception
    try:
        with trainable():
            outcome = _score_on_this_rank(model, graph, loss_fn, batches, as_criterion(criterion, options), keep)
    except Exception as error:
        outcome = error
    result = over_ranks(outcome, graph.num_units)
    if not result[-1]:
        raise ScoreError(
            "batches ran out before the first one; give an iterable with a batch in it (a generator can be used once)"
        )
    return by_group(graph, result[:-1] / result[-1])


def as_criterion(criterion: str | Criterion, options: Mapping[str, Any]) -> Criterion:
    """The criterion of that name with its options, or the object itself."""
    if isinstance(criterion, str):
        return create(criterion, **options)
    if not isinstance(criterion, Criterion):
        raise ScoreError(f"criterion must be a Criterion object or one of {', '.join(names())}; got {criterion!r}")
    if options:
        raise ScoreError(
            f"option {next(iter(options))!r} beside a criterion object: set it in {type(criterion).__name__}(…)"
        )
    return criterion


def _score_on_this_rank(
    model: nn.Module,
    graph: ChannelGraph,
    loss_fn: LossFn,
    batches: Iterable[Any] | None,
    criterion: Criterion,
    keep: Keep | None,
) -> Tensor:
    """The sum over the batches of this rank [units + 1], and last their number."""
    check_model(model)
    check_fits(model, graph)
    if not graph.num_units:
        raise ScoreError(f"nothing in {type(model).__name__} can be pruned, so there is no score; see graph.frozen")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ScoreError(
            f"{type(model).__name__} is on the meta device, which holds no numbers; load its weights first"
        )
    scorer = Scorer(criterion, model, graph, WatchedLoss(loss_fn), graph.kept(keep))
    check_keep(graph, scorer.task.kept)
    soft = contextlib.nullcontext() if keep is None or criterion.masks_itself else masked(model, graph, keep)
    with same_modes(model), soft, _written_back(model, graph):
        if not criterion.needs_batches:
            return F.pad(scorer.checked_units(None), (0, 1), value=1)
        total, count = torch.zeros(graph.num_units, dtype=torch.float64, device="cpu"), 0
        batches = _iterable(batches, criterion)
        if criterion.prepares:
            batches = list(batches)
            scorer.prepare(batches)
        for batch in batches:
            count += 1
            scorer.loss_fn.where = f" on batch {count}"
            total += scorer.checked_units(batch)
        note = criterion.note(scorer.task) if count else ""
        if note:
            warnings.warn(f"criterion {criterion.name!r}: {note}", ScoreWarning, stacklevel=3)
        return F.pad(total, (0, 1), value=count)


@contextlib.contextmanager
def _written_back(model: nn.Module, graph: ChannelGraph) -> Iterator[None]:
    """Put back what the model itself changes whenever it runs: weights, attributes, and tensors that hang on them."""
    tensors, image = named_tensors(model), Image(model)
    own = {storage_of(tensor) for tensor in tensors.values()}
    others = Writes(image.tensors)
    for tensor in image.tensors:
        if storage_of(tensor) not in own:
            others.protect(tensor)
    before = [
        (tensors[name], tensors[name].data, tensors[name].detach().clone()) for name in graph.written if name in tensors
    ]
    try:
        yield
    finally:
        for tensor, data, content in before:
            data.copy_(content)
            tensor.data = data
        others.undo()
        image.restore()


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
