"""What a criterion is: a small frozen dataclass that gives every unit a score, and what it looks at to do so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from ifso.common.loss_fn import LossFn
from ifso.common.module_state import named_tensors
from ifso.curvature.weight_space import Reader, readers, slices_of
from ifso.errors import ScoreError
from ifso.graph.channel_graph import ChannelGraph

if TYPE_CHECKING:
    from ifso.curvature.submodule_capture import CapturedSubmodules

Needs = Literal["nothing", "weights", "activations", "gradients", "curvature"]


@dataclass(frozen=True, eq=False)
class Task:
    """What is scored. ``kept`` [units + 1], from :meth:`ChannelGraph.kept`, says which units are still in ``M``.

    One task lasts for all batches of a :class:`~ifso.criteria.scorer.Scorer`, so that it can hold what they share.
    Where it ``shrinks``, units go meanwhile: their weights become zero and their entries of ``kept`` False, in place.
    """

    model: nn.Module
    graph: ChannelGraph
    loss_fn: LossFn
    kept: Tensor
    shrinks: bool = False

    def memo(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` made when it was first asked for under that key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        return named_tensors(self.model)

    @cached_property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.tensors.values())).device

    @cached_property
    def readers(self) -> list[Reader]:
        """Slices that read units: where the masks act."""
        return readers(self.graph, self.device)

    @cached_property
    def makers(self) -> list[Reader]:
        """Slices that make units: the filters of every layer that produces them."""
        made = [(group, each) for group in self.graph.groups for each in group.members if each.role == "produces"]
        names = {group.name for group, _ in made}
        unmade = [group.name for group in self.graph.groups if group.name not in names]
        if unmade:
            raise ScoreError(
                f"group {unmade[0]!r} is made by no filters; "
                "use a criterion that looks where units are read, such as magnitude, taylor or ifso"
            )
        return slices_of(made, self.device)

    def weight(self, name: str) -> Tensor:
        """The numbers of a parameter, detached, in float32 or better.

        Of a parametrised weight (``torch.nn.utils.parametrizations``) those that the layer computes with.
        """
        owner, marker, key = f".{name}".rpartition(".parametrizations.")
        tensor = self.tensors[name]
        if marker:
            used = getattr(self.model.get_submodule(owner.removeprefix(".")), key.split(".")[0])
            tensor = used if used.shape == tensor.shape else tensor
        return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))

    def add_slices(self, slices: Iterable[tuple[Reader, Tensor]]) -> Tensor:
        """Sum, for each unit [units], over its slices of numbers in the shape of their parameters."""
        total = torch.zeros(self.graph.num_units, dtype=torch.float64, device=self.device)
        for reader, numbers in slices:
            total += reader.gather(numbers.to(total.dtype), self.graph.num_units)
        return total


class Criterion(ABC):
    """Gives every unit a score, higher where it matters more. Subclasses are frozen dataclasses of their options.

    Attributes:
        name: that of the registry.
        needs: what it looks at: ``"nothing"``, ``"weights"``, ``"activations"``, ``"gradients"`` or ``"curvature"``.
        masks_itself: whether it sees the weights of removed units, and takes their masks into account itself.
        prepares: whether it looks at all batches, in :meth:`prepare`, before it scores any.
    """

    name: ClassVar[str]
    needs: ClassVar[Needs]
    masks_itself: ClassVar[bool] = False
    prepares: ClassVar[bool] = False

    @property
    def needs_batches(self) -> bool:
        """Whether it must see data."""
        return self.needs not in ("nothing", "weights")

    def prepare(self, task: Task, batches: Iterable[Any]) -> None:  # noqa: B027 (most need not)
        """Look at all batches that will be scored; only where it ``prepares``."""

    def unread(self, task: Task, batch: Any) -> Mapping[str, str]:  # noqa: ARG002 (most take any use)
        """Parameters that read units in a way of which this criterion knows nothing, each with that way.

        A run leaves such units alone.
        """
        return {}

    def note(self, task: Task) -> str:  # noqa: ARG002 (most have nothing to say)
        """How scores of the task were computed, if not as usual; else empty."""
        return ""

    def survivors(self, task: Task) -> Mapping[str, Tensor]:  # noqa: ARG002 (most look at zeros and ``kept`` only)
        """Factors by parameter, 1 where a weight is left, that are to be narrowed in place when units go.

        Only asked of a task that ``shrinks``.
        """
        return {}

    def micro_batched(self, size: int) -> Criterion | None:  # noqa: ARG002 (most are means over samples)
        """The same criterion cutting batches into parts of ``size`` samples itself.

        None if it is exact enough to take the mean of the parts' scores.
        """
        return None

    def replayed_parts(self, task: Task) -> CapturedSubmodules | None:  # noqa: ARG002 (most capture nothing)
        """The submodules that are replayed as CUDA graphs while the rest of the network runs as ever, if any."""
        return None

    @abstractmethod
    def units(self, task: Task, batch: Any) -> Tensor:
        """Score all units on one batch; the score of several batches is the mean.

        Args:
            task: the model, its graph and loss, and what is kept.
            batch: None for criteria that need no data.

        Returns:
            Scores ≥ 0 [units]; entries of units that are not kept do not count.
        """

    def __post_init__(self) -> None:
        """Refuse options of the wrong type, and those not among the choices of a ``Literal``."""
        hints = get_type_hints(type(self))
        for option in fields(self):  # type: ignore[arg-type]
            value = getattr(self, option.name)
            if not _matches(value, hints[option.name]):
                wanted = _described(hints[option.name])
                raise ScoreError(f"criterion {self.name!r}: {option.name} must be {wanted}, got {value!r}")


def _matches(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    if origin in (Union, UnionType):
        return any(_matches(value, part) for part in get_args(hint))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) else True


def _described(hint: Any) -> str:
    """A type in words.

    >>> _described(Literal["mean", "sum"]), _described(int | None)
    ("'mean' or 'sum'", 'int or None')
    """
    origin = get_origin(hint)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if origin in (Union, UnionType):
        return " or ".join(_described(part) for part in get_args(hint))
    return "None" if hint is NoneType else getattr(hint, "__name__", str(hint))
