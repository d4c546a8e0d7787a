"""Removal is exact: the compacted network computes what the masked one does, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, FEW, Case, difference, every_case, outputs, prunable_cases, random_keep, removed, run, tensors
from nets import attention, calling, convolution
from torch import Tensor, nn

import ifso
from ifso.errors import CompactionError, KeepError, StaleGraphError

EXACT = 1e-10
VISIBLE = 1e-6


def masked_outputs(case: Case, model: nn.Module, keep: dict[str, Tensor]) -> list[Tensor]:
    with ifso.masked(model, case.graph(), keep):
        return outputs(model, case.inputs())


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def assert_same_state(model: nn.Module, before: dict[str, Tensor]) -> None:
    now = state(model)
    assert now.keys() == before.keys()
    assert [name for name in now if not torch.equal(now[name], before[name])] == []


# ---- masked ≡ compacted ---------------------------------------------------------------------------------------------


@prunable_cases()
def test_there_is_something_to_prune(case):
    assert removed(random_keep(case.graph(), seed=0)) > 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@prunable_cases()
def test_compacted_equals_masked(case, seed):
    model, graph = case.model(), case.graph()
    plain = outputs(model, case.inputs())
    keep = random_keep(graph, seed)
    soft = masked_outputs(case, model, keep)
    assert difference(plain, outputs(model, case.inputs())) == 0, "masking was not undone"
    assert difference(plain, soft) > VISIBLE, "masking changed nothing"
    ifso.compact_(model, graph, keep)
    assert difference(soft, outputs(model, case.inputs())) <= EXACT


@prunable_cases(few=FEW)
def test_every_group_alone(case):
    """Half of one group goes and everything else stays."""
    graph = case.graph()
    for group in graph.groups:
        keep = ifso.balance(graph, {group.name: torch.arange(group.size) % 2 == 0})
        if not removed(keep):
            continue
        model = case.model()
        soft = masked_outputs(case, model, keep)
        ifso.compact_(model, graph, keep)
        assert difference(soft, outputs(model, case.inputs())) <= EXACT, group.name


@prunable_cases(few=FEW)
def test_down_to_the_last_units(case):
    """One unit of each group, or as few as balances allow."""
    model, graph = case.model(), case.graph()
    keep = ifso.balance(graph, {group.name: torch.arange(group.size) == group.size // 2 for group in graph.groups})
    soft = masked_outputs(case, model, keep)
    ifso.compact_(model, graph, keep)
    assert difference(soft, outputs(model, case.inputs())) <= EXACT


@prunable_cases(few=FEW)
def test_gradients_of_the_compacted_network_are_those_of_the_masked_one(case):
    model, graph = case.model(), case.graph()
    keep = random_keep(graph, seed=5)
    with ifso.masked(model, graph, keep):
        _loss(run(model, case.inputs())).backward()
    ifso.compact_(model, graph, keep)
    soft = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    _loss(run(model, case.inputs())).backward()
    hard = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert soft.keys() == hard.keys()
    scale = max(float(grad.abs().max()) for grad in hard.values())
    far = {name: float((soft[name] - hard[name]).abs().max()) / scale for name in hard}
    assert max(far.values()) <= EXACT, max(far, key=far.get)


def _loss(output: Any) -> Tensor:
    return sum(
        (tensor.sin() * torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape)).sum() for tensor in tensors(output)
    )


TRAINABLE = ("plain", "residual", "concat", "depthwise", "grouped", "shuffle", "mlp-batch-norm", "padded")


@pytest.mark.parametrize("name", TRAINABLE)
def test_compacted_equals_masked_in_train_mode(name):
    """Batch statistics; the running ones must move alike, too."""
    case = CASES[name]
    model, graph = case.model().train(), case.graph()
    keep = random_keep(graph, seed=1)
    other = copy.deepcopy(model)
    soft = masked_outputs(case, other, keep)
    ifso.compact_(model, graph, keep)
    assert difference(soft, outputs(model, case.inputs())) <= EXACT
    ifso.compact_(other, graph, keep)
    assert difference(list(other.buffers()), list(model.buffers())) <= EXACT


@pytest.mark.parametrize("name", ["plain", "multihead", "multihead-sequence-first", "encoder-layer", "attention"])
def test_masking_is_exact_with_and_without_gradients(name):
    """PyTorch takes fused kernels without gradients, plain functions with them."""
    case = CASES[name]
    model, graph = case.model(), case.graph()
    keep = random_keep(graph, seed=2)
    with ifso.masked(model, graph, keep):
        soft = [tensor.detach() for tensor in tensors(run(model, case.inputs()))]
    assert difference(soft, masked_outputs(case, model, keep)) <= EXACT


def test_graph_of_train_mode_prunes_a_network_in_eval_mode():
    case = CASES["residual"]
    model = case.model().train()
    graph = ifso.trace(model, case.inputs())
    model.eval()
    keep = random_keep(graph, seed=0)
    with ifso.masked(model, graph, keep):
        soft = outputs(model, case.inputs())
    ifso.compact_(model, graph, keep)
    assert difference(soft, outputs(model, case.inputs())) <= EXACT


@pytest.mark.parametrize("before", ["trace", "compact"])
def test_what_a_network_keeps_from_an_earlier_run_does_not_matter(before):
    """LeViT keeps biases of the full size once it has run in eval mode; the network must still be pruned, exactly."""
    case = Case("caching", attention.attention_caching, CASES["attention-biased"].make_inputs)
    model, plain = case.model(), CASES["attention-biased"].graph()
    if before == "trace":
        outputs(model, case.inputs())
    graph = ifso.trace(model, case.inputs())
    assert {group.name: group.size for group in graph.groups} == {group.name: group.size for group in plain.groups}
    keep = random_keep(graph, seed=0)
    with ifso.masked(model, graph, keep):
        soft = outputs(model, case.inputs())
    ifso.compact_(model, graph, keep)
    assert difference(soft, outputs(model, case.inputs())) <= EXACT


def test_other_batch_sizes_and_image_sizes():
    case = CASES["squeeze-excite"]
    model, graph = case.model(), case.graph()
    keep = random_keep(graph, seed=0)
    other = torch.randn(5, 3, 12, 10, dtype=torch.float64)
    with ifso.masked(model, graph, keep):
        soft = outputs(model, other)
    ifso.compact_(model, graph, keep)
    assert difference(soft, outputs(model, other)) <= EXACT


# ---- what compaction leaves behind ----------------------------------------------------------------------------------


def conv_sizes(module: nn.modules.conv._ConvNd) -> tuple[int, int]:
    rows, columns = module.weight.shape[:2]
    return (rows, columns * module.groups) if module.transposed else (columns * module.groups, rows)


DESCRIBED: tuple[tuple[type, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (nn.modules.conv._ConvNd, lambda m: (m.in_channels, m.out_channels), conv_sizes),
    (nn.Linear, lambda m: (m.out_features, m.in_features), lambda m: tuple(m.weight.shape)),
    (nn.modules.batchnorm._BatchNorm, lambda m: m.num_features, lambda m: len(m.running_mean)),
    (nn.LayerNorm, lambda m: m.normalized_shape, lambda m: _shape(m.weight, m.normalized_shape)),
    (nn.RMSNorm, lambda m: tuple(m.normalized_shape), lambda m: tuple(m.weight.shape)),
    (nn.GroupNorm, lambda m: m.num_channels, lambda m: _shape(m.weight, (m.num_channels,))[0]),
    (nn.Embedding, lambda m: (m.num_embeddings, m.embedding_dim), lambda m: tuple(m.weight.shape)),
    (nn.PReLU, lambda m: m.num_parameters, lambda m: len(m.weight)),
    (
        nn.MultiheadAttention,
        lambda m: (3 * m.num_heads * m.head_dim, m.embed_dim),
        lambda m: tuple(m.in_proj_weight.shape),
    ),
)
"""(kind of module, what it says of itself, what its tensors say)."""


def _shape(weight: Tensor | None, otherwise: tuple[int, ...]) -> tuple[int, ...]:
    return otherwise if weight is None else tuple(weight.shape)


@prunable_cases(few=FEW)
def test_modules_describe_themselves_rightly(case):
    model, graph = case.model(), case.graph()
    ifso.compact_(model, graph, random_keep(graph, seed=0))
    wrong = []
    for name, module in model.named_modules():
        for kind, said, meant in DESCRIBED:
            if isinstance(module, kind) and said(module) != meant(module):
                wrong.append((name, said(module), meant(module)))
    assert wrong == []


def test_attributes_by_hand():
    keep_of = {
        "depthwise": {"stem.conv": torch.arange(8) < 3},
        "attention": {"attn.qkv": torch.tensor([True, False, True, False]), "embed": torch.arange(8) < 7},
        "padded": {"conv2.conv": torch.tensor([True, False, False, False])},
        "res2net": {name: torch.arange(4) > 0 for name in ("conv1.conv", "conv1.conv#2", "conv1.conv#3")},
    }
    nets = {}
    for name, keep in keep_of.items():
        nets[name] = CASES[name].model()
        ifso.compact_(nets[name], CASES[name].graph(), keep)
    wide = nets["depthwise"].wide.conv
    assert (wide.in_channels, wide.out_channels, wide.groups, tuple(wide.weight.shape)) == (3, 6, 3, (6, 1, 3, 3))
    attn = nets["attention"].attn
    assert (attn.num_heads, attn.head_dim, attn.qkv.out_features, attn.proj.in_features) == (2, 3, 18, 6)
    assert nets["attention"].norm1.normalized_shape == (7,)
    assert (nets["padded"].shortcut.front, nets["padded"].shortcut.back) == (1, 0)
    assert nets["res2net"].width == 3


@pytest.mark.parametrize("norm", ["batch", "group", "instance"])
def test_norms_without_gains_follow(norm):
    case = CASES["norms-without-gains"]
    model, graph = case.model(), case.graph()
    ifso.compact_(model, graph, {group.name: torch.arange(8) % 4 < 2 for group in graph.groups})
    module = getattr(model, norm)
    assert (module.num_channels if norm == "group" else module.num_features) == 4


@prunable_cases(few=FEW)
def test_parameters_stay_the_same_objects_with_the_shapes_of_the_recipe(case):
    model, graph = case.model(), case.graph()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 1)
    before = {
        name: (id(p), p.requires_grad, p.dtype, type(p)) for name, p in model.named_parameters(remove_duplicate=False)
    }
    recipe = ifso.compact_(model, graph, random_keep(graph, seed=3))
    after = {
        name: (id(p), p.requires_grad, p.dtype, type(p)) for name, p in model.named_parameters(remove_duplicate=False)
    }
    assert after == before
    assert {name: change.after for name, change in recipe.shapes.items()} == {
        n: tuple(t.shape) for n, t in state(model).items()
    }


@pytest.mark.parametrize("name", ["residual", "depthwise", "grouped", "transposed-grouped"])
def test_memory_format_is_kept(name):
    case = CASES[name]
    model, graph = case.model().to(memory_format=torch.channels_last), case.graph()
    keep = random_keep(graph, seed=0)
    soft = masked_outputs(case, model, keep)
    ifso.compact_(model, graph, keep)
    convolutions = [module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd)]
    assert all(module.weight.is_contiguous(memory_format=torch.channels_last) for module in convolutions)
    assert difference(soft, outputs(model, case.inputs())) <= EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    case = CASES["residual"]
    model = case.model().to(dtype)
    ifso.compact_(model, case.graph(), random_keep(case.graph(), seed=0))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert outputs(model, case.inputs().to(dtype))[0].isfinite().all()


def test_values_that_stay_are_the_old_ones():
    case = CASES["plain"]
    model, graph = case.model(), case.graph()
    old = state(model)
    ifso.compact_(model, graph, {"stem.conv": torch.tensor([True, False, True, True, False, False, True, False])})
    kept = [0, 2, 3, 6]
    torch.testing.assert_close(model.stem.conv.weight, old["stem.conv.weight"][kept], rtol=0, atol=0)
    torch.testing.assert_close(model.stem.bn.running_var, old["stem.bn.running_var"][kept], rtol=0, atol=0)
    torch.testing.assert_close(model.body.conv.weight, old["body.conv.weight"][:, kept], rtol=0, atol=0)
    assert torch.equal(model.head.fc.weight, old["head.fc.weight"])


def test_gradients_shrink_along():
    case = CASES["plain"]
    model, graph = case.model(), case.graph()
    _loss(run(model, case.inputs())).backward()
    old = model.stem.conv.weight.grad.clone()
    ifso.compact_(model, graph, {"stem.conv": torch.arange(8) < 5})
    assert torch.equal(model.stem.conv.weight.grad, old[:5])


def test_keeping_everything_changes_nothing():
    case = CASES["grouped"]
    model, before = case.model(), state(case.model())
    ifso.compact_(model, case.graph(), case.graph().keep_all())
    assert_same_state(model, before)


# ---- tracing and masking leave no trace -----------------------------------------------------------------------------


@every_case(few=FEW)
def test_tracing_leaves_no_trace(case):
    """In train mode, where running statistics, counters and dropout would move if they could."""
    model, inputs = case.model().train(), case.inputs()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    before, seen = state(model), copy.deepcopy(_appearance(model))
    given = [tensor.clone() for tensor in tensors(inputs if isinstance(inputs, (tuple, dict)) else [inputs])]
    torch.manual_seed(123)
    random = torch.get_rng_state()
    ifso.trace(model, inputs)
    assert torch.equal(torch.get_rng_state(), random)
    assert_same_state(model, before)
    assert _appearance(model) == seen
    after = list(tensors(inputs if isinstance(inputs, (tuple, dict)) else [inputs]))
    assert all(torch.equal(a, b) for a, b in zip(given, after, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def _appearance(model: nn.Module) -> list[Any]:
    """Everything of the modules that is no tensor: modes, hooks, numbers, which parameters train."""
    found: list[Any] = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if _is_plain(value)}
        hooks = [len(value) for key, value in vars(module).items() if key.endswith("_hooks")]
        found.append((name, type(module).__name__, plain, hooks))
    return found


def _is_plain(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, (bool, int, float, str)) for item in items)


def test_tracing_and_masking_leave_no_global_hooks():
    from torch.nn.modules import module as hooks

    def count() -> list[int]:
        return [
            len(hooks._global_forward_hooks),
            len(hooks._global_forward_pre_hooks),
            torch._C._len_torch_function_stack(),
        ]

    case = CASES["encoder-layer"]
    before = count()
    graph = ifso.trace(case.model(), case.inputs())
    with pytest.raises(ifso.IfsoError):
        ifso.trace(case.model(), torch.zeros(1, 2, dtype=torch.float64))
    masked_outputs(case, case.model(), random_keep(graph, seed=0))
    assert count() == before
    assert torch.backends.mha.get_fastpath_enabled()


def test_tracing_says_nothing(capfd, recwarn):
    """A size that is tried and fails is our own business."""
    for name in ("unequal-split", "insistent-code", "padded-lambda", "instance-norm", "attention-of-width"):
        ifso.trace(CASES[name].model(), CASES[name].inputs())
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert [str(warning.message) for warning in recwarn] == []


def test_masking_is_undone_after_an_error_inside():
    case = CASES["residual"]
    model = case.model()
    before = state(model)
    with (
        pytest.raises(RuntimeError, match="inside"),
        ifso.masked(model, case.graph(), random_keep(case.graph(), seed=0)),
    ):
        raise RuntimeError("inside")
    assert_same_state(model, before)
    loss = _loss(run(model, case.inputs()))
    loss.backward()
    assert all(bool((parameter.grad != 0).any()) for parameter in model.parameters())


# ---- training -------------------------------------------------------------------------------------------------------


def removed_slices(case: Case, keep: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """For each parameter the places that go: in rows or columns named by the groups' members."""
    gone: dict[str, Tensor] = {}
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for group in case.graph().groups:
        units = (~keep[group.name]).nonzero().flatten().tolist()
        for member in group.members:
            mask = gone.setdefault(member.parameter, torch.zeros(named[member.parameter].shape, dtype=torch.bool))
            for unit in units:
                for position in member.index[unit]:
                    mask.select(member.dim, position).fill_(True)
    return gone


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01),
}


def steps(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        _loss(run(model, case.inputs())).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", ["residual", "concat", "depthwise", "flatten", "attention"])
def test_training_inside_masked_leaves_removed_slices_alone(name, kind):
    case = CASES[name]
    model, keep = case.model(), random_keep(case.graph(), seed=0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    steps(case, model, optimizer, 2)
    before = state(model)
    gone = removed_slices(case, keep, model)
    optimizer.zero_grad()
    with ifso.masked(model, case.graph(), keep):
        _loss(run(model, case.inputs())).backward()
        for key in gone.keys() & dict(model.named_parameters()).keys():
            assert not model.get_parameter(key).grad[gone[key]].any(), key
        steps(case, model, optimizer, 3)
    for key, parameter in model.named_parameters():
        moved = parameter.detach() != before[key]
        assert not (key in gone and moved[gone[key]].any()), key
        assert (moved | gone.get(key, torch.zeros((), dtype=torch.bool))).float().mean() > 0.9, key


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_channels_stay_masked_while_an_optimizer_with_momentum_runs(kind):
    """Momentum from before would move the removed slices away from zero, and the network would no longer be masked."""
    case = CASES["residual"]
    model, keep = case.model(), random_keep(case.graph(), seed=0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    steps(case, model, optimizer, 2)
    gone = removed_slices(case, keep, model)
    with ifso.masked(model, case.graph(), keep):
        steps(case, model, optimizer, 2)
        soft = outputs(model, case.inputs())
    ifso.compact_(model, case.graph(), keep)
    assert difference(soft, outputs(model, case.inputs())) <= EXACT
    assert gone


def test_code_around_the_model_is_left_alone_while_masked():
    """Functions over channels are exact inside the model; a loss written beside it is not touched."""
    case = CASES["stacked"]
    model, keep = case.model(), random_keep(case.graph(), seed=0)
    other = torch.randn(2, 2, 6, dtype=torch.float64)
    wanted = [other.softmax(1), other.sum(1), other.mean(1), other.amax(1), other.view(2, 12).softmax(1)]
    with ifso.masked(model, case.graph(), keep):
        for number in range(20):
            found = [other.softmax(1), other.sum(1), other.mean(1), other.amax(1), other.view(2, 12).softmax(1)]
            assert difference(wanted, found) == 0, number


def test_training_inside_masked_leaves_running_statistics_of_removed_channels_alone():
    case = CASES["residual"]
    model, keep = case.model().train(), random_keep(case.graph(), seed=0)
    before, gone = state(model), removed_slices(case, keep, model)
    with ifso.masked(model, case.graph(), keep):
        outputs(model, case.inputs())
    for key, buffer in model.named_buffers():
        if key.endswith(("running_mean", "running_var")):
            assert torch.equal(buffer[gone[key]], before[key][gone[key]]), key
            assert not torch.equal(buffer[~gone[key]], before[key][~gone[key]]), key


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", ["residual", "grouped", "shuffle", "transposed-grouped", "attention"])
def test_optimizer_state_shrinks_along(name, kind):
    """A step after compaction does what it does in the masked network."""
    case = CASES[name]
    model, keep = case.model(), random_keep(case.graph(), seed=0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    steps(case, model, optimizer, 3)
    recipe = ifso.compact_(model, case.graph(), keep, optimizer=optimizer)
    assert recipe.removed_units > 0
    for parameter in model.parameters():
        sized = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor) and value.dim()]
        assert sized
        assert all(value.shape == parameter.shape for value in sized)
    steps(case, model, optimizer, 2)
    assert all(tensor.isfinite().all() for tensor in model.parameters())


def test_sliced_momentum_is_the_right_slice():
    case = CASES["plain"]
    model = case.model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    steps(case, model, optimizer, 2)
    old = optimizer.state[model.body.conv.weight]["momentum_buffer"].clone()
    keep = {"stem.conv": torch.arange(8) % 2 == 1, "body.conv": torch.arange(6) > 1}
    ifso.compact_(model, case.graph(), keep, optimizer=optimizer)
    assert torch.equal(optimizer.state[model.body.conv.weight]["momentum_buffer"], old[2:][:, 1::2])


@pytest.mark.parametrize("seed", range(6))
def test_a_shuffle_whose_blocks_have_shrunk_to_one_channel_can_be_traced_again(seed):
    case = CASES["channel-shuffle"]
    model, inputs, graph = case.model(), case.inputs(), case.graph()
    ifso.compact_(model, graph, random_keep(graph, seed))
    again = ifso.trace(model, inputs)
    assert again.num_units
    keep = random_keep(again, seed + 100)
    with torch.no_grad():
        with ifso.masked(model, again, keep):
            expected = model(inputs)
        ifso.compact_(model, again, keep)
        assert float((model(inputs) - expected).abs().max()) < 1e-12


# ---- twice, saved and loaded ----------------------------------------------------------------------------------------


@prunable_cases(few=FEW)
def test_pruning_twice_and_loading(case, tmp_path):
    """Trace again, compact again; the saved network loads into a fresh one and computes the same, bit for bit."""
    model, inputs = case.model(), case.inputs()
    first = random_keep(case.graph(), seed=0, share=0.3)
    ifso.compact_(model, case.graph(), first)
    second = ifso.trace(model, inputs)
    assert_coupled_as_before(case.graph(), second, first)
    keep = random_keep(second, seed=1, share=0.3)
    with ifso.masked(model, second, keep):
        soft = outputs(model, inputs)
    recipe = ifso.compact_(model, second, keep)
    hard = outputs(model, inputs)
    assert difference(soft, hard) <= EXACT
    assert len(recipe.rounds) == 2
    ifso.save(model, tmp_path / "twice")
    loaded = ifso.load(tmp_path / "twice", case.model())
    assert difference(hard, outputs(loaded, inputs)) == 0
    assert [(n, tuple(p.shape)) for n, p in loaded.named_parameters()] == [
        (n, tuple(p.shape)) for n, p in model.named_parameters()
    ]


def assert_coupled_as_before(graph: ifso.ChannelGraph, second: ifso.ChannelGraph, keep: dict[str, Tensor]) -> None:
    """The second graph has what the first one kept, in the same places, except what is now the last of its kind."""
    places = {group.name: {(m.parameter, m.dim) for m in group.members} for group in graph.groups}
    left = {name: int(choice.sum()) for name, choice in keep.items()}
    again = {group.name: group.size for group in second.groups}
    frozen = {(item.parameter, item.dim) for item in graph.frozen}
    for group in second.groups:
        members = {(m.parameter, m.dim) for m in group.members}
        assert any(members <= known for known in places.values()) or members <= frozen, group.name
    missing = {name for name, count in left.items() if count > 1 and again.get(name) != count}
    assert missing == set()


# ---- what is refused ------------------------------------------------------------------------------------------------


def refused(model: nn.Module, graph: ifso.ChannelGraph, keep: Any, error: type[Exception], *words: str) -> None:
    """Masking and compaction both say no, in one line with these words, and leave the model alone."""
    before, seen = state(model), copy.deepcopy(_appearance(model))
    for action in (lambda: ifso.compact_(model, graph, keep), lambda: ifso.masked(model, graph, keep).__enter__()):
        with pytest.raises(error) as caught:
            action()
        message = str(caught.value)
        assert "\n" not in message
        assert all(word in message for word in words), message
        assert_same_state(model, before)
        assert _appearance(model) == seen


def test_unknown_group():
    case = CASES["plain"]
    refused(case.model(), case.graph(), {"stem": torch.ones(8, dtype=torch.bool)}, KeepError, "'stem'", "stem.conv")


def test_wrong_size():
    case = CASES["plain"]
    refused(case.model(), case.graph(), {"stem.conv": torch.ones(7, dtype=torch.bool)}, KeepError, "(7,)", "8 units")


@pytest.mark.parametrize(
    "choice", [torch.ones(8), torch.arange(8), [1, 0, 1, 1, 1, 1, 1, 1]], ids=["float", "indices", "ints"]
)
def test_not_bool(choice):
    case = CASES["plain"]
    refused(case.model(), case.graph(), {"stem.conv": choice}, KeepError, "bool")


@pytest.mark.parametrize("keep", [{}, {"stem.conv": torch.ones(0, dtype=torch.bool)}], ids=["no-groups", "no-units"])
def test_empty_keep(keep):
    case = CASES["plain"]
    refused(case.model(), case.graph(), keep, KeepError, "keep")


def test_emptied_layer():
    case = CASES["plain"]
    refused(
        case.model(),
        case.graph(),
        {"stem.conv": torch.zeros(8, dtype=torch.bool)},
        KeepError,
        "stem.conv",
        "at least one",
    )


def test_emptied_part_of_a_layer():
    """All that one layer makes goes, though the axis that reads it keeps others."""
    case = CASES["concat"]
    refused(case.model(), case.graph(), {"layer1.conv": torch.zeros(4, dtype=torch.bool)}, KeepError, "layer1.conv")


@pytest.mark.parametrize(
    "name", ["grouped", "shuffle", "channel-shuffle", "group-norm", "res2net", "transposed-grouped", "grouped-input"]
)
def test_broken_balance(name):
    case = CASES[name]
    graph = case.graph()
    unit = int(graph.balances[0].blocks.flatten()[0])
    group = next(group for group in graph.groups if group.first <= unit < group.first + group.size)
    keep = {group.name: torch.arange(group.first, group.first + group.size) != unit}
    refused(case.model(), graph, keep, KeepError, "balance", "ifso.balance(graph, keep)")


def test_stale_graph():
    case = CASES["plain"]
    model, graph = case.model(), case.graph()
    keep = {"stem.conv": torch.arange(8) < 5}
    ifso.compact_(model, graph, keep)
    refused(model, graph, keep, StaleGraphError, "ifso.trace")
    with pytest.raises(StaleGraphError, match="stem"):
        ifso.cost(model, graph)


def test_graph_of_another_model():
    keep = {"stem.conv": torch.arange(8) < 5}
    refused(CASES["residual"].model(), CASES["plain"].graph(), keep, StaleGraphError, "another model")


def picky() -> Case:
    return Case("picky", calling.Picky, lambda: torch.randn(2, 3, 8, 8, dtype=torch.float64))


def test_failed_compaction_leaves_the_model_as_it_was():
    """The network's own code refuses 15 channels, and only those; tracing cannot know."""
    case = picky()
    model, graph = case.model(), case.graph()
    before, seen = state(model), copy.deepcopy(_appearance(model))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(CompactionError) as caught:
        ifso.compact_(model, graph, {"stem.conv": torch.arange(16) != 3}, optimizer=optimizer)
    assert "left as it was" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_same_state(model, before)
    assert _appearance(model) == seen
    assert torch.equal(outputs(model, case.inputs())[0], outputs(case.model(), case.inputs())[0])
    ifso.compact_(model, graph, {"stem.conv": torch.arange(16) > 3})
    assert model.stem.conv.out_channels == 12


def test_failed_compaction_on_real_tensors_leaves_the_model_as_it_was():
    case = Case(
        "real-picky",
        lambda: calling.OnRealTensors(calling.Picky()),
        lambda: torch.randn(2, 3, 8, 8, dtype=torch.float64),
    )
    model, graph = case.model(), case.graph()
    assert graph.on_real_tensors
    before = state(model)
    with pytest.raises(CompactionError, match="left as it was"):
        ifso.compact_(model, graph, {"net.stem.conv": torch.arange(16) != 3})
    assert_same_state(model, before)


def test_ties_hold_after_compaction():
    case = CASES["tied-weights"]
    model = case.model()
    ifso.compact_(model, case.graph(), {"embed": torch.arange(8) < 5})
    assert model.out.weight is model.embed.weight
    assert (model.embed.embedding_dim, model.out.in_features, model.out.out_features) == (5, 5, 11)


def test_attention_layer_stays_usable_after_compaction():
    """Masks, weights and both modes of PyTorch's layer work when heads and width no longer fit each other."""
    model = attention.multihead().double().eval()
    tokens = torch.randn(2, 7, 6, dtype=torch.float64)
    graph = ifso.trace(model, tokens)
    ifso.compact_(model, graph, {"attn": torch.tensor([True, False, True, True]), "embed": torch.arange(8) < 5})
    x, padding = torch.randn(2, 7, 5, dtype=torch.float64), torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 4:] = True
    hidden, weights = model.attn(x, x, x, key_padding_mask=padding, need_weights=True, average_attn_weights=False)
    assert (hidden.shape, weights.shape) == ((2, 7, 5), (2, 3, 7, 7))
    assert float(weights[0, :, :, 4:].abs().max()) == 0
    causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    a, _ = model.attn(x, x, x, attn_mask=causal, need_weights=False)
    b, _ = model.attn(x, x, x, attn_mask=causal, need_weights=True)
    torch.testing.assert_close(a, b)
    assert isinstance(model.attn, nn.MultiheadAttention)


def test_conv_helpers_say_what_they_are():
    """Guards the table above: each description can be wrong."""
    conv = convolution.grouped().gconv.conv
    conv.in_channels = 7
    assert (conv.in_channels, conv.out_channels) != conv_sizes(conv)


# ---- a network that was changed after it was traced ------------------------------------------------------------------


class Rolled(nn.Module):
    """Moves an image by ``step`` places, and by one more where the channels are odd in number."""

    step = 1

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(x.shape[1] % 2 + self.step, 2)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Rolled(), nn.Dropout(0.1), nn.Conv2d(8, 4, 3), nn.Flatten(),
        nn.LayerNorm(64),
    ).double()  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("place", "setting", "value"),
    [(1, "momentum", 0.01), (1, "eps", 0.01), (3, "step", 2), (4, "p", 0.5), (7, "eps", 0.01)],
)
def test_a_setting_that_has_nothing_to_do_with_channels_may_change(place, setting, value, training):
    model, images = normed().train(training), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    graph = ifso.trace(model, images)
    setattr(model[place], setting, value)
    keep = {"0": torch.arange(8) > 1}
    with ifso.masked(model, graph, keep):
        before = model.eval()(images)
    ifso.compact_(model.train(training), graph, keep)
    torch.testing.assert_close(model.eval()(images), before)
    assert getattr(model[place], setting) == value


@pytest.mark.parametrize("step", [1, 2])
def test_one_that_follows_the_channels_is_refused_also_then(step):
    model, images = normed().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    graph = ifso.trace(model, images)
    model[3].step = step
    with pytest.raises(CompactionError, match="roll in 3 computes with a number that depends on how many channels"):
        ifso.compact_(model, graph, {"0": torch.arange(8) > 0})
