"""Slow float64 truth for weights fitted anew, from the layers themselves; nothing of ``least_squares`` is used.

The update W_K = W Ã[:, K] Ã[K, K]⁻¹ with Ã = A + λI is the V, zero outside K, at which tr (W − V) Ã (W − V)ᵀ is least:
its derivative in V_K is (W − V) Ã[:, K] = 0. With A = E[a aᵀ] that is

    E |W a − V a|² + λ |W − V|²,

a ridge towards the old weights (those that go only add a constant, λ|W_gone|²); with A the covariance, the shift c that
is taken away is free: E |W a − V a − c|² + λ |W − V|². Here it is solved as plain least squares, output by output: rows
√(1/n) · x and √λ · I, right-hand sides √(1/n) · z and √λ · w_old. x is found by running the layer on unit weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ifso
from reference.second_order import mask_places

DIMS = {"linear": 0} | {f"conv{'_transpose' * t}{d}d": d for t in (0, 1) for d in (1, 2, 3)}


@dataclass(frozen=True)
class Called:
    """One call of a layer, and what it gave."""

    kind: str
    x: Tensor
    options: tuple[Any, ...]
    out: Tensor
    bias: Tensor | None

    @property
    def groups(self) -> int:
        return self.options[3] if self.options else 1

    @property
    def transposed(self) -> bool:
        return "transpose" in self.kind

    def again(self, weight: Tensor, output: int) -> Tensor:
        """What another weight gives at all positions of an output, without a bias."""
        found = getattr(F, self.kind)(self.x, weight, None, *self.options)
        return found.select(found.dim() - DIMS[self.kind] - 1, output).flatten()


@dataclass
class Calls:
    """The calls of each weight, and the inputs of batch norms with their running means."""

    layers: dict[int, list[Called]]
    norms: list[tuple[Tensor, Tensor | None]]


@contextlib.contextmanager
def watched() -> Iterator[Calls]:
    """Every call of a layer by the id of its weight; functions are replaced one by one."""
    calls = Calls({}, [])

    def layer(kind: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any) -> Tensor:
            out = function(x, weight, bias, *options)
            calls.layers.setdefault(id(weight), []).append(Called(kind, x.detach(), options, out, bias))
            return out

        return call

    def batch_norm(x: Tensor, mean: Tensor | None, *rest: Any, **options: Any) -> Tensor:
        calls.norms.append((x, mean))
        return plain(x, mean, *rest, **options)

    plain = F.batch_norm
    with contextlib.ExitStack() as stack:
        for kind in DIMS:
            stack.enter_context(mock.patch.object(F, kind, layer(kind, getattr(F, kind))))
        stack.enter_context(mock.patch.object(F, "batch_norm", batch_norm))
        yield calls


def entries_of(weight: Tensor, output: int, groups: int, transposed: bool) -> Tensor:
    """The places, in a flat weight, of the numbers that make one output."""
    numbers = torch.arange(weight.numel()).reshape(weight.shape)
    if not transposed:
        return numbers[output].flatten()
    group, place = divmod(output, weight.shape[1])
    return numbers.chunk(groups)[group][:, place].flatten()


def design(calls: list[Called], weight: Tensor, output: int, entries: Tensor) -> Tensor:
    """X [rows, entries]: what the output would be if one weight were 1 and the others 0."""
    columns = []
    for entry in entries.tolist():
        unit = torch.zeros(weight.numel(), dtype=weight.dtype)
        unit[entry] = 1
        columns.append(torch.cat([call.again(unit.view(weight.shape), output) for call in calls]))
    return torch.stack(columns, 1)


def ridge(x: Tensor, w: Tensor, kept: Tensor, damping: float, centred: bool) -> tuple[Tensor, float]:
    """The weights [k] and the shift that replace x·w without the columns that go."""
    rows = len(x)
    sizes = (x - x.mean(0) if centred else x).square().mean(0)
    alive = sizes > 1e-12 * x.square().mean(0)
    lam = damping * (float(sizes[alive].mean()) if bool(alive.any()) else 1.0)
    ones = torch.full((rows, int(centred)), 1.0, dtype=x.dtype)
    upper = torch.cat([x[:, kept], ones], 1) / rows**0.5
    lower = torch.eye(int(kept.sum()), upper.shape[1], dtype=x.dtype) * lam**0.5
    right = torch.cat([x @ w / rows**0.5, w[kept] * lam**0.5])
    found = torch.linalg.lstsq(torch.cat([upper, lower]), right[:, None], driver="gelsd").solution[:, 0]
    new = torch.zeros_like(w)
    new[kept] = found[: int(kept.sum())]
    return new, float(found[-1]) if centred else 0.0


def truth(
    model: nn.Module,
    graph: ifso.ChannelGraph,
    keep: dict[str, Tensor],
    run: Callable[[nn.Module], Iterable[None]],
    damping: float,
) -> dict[str, Tensor]:
    """New weights, biases and running means by name, of all layers that lose inputs."""
    with watched() as calls:
        for _ in run(model):
            pass
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found: dict[str, Tensor] = {}
    for (name, dim), owner in mask_places(graph).items():
        weight, here = named[name].detach(), calls.layers.get(id(named[name]), [])
        if weight.dim() < 2 or not here or (dim == 0) != here[0].transposed:
            continue
        sizes = [
            size if place == dim or (owner.dim() > 1 and not place) else 1 for place, size in enumerate(weight.shape)
        ]
        kept = graph.kept(keep)[owner].reshape(sizes).expand(weight.shape)
        if bool(kept.all()):
            continue
        norms = [[mean for x, mean in calls.norms if x is call.out] for call in here]
        found |= _layer(named, name, here, kept.flatten(), norms, damping)
    return found


def _layer(
    named: dict[str, Tensor], name: str, here: list[Called], kept: Tensor, norms: list[list[Any]], damping: float
) -> dict[str, Tensor]:
    weight, bias, groups, transposed = named[name].detach(), here[0].bias, here[0].groups, here[0].transposed
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    new, shift = torch.zeros(weight.numel(), dtype=weight.dtype), torch.zeros(outputs, dtype=weight.dtype)
    for output in range(outputs):
        entries = entries_of(weight, output, groups, transposed)
        if output % (outputs // groups) == 0:
            x = design(here, weight, output, entries)
        w = weight.flatten()[entries]
        new[entries], shift[output] = ridge(x, w, kept[entries], damping, bias is not None or all(norms))
    found = {name: new.view(weight.shape)}
    moved = [(bias, 1)] if bias is not None else [(mean, -1) for one in norms for mean in one] if all(norms) else []
    for tensor, sign in moved:
        found |= {key: tensor.detach() + sign * shift for key, other in named.items() if other is tensor}
    return found
