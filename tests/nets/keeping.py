"""Networks that keep something of a run: in caches, hooks, globals, classes, scripted parts, weights."""

from __future__ import annotations

import collections
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GLOBAL_DICT: dict[Any, Tensor] = {}
GLOBAL_LIST: list[Tensor] = []
GLOBAL_DEQUE: collections.deque[Tensor] = collections.deque(maxlen=2)
GLOBAL_NESTED: dict[str, dict[Any, Any]] = {"tables": {}}
LAST: Tensor | None = None
COUNT = 0
GLOBAL_TENSOR = torch.zeros(8)
REGISTRY = types.SimpleNamespace(found=[], by_name={})


@functools.lru_cache
def table(n: int) -> Tensor:
    return torch.linspace(0.5, 1.5, n)


@functools.cache
def tables(n: int) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.ones(n), {"b": torch.linspace(0.0, 1.0, n)}


class Holder:
    """An object with attributes, and one without a dict."""

    kept: Tensor | None = None

    def __init__(self) -> None:
        self.items: list[Any] = []


class Slotted:
    __slots__ = ("kept",)


class Net(nn.Module):
    """Two linear layers with something between them: ``between(net, h)``."""

    kept: Tensor | None = None
    shared: dict[Any, Tensor] = {}  # noqa: RUF012

    def __init__(self, between: Callable[[Net, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.between = between
        self.register_buffer("steps", torch.zeros(()))
        self.space = types.SimpleNamespace()
        self.holder, self.nested, self.recent = Holder(), {"one": {"two": {}}}, collections.deque(maxlen=3)
        self.items: list[Any] = []
        self.marks: set[Any] = set()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.b(h if self.between is None else self.between(self, h))


PATTERNS: dict[str, Callable[[Net, Tensor], Tensor]] = {}


def pattern(function: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    PATTERNS[function.__name__.replace("_", "-")] = function
    return function


def keeps(store: Callable[[Net, Tensor], object]) -> Callable[[Net, Tensor], Tensor]:
    """A pattern that hands its features on as they are, after ``store`` has done something with them."""

    def between(net: Net, h: Tensor) -> Tensor:
        store(net, h)
        return h

    return between


def _set_global(h: Tensor) -> None:
    global LAST, COUNT
    LAST, COUNT = h, COUNT + 1


def _cached(store: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    if key not in store:
        store[key] = make()
    return store[key]


PATTERNS |= {
    "lru-cache": lambda net, h: h * table(4).mean(),
    "cache-of-a-tuple": lambda net, h: h * tables(4)[0].mean() + tables(4)[1]["b"].sum(),
    "global-dict": lambda net, h: h * _cached(GLOBAL_DICT, h.dtype, lambda: torch.full((1,), 1.5)),
    "global-list": keeps(lambda net, h: GLOBAL_LIST.append(h)),
    "global-deque": keeps(lambda net, h: GLOBAL_DEQUE.append(h)),
    "global-nested-dict": keeps(lambda net, h: GLOBAL_NESTED["tables"].update(last=h)),
    "global-name": keeps(lambda net, h: _set_global(h)),
    "global-object": keeps(lambda net, h: REGISTRY.found.append(h)),
    "global-object-attribute": keeps(lambda net, h: setattr(REGISTRY, "last", (h, [h]))),
    "global-object-dict": keeps(lambda net, h: REGISTRY.by_name.setdefault("x", {"deep": [h]})),
    "global-tensor-written": keeps(lambda net, h: GLOBAL_TENSOR.add_(1)),
    "class-attribute": keeps(lambda net, h: setattr(type(net), "kept", h)),
    "class-dict": lambda net, h: h * _cached(Net.shared, 1, lambda: torch.full((1,), 0.5)),
    "class-of-an-object": keeps(lambda net, h: setattr(Holder, "kept", h)),
    "function-attribute": keeps(lambda net, h: setattr(table, "last", h)),
    "attribute": keeps(lambda net, h: setattr(net, "last", h)),
    "attribute-none-before": keeps(lambda net, h: setattr(net, "extra", getattr(net, "extra", None) or [h])),
    "attribute-list": keeps(lambda net, h: net.items.append(h)),
    "attribute-set": keeps(lambda net, h: net.marks.add(h)),
    "attribute-deque": keeps(lambda net, h: net.recent.append(h)),
    "namespace": keeps(lambda net, h: setattr(net.space, "table", h)),
    "nested-dict": keeps(lambda net, h: net.nested["one"]["two"].update(x=h)),
    "object": keeps(lambda net, h: net.holder.items.append((h, {"again": h}))),
    "attribute-of-a-submodule": keeps(lambda net, h: setattr(net.b, "seen", [h])),
    "attribute-of-a-parameter": keeps(lambda net, h: setattr(net.a.weight, "seen", h)),
    "attribute-of-a-buffer": keeps(lambda net, h: setattr(net.steps, "seen", h)),
    "new-buffer": keeps(lambda net, h: net.register_buffer("late", h.detach())),
    "new-parameter": keeps(lambda net, h: setattr(net, "fresh", nn.Parameter(torch.ones(2)))),
    "new-module": keeps(lambda net, h: setattr(net, "late_module", nn.Linear(2, 2))),
    "buffer-counted": keeps(lambda net, h: net.steps.add_(1)),
    "buffer-replaced": keeps(lambda net, h: setattr(net, "steps", net.steps + 1)),
    "weight-halved": keeps(lambda net, h: net.b.weight.detach().mul_(0.5)),
    "weight-data-halved": keeps(lambda net, h: net.b.weight.data.mul_(0.5)),
    "weight-copied-into": keeps(lambda net, h: net.b.bias.detach().copy_(net.b.bias.detach() + 1)),
    "weight-part-zeroed": keeps(lambda net, h: net.b.weight.detach()[0].zero_()),
    "weight-out": keeps(lambda net, h: torch.mul(net.b.bias.detach(), 2, out=net.b.bias.detach())),
    "weight-foreach": keeps(lambda net, h: torch._foreach_mul_([net.b.weight.detach(), net.b.bias.detach()], 0.5)),
    "weight-by-numpy": keeps(lambda net, h: net.b.bias.detach().numpy().__imul__(0.5)),
    "weight-frozen": keeps(lambda net, h: net.b.weight.requires_grad_(False)),
    "hook-registered": keeps(lambda net, h: net.b.register_forward_hook(lambda *_: None)),
    "mode-changed": keeps(lambda net, h: net.b.train()),
    "generator": lambda net, h: h + 0 * torch.rand(1, generator=net.generator).sum(),
    "python-random": lambda net, h: h + 0 * random.random(),
    "error-with-a-tensor": keeps(lambda net, h: net.items.append(_failed(h))),
}  # fmt: skip


def _failed(h: Tensor) -> ValueError:
    """An exception whose frames hold a tensor."""
    try:
        raise ValueError(h)
    except ValueError as error:
        return error


@pattern
def mutable_default(net: Net, h: Tensor, seen: list[Tensor] = []) -> Tensor:  # noqa: B006
    seen.append(h)
    return h


@pattern
def binarised(net: Net, h: Tensor) -> Tensor:
    """As BinaryNet keeps its real weights beside the signs."""
    weight = net.b.weight
    if not hasattr(weight, "org"):
        weight.org = weight.data.clone()
    weight.data = weight.org.sign()
    return h


@pattern
def max_norm(net: Net, h: Tensor) -> Tensor:
    net.b.weight.data = torch.renorm(net.b.weight.data, 2, 0, 0.1)
    return h


def built() -> dict[str, Callable[[], nn.Module]]:
    """Further networks, by name: hooks, closures, scripted parts."""
    return {
        "scripted-part": _scripted,
        "scripted-network-part": lambda: nn.Sequential(nn.Linear(6, 8), torch.jit.script(nn.Sequential(
            nn.Linear(8, 5), nn.ReLU())), nn.Linear(5, 3)),
        "hook-that-collects": _collecting,
        "hook-of-a-method": _collecting_method,
        "hook-before": _collecting_before,
        "hook-by-partial": _collecting_partial,
        "closure": _closure,
        "closure-name": _closure_name,
        "patched-forward": _patched,
        "batch-norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).train(),
        "spectral-norm": _spectral,
        "spectral-norm-old": lambda: nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3)).train(),
        "module-beside": _beside,
        "shared-weight-list": _weight_list,
    }  # fmt: skip


def _scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), torch.jit.script(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 3))


def _collecting() -> nn.Module:
    net, features = Net(), []
    net.a.register_forward_hook(lambda module, args, output: features.append(output))
    net.features = features
    return net


def _collecting_method() -> nn.Module:
    net, holder = Net(), Holder()
    net.b.register_forward_hook(functools.partial(_note, holder))
    return net


def _note(holder: Holder, module: nn.Module, args: Any, output: Tensor) -> None:
    holder.items.append(args)


def _collecting_before() -> nn.Module:
    net, seen = Net(), {}
    net.b.register_forward_pre_hook(lambda module, args: seen.update({module: args}))
    return net


def _collecting_partial() -> nn.Module:
    net, features = Net(), collections.defaultdict(list)
    net.a.register_forward_hook(
        functools.partial(lambda store, module, args, output: store["a"].append(output), features)
    )
    return net


def _closure() -> nn.Module:
    tables: dict[Any, Tensor] = {}

    def between(net: Net, h: Tensor) -> Tensor:
        return h * _cached(tables, str(h.device), lambda: torch.full((1,), 2.0))

    return Net(between)


def _closure_name() -> nn.Module:
    last, count = None, 0

    def between(net: Net, h: Tensor) -> Tensor:
        nonlocal last, count
        last, count = h, count + 1
        return h

    return Net(between)


def _patched() -> nn.Module:
    net = Net()
    forward, outputs = net.forward, []

    def noted(x: Tensor) -> Tensor:
        outputs.append(forward(x))
        return outputs[-1]

    net.forward = noted
    return net


def _spectral() -> nn.Module:
    norm = torch.nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3)).train()


class _Beside(nn.Module):
    """A second network that is no submodule, and notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.others = Net(), [Net(PATTERNS["attribute-list"])]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + 0 * self.others[0](x)


def _beside() -> nn.Module:
    return _Beside()


class _WeightList(nn.Module):
    """Weights under a second name, in a list, and halved there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.flat = [self.b.weight, self.b.bias]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.flat:
            weight.detach().mul_(0.5)
        return F.linear(self.a(x).relu(), *self.flat)


def _weight_list() -> nn.Module:
    return _WeightList()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(Net, between) for name, between in PATTERNS.items()},
    **built(),
}
