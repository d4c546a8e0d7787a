"""The network on its way from "the units are there" (m = 1) to "they are gone" (m = 0)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ifso.common.torch_state import forget_caches
from ifso.costs.cost import check_fits
from ifso.curvature.products import Products
from ifso.curvature.weight_space import survivors
from ifso.graph.balancing import check_keep
from ifso.graph.channel_graph import STAYS, ChannelGraph, Keep
from ifso.graph.reductions import ExactReductions
from ifso.surgery.mask import masked


class MaskedModel:
    """A model from which ``keep`` removes units by a mask, and the weights that survive them.

    ``support`` is 1 over the surviving weights of W and 0 over the others; the mask scales the slices that read the
    removed units. At m = 0 the state is that of :func:`ifso.masked`.
    """

    def __init__(self, products: Products, graph: ChannelGraph, keep: Keep) -> None:
        check_fits(products.model, graph)
        self._kept = graph.kept(keep)
        check_keep(graph, self._kept)
        self._products, self._graph, self._keep = products, graph, keep
        self.space = products.space
        named = dict(products.model.named_parameters())
        self._reading = {reader.parameter: named[reader.parameter] for reader in products.readers}
        self._tensors = {**self._reading, **self.space.tensors}
        self._originals = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        self._alive = survivors(self.space, graph, self._kept)
        self.support = self.space.flat(
            {name: alive.to(self._tensors[name].dtype) for name, alive in self._alive.items()}
        )

    @property
    def removed(self) -> int:
        """How many units go."""
        return int((~self._kept).sum())

    @property
    def has_reductions(self) -> bool:
        """Whether functions over channels (layer norm …) make the path start away from the model."""
        return bool(self._graph.reductions)

    def start(self) -> Tensor:
        """W as the model had it."""
        return self.space.flat({name: self._originals[name] for name in self.space.tensors})

    def direction(self) -> Tensor:
        """∂U/∂m for U = m ⊙ W: the slices of W that read removed units, as they were; zero elsewhere."""
        names = self.space.tensors.keys() & self._reading
        return self.space.flat({name: self._originals[name] * (1 - self._factor(name, 0.0)) for name in names})

    @contextlib.contextmanager
    def at(self, m: float) -> Iterator[None]:
        """Set the removed units' mask to m; surviving weights stay as they are assigned, before and after."""
        if m == 0:
            with masked(self._products.model, self._graph, self._keep):
                yield
            return
        forget_caches(self._products.model)
        factors = {name: self._factor(name, m) for name in self._reading}
        try:
            self._scale_(factors, masked=True)
            reductions = self._graph.reductions
            exact = ExactReductions(self._products.model, reductions, self._kept) if reductions else None
            with exact or contextlib.nullcontext():
                yield
        finally:
            self._scale_(factors, masked=False)

    @torch.no_grad()
    def _scale_(self, factors: Mapping[str, Tensor], *, masked: bool) -> None:
        """Scale the slices that read removed units, or put them back."""
        for name, factor in factors.items():
            original = self._originals[name]
            tensor = self._reading[name]
            tensor.copy_(torch.where(factor == 1, tensor, original * factor if masked else original))

    def _factor(self, name: str, m: float) -> Tensor:
        tensor = self._reading[name]
        entries = torch.full((self._kept.numel(),), m, dtype=tensor.dtype, device=tensor.device)
        entries[self._kept.to(tensor.device)] = 1
        entries[STAYS] = 1
        factor = torch.ones((), dtype=tensor.dtype, device=tensor.device)
        for reader in self._products.readers:
            if reader.parameter == name:
                factor = factor * reader.spread(entries, tensor.shape)
        return factor

    @torch.no_grad()
    def assign_(self, weights: Tensor) -> None:
        """Put surviving weights into the model; the others stay as they are."""
        for name, part in self.space.split(weights).items():
            tensor = self.space.tensors[name]
            tensor.copy_(torch.where(self._alive[name], part, tensor))

    @torch.no_grad()
    def restore(self) -> None:
        """Put every weight back as it was."""
        for name, tensor in self._tensors.items():
            tensor.copy_(self._originals[name])
