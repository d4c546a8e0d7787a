"""``trace``, ``score`` and ``masked`` leave a network, its weights and the world around it bit for bit as they were."""

from __future__ import annotations

import copy
import functools
import gc
import random
import threading
import weakref
from typing import Any

import pytest
import torch
from cases import FEW as FEW_CASES
from cases import every_case, outputs, random_keep, run
from nets import keeping
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import ifso
from ifso.common.module_state import named_tensors, set_tensors
from ifso.common.torch_state import preserved
from ifso.errors import BudgetError, IfsoError, ScoreError, TraceError
from ifso.graph.execution import FakeStage

X = torch.linspace(-1, 1, 24).view(4, 6)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def assert_same(before: dict[str, Tensor], model: nn.Module) -> None:
    now = dict((*model.named_parameters(), *model.named_buffers()))
    assert list(before) == list(now)
    for name, tensor in before.items():
        assert type(now[name].data) is Tensor, name
        assert torch.equal(tensor, now[name]), name


MADE: list[weakref.ref[FakeTensor]] = []
"""The fake tensors of a test: to look for them among all objects of the process takes longer than to trace."""


@pytest.fixture(autouse=True)
def _noted(monkeypatch):
    make = FakeTensor.__new__

    def noting(*args: Any, **options: Any) -> FakeTensor:
        made = make(*args, **options)
        MADE.append(weakref.ref(made))
        return made

    MADE.clear()
    monkeypatch.setattr(FakeTensor, "__new__", staticmethod(noting))


def fakes() -> list[Any]:
    """Fake tensors of our trial runs that somebody holds."""
    assert MADE
    if _held():
        gc.collect()
    return _held()


def _held() -> list[Any]:
    alive = (made() for made in MADE)
    return [item for item in alive if item is not None and isinstance(item.fake_mode, FakeStage)]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def world() -> list[Any]:
    """What the networks may have left in the globals of their file."""
    stores = keeping.GLOBAL_DICT, keeping.GLOBAL_LIST, keeping.GLOBAL_DEQUE, keeping.GLOBAL_NESTED["tables"]
    others = keeping.REGISTRY.found, keeping.REGISTRY.by_name, keeping.Net.shared, vars(keeping.REGISTRY)
    names = keeping.LAST, keeping.COUNT, keeping.Net.kept, keeping.Holder.kept, vars(keeping.table).get("last")
    return [*(copy.copy(store) for store in (*stores, *others)), *names, keeping.GLOBAL_TENSOR.clone()]


def assert_same_world(before: list[Any]) -> None:
    for one, other in zip(before, world(), strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, other)
        elif isinstance(one, dict):
            assert one.keys() == other.keys()
            assert all(other[key] is value for key, value in one.items())
        else:
            assert one == other or list(map(id, one)) == list(map(id, other))


KEPT = ("lru-cache", "global-dict", "class-dict", "attribute", "weight-halved", "buffer-counted", "hook-that-collects")
FEW = [pytest.param(name, marks=[] if name in KEPT else pytest.mark.slow) for name in keeping.NETWORKS]
"""Every way to keep something, most of them slow; for what a trace alone does not show."""


@pytest.mark.parametrize("ran_before", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("name", keeping.NETWORKS)
def test_nothing_is_left_of_a_trace(name, ran_before):
    torch.manual_seed(0)
    model = keeping.NETWORKS[name]()
    twin = copy.deepcopy(model) if "script" not in name and "closure" not in name else None
    if ran_before:
        model(X), twin is not None and twin(X)
    before, attributes, around, generator = weights(model), _attributes(model), world(), torch.get_rng_state()
    with torch.no_grad():
        try:
            ifso.trace(model, X)
        except TraceError:
            pytest.fail("refused")
    assert fakes() == []
    assert_same(before, model)
    assert_same_world(around)
    assert _attributes(model) == attributes
    assert torch.equal(torch.get_rng_state(), generator)
    wanted = twin(X) if twin is not None else None
    found = model(X)
    assert type(found) is Tensor
    assert found.isfinite().all()
    assert wanted is None or torch.equal(found, wanted)


def _attributes(model: nn.Module) -> list[tuple[str, list[str], list[int]]]:
    """Names and identities of everything that hangs on the modules, a few containers deep."""

    def inside(item: Any, depth: int) -> list[Any]:
        values = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple, set)) else ()
        values = vars(item).values() if isinstance(item, (keeping.Holder, type(keeping.REGISTRY))) else values
        return [id(item), *(part for value in values if depth for part in inside(value, depth - 1))]

    return [(name, sorted(vars(module)), inside(vars(module), 4)[1:]) for name, module in model.named_modules()]


@every_case(few=FEW_CASES)
def test_weights_and_outputs_are_the_same_bits_afterwards(case):
    model, inputs = case.model(), case.inputs()
    before, wanted = weights(model), outputs(model, inputs)
    graph = ifso.trace(model, inputs)
    assert_same(before, model)
    if graph.num_units:
        ifso.score(model, graph, lambda net, batch: sum(map(_mean, outputs_with_grad(net, batch))), [inputs], "taylor")
        assert_same(before, model)
        with ifso.masked(model, graph, random_keep(graph, seed=0)):
            outputs(model, inputs)
        assert_same(before, model)
    assert all(map(torch.equal, wanted, outputs(model, inputs)))


def _mean(tensor: Tensor) -> Tensor:
    return tensor.square().mean()


def outputs_with_grad(model: nn.Module, inputs: Any) -> list[Tensor]:
    found = run(model, inputs)
    found = list(found.values()) if isinstance(found, dict) else found if isinstance(found, (tuple, list)) else [found]
    flat = [part for item in found for part in (item if isinstance(item, (tuple, list)) else [item])]
    return [item for item in flat if isinstance(item, Tensor) and item.is_floating_point()]


@pytest.mark.parametrize("criterion", ["ifso", "taylor"])
@pytest.mark.parametrize("name", KEPT)
def test_score_leaves_weights_alone(name, criterion):
    torch.manual_seed(0)
    model = keeping.NETWORKS[name]()
    graph = ifso.trace(model, X)
    before = weights(model)
    scores = ifso.score(model, graph, loss, [X], criterion)
    assert all(score.isfinite().all() for score in scores.values())
    assert_same(before, model)
    assert fakes() == []


def refusals() -> list[tuple[dict[str, Any], type[IfsoError]]]:
    """What ``ifso.prune`` is given so that it refuses: more than can be removed, and a loss that is no number."""
    spoilt = {"loss_fn": lambda model, batch: loss(model, batch) * float("nan"), "budget": ifso.Budget(macs=0.5)}
    return [({"loss_fn": loss, "budget": ifso.Budget(macs=1e-9)}, BudgetError), (spoilt, ScoreError)]


@pytest.mark.parametrize("name", FEW)
def test_score_masked_and_a_refused_prune_leave_no_mark(name):
    torch.manual_seed(0)
    model = keeping.NETWORKS[name]()
    graph = ifso.trace(model, X)
    before, attributes, around = weights(model), _attributes(model), world()
    for criterion in ("ifso", "taylor", "true-loss") if graph.groups and name != "weight-frozen" else ():
        ifso.score(model, graph, loss, [X], criterion)
        assert_same(before, model)
        assert _attributes(model) == attributes
    if graph.groups:
        with ifso.masked(model, graph, {group.name: torch.arange(group.size) > 0 for group in graph.groups}):
            pass
        assert_same(before, model)
    for options, error in refusals():
        for preset in (None, "paper"):
            with pytest.raises(error if graph.groups else IfsoError):
                ifso.prune(model, [X], **options, example_inputs=X, preset=preset, progress=False)
            assert_same(before, model)
            assert _attributes(model) == attributes
    assert_same_world(around)
    assert fakes() == []


def test_inside_autocast():
    """Weights that were cast in the trial run were taken for real ones, and masks were not seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.autocast("cpu", torch.bfloat16):
        whole = model(X)
        graph = ifso.trace(model, X)
        assert [group.size for group in graph.groups] == [8]
        assert type(model(X)) is Tensor
        keep = {"0": torch.arange(8) < 5}
        with ifso.masked(model, graph, keep):
            soft = model(X)
        assert not torch.equal(soft, whole)
        assert torch.equal(model(X), whole)
        ifso.compact_(model, graph, keep)
        torch.testing.assert_close(model(X), soft, rtol=2e-2, atol=2e-2)
    assert fakes() == []


def test_tensors_that_cannot_be_taken_back_are_refused():
    def between(net: nn.Module, h: Tensor) -> Tensor:
        random.kept = iter((h,))
        return h

    try:
        with pytest.raises(TraceError, match="keeps tensors of a trial run in an object of type tuple_iterator"):
            ifso.trace(keeping.Net(between), X)
    finally:
        del random.kept


@pytest.mark.parametrize("wrap", [lambda h: h, lambda h: (h,), lambda h: [h], lambda h: {"deep": (h,)}])
def test_places_that_nobody_knew_of_are_emptied(wrap):
    """Attributes of a module of the standard library, and of an object with slots there."""
    random.kept = keeping.Slotted()

    def between(net: nn.Module, h: Tensor) -> Tensor:
        random.more, random.kept.kept = wrap(h), wrap(h)
        return h

    try:
        ifso.trace(keeping.Net(between), X)
        assert fakes() == []
    finally:
        del random.kept
        vars(random).pop("more", None)


def test_caches_keep_what_is_real():
    """A cache that no trial run touched stays filled."""
    filled = functools.lru_cache(torch.ones)
    filled(3)
    ifso.trace(keeping.NETWORKS["lru-cache"](), X)
    assert filled.cache_info().currsize == 1


def test_a_method_that_remembers():
    """What it gave to a trial run is not what it gives to the next."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        @functools.lru_cache(maxsize=4)  # noqa: B019 (as libraries do)
        def places(self, size: int) -> Tensor:
            return torch.arange(size).float().sin()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu() + self.places(8)[0])

        def later(self) -> Any:
            return unknown

    net = Places()
    graph = ifso.trace(net, X)
    whole = net(X)  # fills the cache
    keep = graph.keep_all()
    keep[graph.groups[0].name][:3] = False
    ifso.compact_(net, graph, keep)
    assert net.first.weight.shape == (5, 6)
    assert net(X).shape == whole.shape
    unknown = None


def test_threads():
    """Each thread traces and scores networks of its own; a hook that all shared mixed their modules up."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 8 + n), nn.ReLU(), nn.Linear(8 + n, 4), nn.Linear(4, 3)) for n in range(4)]
    wanted = [_traced_and_scored(model) for model in models]
    fastpath, found, errors = torch.backends.mha.get_fastpath_enabled(), {}, []

    def work(number: int) -> None:
        try:
            for _ in range(3):
                found.setdefault(number, []).append(_traced_and_scored(models[number]))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for number, results in found.items():
        for sizes, scores in results:
            assert sizes == wanted[number][0]
            assert all(torch.equal(scores[name], score) for name, score in wanted[number][1].items())
    assert torch.backends.mha.get_fastpath_enabled() == fastpath


def _traced_and_scored(model: nn.Module) -> tuple[list[tuple[str, int]], dict[str, Tensor]]:
    graph = ifso.trace(model, X)
    return [(group.name, group.size) for group in graph.groups], ifso.score(model, graph, loss, [X])


def test_an_interrupted_trace_leaves_nothing():
    class Stops(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            keeping.GLOBAL_LIST.append(self.a(x))
            raise KeyboardInterrupt

    before = list(map(id, keeping.GLOBAL_LIST))
    with pytest.raises(KeyboardInterrupt):
        ifso.trace(Stops(), X)
    assert list(map(id, keeping.GLOBAL_LIST)) == before
    assert fakes() == []


def test_a_network_of_very_many_modules_keeps_its_parameters():
    """Each has a dozen dicts: the last ones had lost their parameters, as there is an end to what is looked at."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(2000)))
    before = [*model.parameters()]
    with preserved(model):
        set_tensors(model, {name: torch.zeros(2) for name in named_tensors(model)})
        model[-1].kept = model[-1].weight
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert not hasattr(model[-1], "kept")
