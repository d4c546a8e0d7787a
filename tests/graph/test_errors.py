"""What ``ifso.trace`` refuses, each with one clear line, and what it is told to leave alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from cases import CASES, every_case, random_keep
from nets import attention, calling, convolution
from torch import Tensor, nn

import ifso
from ifso.errors import CompactionError, StaleGraphError, TraceError, TraceMemoryError

IMAGES = torch.zeros(2, 3, 8, 8)
LAYERS = (nn.modules.conv._ConvNd, nn.Linear)


def refusal(model: object, inputs: object, error: type[Exception] = TraceError, **options: object) -> str:
    """The message of the error that tracing raises: one line, with something to say."""
    with pytest.raises(error) as caught:
        ifso.trace(model, inputs, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert 20 < len(message) < 600
    assert isinstance(caught.value, ifso.IfsoError)
    assert caught.value.exit_status == 2
    return message


class Broken(nn.Module):
    """A network with a mistake in it."""

    def __init__(self, error: Exception):
        super().__init__()
        self.conv, self.error = nn.Conv2d(3, 4, 3), error

    def forward(self, x: Tensor) -> Tensor:
        self.conv(x)
        raise self.error


@pytest.mark.parametrize(
    "error", [ValueError("no luck\ntoday"), KeyError("x"), RuntimeError(""), AssertionError(), NotImplementedError()]
)
def test_model_that_fails(error):
    message = refusal(Broken(error), IMAGES)
    assert "Broken" in message
    assert type(error).__name__ in message
    assert "no luck" in message or "luck" not in str(error)


def test_long_messages_are_cut():
    assert len(refusal(Broken(ValueError("x" * 100_000)), IMAGES)) < 600


def test_model_without_a_forward():
    assert "Module" in refusal(nn.Module(), IMAGES)


@pytest.mark.parametrize(
    "inputs",
    [torch.zeros(2, 4, 8, 8), torch.zeros(2, 8), torch.zeros(2, 3, 2, 1, 1, 1), torch.zeros(0)],
    ids=["channels", "flat", "too-many-dims", "empty"],
)
def test_inputs_of_the_wrong_shape(inputs):
    message = refusal(convolution.residual(), inputs)
    assert "Chain does not run on the example inputs" in message


def test_inputs_of_the_wrong_dtype():
    assert "Chain" in refusal(convolution.plain(), torch.zeros(2, 3, 8, 8, dtype=torch.long))


def test_wrong_number_or_names_of_inputs():
    assert "Siamese" in refusal(convolution.Siamese(), IMAGES)
    assert "Siamese" in refusal(convolution.Siamese(), (IMAGES, IMAGES, IMAGES))
    assert "picture" in refusal(calling.KeywordInputs(), {"picture": IMAGES, "extra": torch.zeros(2, 4)})
    assert "KeywordInputs" in refusal(calling.KeywordInputs(), (IMAGES, torch.zeros(2, 4)))


@pytest.mark.parametrize("inputs", [None, (), {}, 3, "image", [1, 2], {"image": None}], ids=repr)
def test_inputs_without_a_tensor(inputs):
    assert "example_inputs" in refusal(convolution.plain(), inputs)


@pytest.mark.parametrize("model", [None, "resnet18", torch.relu, nn.Conv2d, 3], ids=lambda value: type(value).__name__)
def test_not_a_module(model):
    assert "torch.nn.Module" in refusal(model, IMAGES)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_modules_that_are_not_plain():
    assert "compile" in refusal(torch.compile(convolution.plain()), IMAGES)
    assert "lazy" in refusal(nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU()), IMAGES)
    assert "scripted" in refusal(torch.jit.trace(nn.Conv2d(3, 4, 1), IMAGES), IMAGES)


def test_ignore_must_be_names():
    message = refusal(convolution.plain(), IMAGES, ignore="stem")
    assert "ignore=('stem',)" in message


def test_ignore_must_hold_names_or_modules():
    assert "ignore holds 3; give names of modules" in refusal(convolution.plain(), IMAGES, ignore=("body", 3))


@pytest.mark.parametrize("name", ["stam", "stem.conv.weights", "tem", "stem."])
def test_ignore_must_name_something(name):
    message = refusal(convolution.plain(), IMAGES, ignore=("body", name))
    assert repr(name) in message
    assert "Chain" in message


def pruned_axes(graph: ifso.ChannelGraph) -> set[tuple[str, int]]:
    return {(member.parameter, member.dim) for group in graph.groups for member in group.members}


@pytest.mark.parametrize("name", ["stem", "stem.conv", "stem.conv.weight", "stem.bn"])
def test_ignore_leaves_the_channels_of_a_module_alone(name):
    """Also those that others make or read: what is coupled to an ignored slice stays."""
    graph = ifso.trace(convolution.plain(), IMAGES, ignore=[name])
    assert [group.name for group in graph.groups] == ["body.conv"]
    assert ("body.conv.weight", 1) not in pruned_axes(graph)
    reasons = {item.reason for item in graph.frozen if (item.parameter, item.dim) == ("stem.conv.weight", 0)}
    assert reasons == {"ignored on request"}


def test_ignore_reaches_both_sides_of_a_layer():
    """What the module makes and what it reads."""
    graph = ifso.trace(convolution.plain(), IMAGES, ignore=("body",))
    assert graph.groups == ()


def test_ignore_takes_whole_names_only():
    model = nn.Sequential(*(nn.Conv2d(3 if n == 0 else 4, 4, 1) for n in range(12)))
    graph = ifso.trace(model, IMAGES, ignore=("1",))
    assert {"2.weight", "9.weight"} <= {name for name, _ in pruned_axes(graph)}
    assert ("10.weight", 0) in pruned_axes(graph)
    assert not {("0.weight", 0), ("1.weight", 0), ("2.weight", 1)} & pruned_axes(graph)


def test_ignored_modules_do_not_change():
    case = CASES["residual"]
    model = case.model()
    graph = ifso.trace(model, case.inputs(), ignore=("block1",))
    before = [parameter.clone() for parameter in model.block1.parameters()]
    ifso.compact_(model, graph, random_keep(graph, seed=0))
    assert all(torch.equal(a, b) for a, b in zip(before, model.block1.parameters(), strict=True))
    assert model.block2.conv1.conv.out_channels < 6


@pytest.mark.parametrize("limit", [0, 1000])
def test_memory_limit_of_a_run_on_real_tensors(limit):
    message = refusal(calling.DataDependent(), IMAGES, TraceMemoryError, memory_limit=limit)
    assert "memory_limit" in message
    assert "smaller" in message


def test_memory_limit_leaves_room_where_it_can():
    """Nothing is needed on fake tensors; on real ones what lives at the same time counts, not all that ever lived."""
    assert ifso.trace(convolution.plain(), IMAGES, memory_limit=0).groups
    deep = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(50)))
    once = 2 * 3 * 8 * 8 * 4
    assert ifso.trace(calling.OnRealTensors(deep), IMAGES, memory_limit=12 * once).on_real_tensors


def test_a_failing_trace_leaves_the_model_alone():
    model = CASES["residual"].model().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    refusal(model, torch.zeros(2, 5, 8, 8, dtype=torch.float64))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert not [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]


def test_the_users_own_error_is_kept_as_the_cause():
    error = ValueError("mine")
    with pytest.raises(TraceError) as caught:
        ifso.trace(Broken(error), IMAGES)
    assert caught.value.__cause__ is error


def test_a_network_of_which_nothing_can_go_is_no_error():
    graph = ifso.trace(nn.Linear(3, 4), torch.zeros(2, 3))
    assert graph.groups == ()
    assert {item.parameter for item in graph.frozen} == {"weight", "bias"}
    assert ifso.trace(nn.Sequential(nn.ReLU()), IMAGES).groups == ()


def known_positions(graph: ifso.ChannelGraph) -> dict[tuple[str, int], set[int]]:
    """By (parameter, dim) the positions that belong to a unit or are frozen."""
    known: dict[tuple[str, int], set[int]] = {}
    for group in graph.groups:
        for member in group.members:
            known.setdefault((member.parameter, member.dim), set()).update(i for index in member.index for i in index)
    for item in graph.frozen:
        assert item.reason
        known.setdefault((item.parameter, item.dim), set()).update(item.index)
    return known


@every_case()
def test_every_channel_is_free_or_frozen_with_a_reason(case):
    """No input or output axis of a convolution or linear layer that ran is dropped silently."""
    known, silent = known_positions(case.graph()), []
    for name, parameter in case.model().named_parameters():
        owner = case.model().get_submodule(name.rpartition(".")[0])
        if not name.endswith(".weight") or name.endswith("spare.weight") or not isinstance(owner, LAYERS):
            continue
        silent += [
            (name, dim)
            for dim, size in enumerate(parameter.shape[:2])
            if size > 1 and known.get((name, dim), set()) != set(range(size))
        ]
    assert silent == []


def test_memory_of_an_unused_input_is_not_needed():
    """An input that the network never looks at is fine."""

    class Ignores(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = attention.mlp_batch_norm()

        def forward(self, x: Tensor, _unused: Tensor) -> Tensor:
            return self.net(x)

    graph = ifso.trace(Ignores().eval(), (torch.zeros(4, 6), torch.zeros(1)))
    assert [group.size for group in graph.groups] == [8, 7]


def other_wiring() -> dict[str, nn.Module]:
    """Networks with the parameters of the one that is traced, and other modules, settings or ways."""

    def net(**changes: nn.Module) -> nn.Module:
        parts = {"0": nn.Linear(6, 8), "1": nn.ReLU(), "2": nn.Linear(8, 8), "3": nn.ReLU(), "4": nn.Linear(8, 3)}
        return nn.Sequential(*(parts | changes).values())

    patched = net()
    patched[2].forward = lambda x: x + nn.functional.linear(x, patched[2].weight, patched[2].bias)
    return {"softmax": net(**{"1": nn.Softmax(1)}), "patched": patched, "more": nn.Sequential(*net(), nn.ReLU())}


@pytest.mark.parametrize("name", ["softmax", "patched", "more"])
def test_a_graph_of_other_wiring_is_stale(name):
    """Only shapes were compared, so masked and compacted differed without a word."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    graph, other = ifso.trace(model, torch.randn(4, 6)), other_wiring()[name]
    keep = {"0": torch.arange(8) < 5}
    assert ifso.cost(nn.Sequential(*(type(m)(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m
                                     for m in model)), graph).macs  # fmt: skip
    uses = [lambda: ifso.compact_(other, graph, keep)]
    if name != "patched":  # a forward of its own may only be wrapped: compaction runs it and sees
        uses += [lambda: ifso.cost(other, graph, keep), lambda: ifso.masked(other, graph, keep).__enter__()]
    for use in uses:
        with pytest.raises(StaleGraphError, match="another model"):
            use()
    assert other[0].weight.shape == (8, 6)


class Switched(nn.Module):
    """Adds its input or not, as an attribute says."""

    def __init__(self, residual: bool):
        super().__init__()
        self.residual, self.a, self.b, self.c = residual, nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return self.c(x + self.b(x) if self.residual else self.b(x))


def test_a_model_that_runs_other_functions_is_stale():
    graph, other = ifso.trace(Switched(residual=False), torch.randn(4, 6)), Switched(residual=True)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(StaleGraphError, match="runs other functions"):
        ifso.compact_(other, graph, {"b": torch.arange(8) < 5})
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


class Thresholded(nn.Module):
    """Doubles its features as long as there are more than three: no trial run on the way sees that."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(x)
        return self.last(x.mul(2.0 if x.shape[1] > 3 else 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_net_under_the_rules_names_the_module(dtype, monkeypatch):
    """With the comparison of numbers switched off, the outputs tell."""
    monkeypatch.setattr("ifso.graph.dry_run.same_numbers", lambda before, now: True)
    torch.manual_seed(0)
    model = Thresholded().to(dtype)
    graph = ifso.trace(model, torch.zeros(4, 6, dtype=dtype))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    keep = {"first": torch.arange(8) < 4, "second": torch.arange(8) < 3}
    with pytest.raises(CompactionError, match="removing units of 'second'"):
        ifso.compact_(model, graph, keep)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.second.out_features == 8
    ifso.compact_(model, graph, keep | {"second": torch.arange(8) < 4})


def test_random_networks_are_not_held_to_the_same_outputs():
    """Dropout leaves out others where there are fewer."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(nn.functional.dropout(self.a(x)))

    model = Dropping().train()
    graph = ifso.trace(model, torch.randn(4, 6))
    ifso.compact_(model, graph, {"a": torch.arange(8) < 5})
    assert model.a.out_features == 5


OWN_RULE = """
import torch
from ifso.graph.rules import rule

@rule("aten.cumsum")
def frozen(call, labels):
    labels.freeze_all(call.inputs, "by my own rule")

import ifso

class Cumulative(torch.nn.Sequential):
    def forward(self, x):
        return self[1](self[0](x).cumsum(1))

graph = ifso.trace(Cumulative(torch.nn.Linear(3, 8), torch.nn.Linear(8, 2)), torch.zeros(1, 3))
print([axis.reason for axis in graph.frozen if axis.parameter == "0.bias"])
"""


def test_a_rule_for_a_known_operator_replaces_ours_also_before_the_first_trace():
    done = subprocess.run([sys.executable, "-c", OWN_RULE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['by my own rule']"
