"""The network during a run: units go softly, their slices zero in place, and from time to time for real."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ifso.common.module_state import copy_of, named_tensors
from ifso.common.torch_state import forget_caches, same_modes
from ifso.costs.cost import count
from ifso.errors import IfsoError, RunError
from ifso.graph.channel_graph import STAYS, ChannelGraph, by_group
from ifso.graph.layouts import kept_indices, surviving, varying_dims
from ifso.graph.reductions import ExactReductions
from ifso.graph.tracing import trace
from ifso.surgery.compact import compact_, round_of, state_of
from ifso.surgery.mask import gain_of
from ifso.surgery.recipe import Recipe, recipe_of, remember, unchanged

MODEL, OPTIMIZER = "model.", "optimizer."
"""How names of tensors in a checkpoint begin."""


class ShrinkingNetwork:
    """A model that loses units, which keep the numbers they have in the ``original`` graph.

    Removed slices are zero, and so are their gradients and momenta, so that they stay zero whatever step is taken.
    :meth:`compact_` takes them out; then ``graph`` is that of the smaller model and ``numbers`` gives, for each of its
    units, the number in the original. ``present`` are the original units whose slices are still there, also those that
    are no longer units of ``graph`` because they are all that is left. Where other units are missing there, or are no
    longer one unit each, ``told_apart`` is False, and nothing more can go.
    """

    def __init__(self, model: nn.Module, graph: ChannelGraph, ignore: Sequence[str] = ()) -> None:
        self.model, self.original, self.graph = model, graph, graph
        self.kept = graph.kept(None)
        self.numbers = torch.arange(graph.num_units, device="cpu")
        self.present = torch.ones(graph.num_units, dtype=torch.bool, device="cpu")
        self.can_shrink = self.told_apart = True
        self._verified = False
        self._rehearsed: tuple[Tensor, ChannelGraph] | None = None
        self._ignore, self._earlier = tuple(ignore), recipe_of(model)
        self._modes = {name: module.training for name, module in model.named_modules()}

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def kept_here(self) -> Tensor:
        """Which units of the present graph are left, with a last entry True, as from :meth:`ChannelGraph.kept`."""
        return torch.cat([self.kept[self.numbers], torch.ones(1, dtype=torch.bool, device="cpu")])

    @property
    def keep(self) -> dict[str, Tensor]:
        """What is left of the original, by name of the group."""
        return by_group(self.original, self.kept)

    def in_original(self, scores: Tensor) -> Tensor:
        """Scores of the present units as scores of the original ones; 0 for those that are gone."""
        found = torch.zeros(self.original.num_units, dtype=torch.float64, device="cpu")
        found[self.numbers] = scores.detach().to("cpu", torch.float64)
        return found.masked_fill(~self.kept[:STAYS], 0)

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, functions that take statistics over channels see only those that are left."""
        if not self.graph.reductions:
            return contextlib.nullcontext()
        return ExactReductions(self.model, self.graph.reductions, self.kept_here)

    def remove_(self, units: Sequence[int], optimizer: Optimizer | None = None) -> None:
        """Take units away softly."""
        self.kept[torch.tensor(list(units), dtype=torch.long, device="cpu")] = False
        self.zero_(optimizer, self.sliced_by(units))

    def sliced_by(self, units: Sequence[int]) -> set[str]:
        """Names of the tensors that have slices of these units."""
        here = torch.isin(self.numbers, torch.tensor(list(units), dtype=torch.long, device="cpu"))
        groups = [group for group in self.graph.groups if bool(here[group.units].any())]
        return {member.parameter for group in groups for member in group.members}

    @torch.no_grad()
    def zero_(self, optimizer: Optimizer | None = None, names: Collection[str] | None = None) -> None:
        """Every slice of a removed unit becomes zero in place, and what the optimizer remembers of it.

        Only the tensors of these ``names`` are looked at, if given.
        """
        forget_caches(self.model)
        kept = self.kept_here
        for name in self.graph.gains:
            gain = gain_of(self.model, self.graph, kept, name)
            if gain is not None:
                self.model.get_parameter(name).data.mul_(gain)
        for name, tensor in named_tensors(self.model).items():
            layout = self.graph.masking(name)
            if layout is None or not isinstance(tensor, nn.Parameter) or (names is not None and name not in names):
                continue
            gone = ~surviving(layout, kept)
            if bool(gone.any()):
                gone = gone.to(tensor.device)
                for part in (tensor.data, *state_of(optimizer, tensor).values()):
                    part.masked_fill_(gone, 0)

    def compact_(self, optimizer: Optimizer | None = None, multiple: int = 1) -> None:
        """Take removed units out for good and trace what is left.

        With ``multiple`` each group loses only so many that a multiple of it is left, zeros among them: kernels of a
        GPU like that.
        """
        keep = self._physical_keep(multiple)
        if all(bool(part.all()) for part in keep.values()):
            return
        old, numbers, kept = self.graph, self.numbers, self.graph.kept(keep)
        rehearsed, self._rehearsed = self._rehearsed, None
        with self._as_traced():
            compact_(self.model, old, keep, optimizer=optimizer, verify=not self._verified)
            self._verified = True
            if rehearsed is not None and torch.equal(rehearsed[0], kept):
                smaller = rehearsed[1]
            else:
                smaller = trace(self.model, old.inputs, ignore=self._ignore)
        self.present[numbers[~kept[:STAYS]]] = False
        found = _numbers(old, kept, numbers, smaller)
        self.told_apart = self.told_apart and self._complete(kept, found)
        self.graph, self.numbers = smaller, found

    def rehearse(self, multiple: int = 1) -> bool:
        """Could units still be told apart after :meth:`compact_`? Tried on a copy; if not, it is never asked again."""
        if self.can_shrink:
            keep = self._physical_keep(multiple)
            kept = self.graph.kept(keep)
            with self._as_traced():
                trial = copy_of(self.model)
            try:
                compact_(trial, self.graph, keep, verify=False)
                smaller = trace(trial, self.graph.inputs, ignore=self._ignore)
                self._rehearsed = (kept, smaller)
                self.can_shrink = self._complete(kept, _numbers(self.graph, kept, self.numbers, smaller))
            except IfsoError:
                self.can_shrink = False
        return self.can_shrink

    def _complete(self, kept: Tensor, found: Tensor) -> bool:
        """Return whether all units ``found`` are of the original, and none that can still go is left out."""
        missing = torch.zeros(self.original.num_units, dtype=torch.bool, device="cpu")
        missing[self.numbers[kept[:STAYS]]] = True
        missing[found[found != STAYS]] = False
        return bool((found != STAYS).all()) and not bool((missing & ~self._alone(kept)).any())

    def saving(self, multiple: int = 1) -> float:
        """The share of the present MACs that :meth:`compact_` would save."""
        now = count(self.graph, self.graph.kept(None)).macs
        return 1 - count(self.graph, self.graph.kept(self._physical_keep(multiple))).macs / max(now, 1)

    def tensors(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Everything that changes, by name: not copied. ``present`` are the units whose slices are still there."""
        found = {f"{MODEL}{name}": tensor.detach() for name, tensor in named_tensors(self.model).items()}
        for number, values in optimizer.state_dict()["state"].items():
            found |= {f"{OPTIMIZER}{number}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
        return {**found, "kept": self.kept, "present": self.present}

    def shrink_to_(self, tensors: Mapping[str, Tensor]) -> None:
        """Bring a fresh network to the shape that it had in a checkpoint: before the optimizer is made."""
        for name in ("kept", "present"):
            units = self.original.num_units + (name == "kept")
            if name not in tensors or tensors[name].dtype != torch.bool or tensors[name].shape != (units,):
                raise RunError(f"the checkpoint does not fit this network of {self.original.num_units} units")
        self.kept = torch.cat([tensors["present"], torch.ones(1, dtype=torch.bool, device="cpu")])
        self.compact_()
        self.kept = tensors["kept"].clone()

    @torch.no_grad()
    def fill_(self, optimizer: Optimizer, tensors: Mapping[str, Tensor], plain: Any) -> None:
        """Load stored tensors, and into the optimizer what :func:`plain_state_of` gave."""
        for name, tensor in named_tensors(self.model).items():
            stored = tensors.get(f"{MODEL}{name}")
            if stored is None or stored.shape != tensor.shape:
                shape, found = tuple(tensor.shape), "none" if stored is None else tuple(stored.shape)
                raise RunError(f"the checkpoint does not fit: {name} has shape {shape}, stored is {found}")
            tensor.copy_(stored)
        state: dict[int, dict[str, Any]] = {int(number): dict(values) for number, values in plain["state"].items()}
        for name, stored in tensors.items():
            if name.startswith(OPTIMIZER):
                number, _, key = name.removeprefix(OPTIMIZER).partition(".")
                state.setdefault(int(number), {})[key] = stored.clone()
        optimizer.load_state_dict({"state": state, "param_groups": plain["groups"]})

    def compacted_copy(self) -> tuple[nn.Module, Recipe]:
        """A copy of the model without the units that are gone, and its recipe. The model itself stays as it is."""
        with self._as_traced():
            copied = copy_of(self.model)
        earlier, keep = recipe_of(self.model), self._physical_keep(1)
        if earlier is not None:
            remember(copied, earlier)
        if not all(bool(part.all()) for part in keep.values()):
            compact_(copied, self.graph, keep, verify=False)
        return copied, self.recipe(copied)

    def recipe(self, copied: nn.Module | None = None) -> Recipe:
        """The whole way as one round after what was removed before the run; remembered for the model, or its copy."""
        model = self.model if copied is None else copied
        whole = recipe_of(model) or unchanged(model)
        rounds = (*(self._earlier.rounds if self._earlier else ()), round_of(self.original, self.kept))
        attributes = sorted(whole.attributes, key=lambda change: str(change.place))
        recipe = Recipe(whole.model, whole.shapes, tuple(attributes), rounds)
        remember(model, recipe)
        return recipe

    def _physical_keep(self, multiple: int) -> dict[str, Tensor]:
        balanced = {unit for one in self.graph.balances for unit in one.blocks.unique().tolist()}
        keep = {}
        for group in self.graph.groups:
            kept = self.kept_here[group.units].clone()
            if multiple > 1 and not balanced & set(range(group.first, group.first + group.size)):
                spare = (~kept).nonzero().flatten()
                kept[spare[: -int(kept.sum()) % multiple]] = True
            keep[group.name] = kept
        return keep

    @contextlib.contextmanager
    def _as_traced(self) -> Iterator[None]:
        """Within it every module is in train or eval mode as when the original was traced."""
        with same_modes(self.model):
            for name, module in self.model.named_modules():
                module.training = self._modes.get(name, module.training)
            yield

    def _alone(self, kept: Tensor) -> Tensor:
        """Units, in original numbers, that are all that is left on some axis, and so can never go."""
        alone = torch.zeros(self.original.num_units, dtype=torch.bool, device="cpu")
        for layout in self.graph.layouts.values():
            for layer in layout.layers:
                left = layer[kept[layer]].unique()
                if left.numel() == 1 and int(left) != STAYS:
                    alone[self.numbers[left]] = True
        return alone


class RemovedWeights:
    """The weights of removed units, for a criterion that wants to see them; a context that puts them back."""

    def __init__(self, network: ShrinkingNetwork) -> None:
        self._network = network
        self._tensors = [parameter.data for parameter in network.model.parameters()]
        self._away = [torch.zeros_like(tensor) for tensor in self._tensors]

    def remember(self, units: Sequence[int]) -> None:
        """Units are about to go."""
        with torch.no_grad():
            before = [tensor.clone() for tensor in self._tensors]
            self._network.remove_(units)
            for away, old, now in zip(self._away, before, self._tensors, strict=True):
                away.add_(old - now)

    def tensors(self) -> dict[str, Tensor]:
        """By name, for a checkpoint."""
        return {f"ghost.{number}": tensor for number, tensor in enumerate(self._away)}

    def __enter__(self) -> None:
        torch._foreach_add_(self._tensors, self._away)

    def __exit__(self, *exc: object) -> None:
        torch._foreach_sub_(self._tensors, self._away)


def plain_state_of(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer remembers that is no tensor."""
    state = optimizer.state_dict()
    numbers = {
        str(number): {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for number, values in state["state"].items()
    }
    return {"state": numbers, "groups": [{**group, "params": list(group["params"])} for group in state["param_groups"]]}


def _numbers(old: ChannelGraph, kept: Tensor, numbers: Tensor, new: ChannelGraph) -> Tensor:
    """For each unit of the smaller model's graph its number in the original; STAYS if it is not one unit there."""
    found = torch.full((new.num_units,), STAYS, device="cpu")
    torn = torch.zeros(new.num_units, dtype=torch.bool, device="cpu")
    for name, layout in new.layouts.items():
        before = kept_indices(old.layouts[name], kept) if name in old.layouts else None
        if before is None:
            continue
        olds = _lines(old.layouts[name].layers)
        for dim, units in _lines(layout.layers).items():
            if dim not in olds:
                torn[units[units != STAYS]] = True
                continue
            earlier = olds[dim][before[dim]]
            here = units != STAYS
            names = torch.where(earlier == STAYS, STAYS, numbers[earlier])[here]
            torn[units[here][(found[units[here]] != STAYS) & (found[units[here]] != names)]] = True
            found[units[here]] = names
    return found.masked_fill(torn, STAYS)


def _lines(layers: Sequence[Tensor]) -> dict[int, Tensor]:
    """Unit numbers by the dim along which they change."""
    dims = [varying_dims(layer) for layer in layers]
    return {only[0]: layer.flatten() for only, layer in zip(dims, layers, strict=True) if len(only) == 1}
