"""Every criterion on every network: a good score or one clear error, the model untouched, masked as compacted."""

from __future__ import annotations

import pytest
import torch
from cases import ALL, CASES, FEW, Case, run, tensors
from torch import Tensor, nn

import ifso
from ifso.criteria.registry import create
from ifso.criteria.scorer import score
from ifso.errors import ScoreError

ANY_USE = ("taylor", "magnitude", "random")


def loss_fn(model: nn.Module, batch: object) -> Tensor:
    return sum(
        (out.sin() * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)).mean()
        for out in tensors(run(model, batch))
    )


def attempt(case: Case, model: nn.Module, criterion: str, keep: dict[str, Tensor] | None = None) -> dict | None:
    """The scores, or None after a ScoreError of one line."""
    try:
        return score(model, case.graph(), loss_fn, [case.inputs()], criterion, keep=keep)
    except ScoreError as error:
        words = str(error)
    assert "\n" not in words
    assert not case.prunable or criterion not in ANY_USE, words
    return None


FEW_CASES = tuple(CASES[name] for name in sorted(FEW))


@pytest.mark.parametrize("cases", [FEW_CASES, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])
def test_scores_or_a_clear_error(any_criterion, cases):
    scored = 0
    for case in cases:
        found = attempt(case, case.model(), any_criterion)
        if found is None:
            continue
        scored += 1
        assert list(found) == [group.name for group in case.graph().groups], case.name
        for group in case.graph().groups:
            values = found[group.name]
            assert values.shape == (group.size,), case.name
            assert values.device.type == "cpu"
            assert values.dtype in (torch.float32, torch.float64)
            assert bool((values.isfinite() & (values >= 0)).all()), (case.name, group.name)
        assert sum(float(values.sum()) for values in found.values()) > 0, case.name
    assert scored > 40 * len(cases) / len(ALL)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_model_is_left_as_it_was(any_criterion, mode):
    model = CASES["residual"].model()
    model.append(nn.Dropout(0.5))
    graph = ifso.trace(model, CASES["residual"].inputs())
    model.train(mode == "train")
    model.head.eval()
    model[-1].train()
    model.stem.conv.weight.requires_grad_(False)
    model.head.fc.weight.grad = torch.ones_like(model.head.fc.weight)
    before = snapshot(model)
    keep = {"stem.conv": torch.arange(8) != 2}
    for kept in (None, keep):
        score(model, graph, loss_fn, [CASES["residual"].inputs()], any_criterion, keep=kept)
        after = snapshot(model)
        assert after.keys() == before.keys()
        changed = [key for key in before if not same(before[key], after[key])]
        assert changed == []


def snapshot(model: nn.Module) -> dict[str, object]:
    found: dict[str, object] = {"rng": torch.random.get_rng_state()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = tensor.detach().clone()
        found[f"{name} identity"] = id(tensor)
        found[f"{name} grad"] = None if tensor.grad is None else tensor.grad.clone()
        found[f"{name} requires_grad"] = tensor.requires_grad
        found[f"{name} hooks"] = len(tensor._backward_hooks or ())
    for name, module in model.named_modules():
        found[f"{name} training"] = module.training
        found[f"{name} tracks"] = getattr(module, "track_running_stats", None)
    return found


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


OTHER_THAN_COMPACTED = ("random", "authors")
"""Random numbers belong to units by place; the authors' all-ones vector also touches units that are gone."""

MASKABLE = (
    "plain", "residual", "depthwise", "fpn", "cbam", "channels-first-norm", "response-norm", "weight-standardised",
    "attention", "mixer",
)  # fmt: skip
FIRST = ("residual", "depthwise", "channels-first-norm", "response-norm", "attention")
"""A sum, a product of channels with themselves, a norm over channels, one beside them, heads."""


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in MASKABLE]
)
def test_with_keep_the_score_is_that_of_the_compacted_network(any_criterion, name):
    case = CASES[name]
    model, graph = case.model(), case.graph()
    keep = ifso.balance(graph, {group.name: torch.arange(group.size) % 3 != 1 for group in graph.groups})
    soft = attempt(case, model, any_criterion, keep)
    if soft is not None:
        assert all(bool((soft[group][~choice] == 0).all()) for group, choice in keep.items())
    if any_criterion in OTHER_THAN_COMPACTED:
        return
    ifso.compact_(model, graph, keep)
    smaller = ifso.trace(model, case.inputs())
    if soft is None:
        with pytest.raises(ScoreError):
            score(model, smaller, loss_fn, [case.inputs()], any_criterion)
        return
    hard = score(model, smaller, loss_fn, [case.inputs()], any_criterion)
    assert list(hard) == list(soft)
    for group, choice in keep.items():
        scale = float(hard[group].max())
        torch.testing.assert_close(soft[group][choice], hard[group], rtol=1e-8, atol=1e-8 * scale)


def test_criteria_say_what_they_need(any_criterion):
    """Without batches only those that need none give a score."""
    criterion = create(any_criterion)
    case = CASES["residual"]
    if criterion.needs_batches:
        with pytest.raises(ScoreError, match="needs data, and batches is NoneType"):
            score(case.model(), case.graph(), loss_fn, None, criterion)
    else:
        assert score(case.model(), case.graph(), None, None, criterion)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_as_on_the_cpu(any_criterion):
    for name in ("residual", "grouped"):
        case = CASES[name]
        here, there = (
            score(case.model().to(device), case.graph(), loss_fn, [case.inputs().to(device)], any_criterion)
            for device in ("cpu", "cuda")
        )
        for group, values in here.items():
            torch.testing.assert_close(there[group], values, rtol=1e-6, atol=1e-6 * float(values.max()))
