"""What users do first, and what they may trip over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import ifso
from ifso.common.batches import BatchStream
from ifso.criteria.base import Criterion, Task
from ifso.errors import IfsoError

BUDGET = ifso.Budget(macs=0.6)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(*shape: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, *shape), torch.randint(0, 3, (8,))) for _ in range(3)]


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
    )


def prune(model: nn.Module, **options: Any) -> ifso.PruneResult:
    given = {"budget": BUDGET, "accumulate": 1, "batches_per_score": 1, "recalibrate": 2, **options}
    data = given.pop("data", None) or batches(3, 6, 6)
    return ifso.prune(model, data, cross_entropy, **{"example_inputs": data[0][0][:1], **given})


def test_one_image_through_batch_norm_of_one_value_in_train_mode():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).train()
    result = prune(model, data=batches(6))
    assert result.shares["macs"] <= 0.6
    assert model.training


def test_a_linear_layer_left_with_one_by_one():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    result = prune(model, data=batches(8), budget=ifso.Budget(macs=0.25), criterion="magnitude")
    assert all(check.passed for check in result.checks)


def test_evaluate_sees_the_network_in_eval_mode_and_cannot_disturb_it():
    seen: list[bool] = []
    model = small().train()
    prune(model, evaluate=lambda model: seen.append(model.training) or torch.tensor(1.0))
    assert len(seen) == 3
    assert not any(seen)
    assert model.training


def test_no_gradients_are_left():
    model = small()
    prune(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_criterion_of_ones_own():
    class FirstOnes(Criterion):
        name, needs = "first-ones", "weights"

        def units(self, task: Task, batch: Any) -> Tensor:
            return torch.arange(task.graph.num_units, dtype=torch.float64)

    result = prune(small(), criterion=FirstOnes(), normalize="none")
    assert not result.keep["0"][0]


def test_a_weight_update_that_fails_does_not_lose_the_run(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise IfsoError("no such product")

    monkeypatch.setattr("ifso.pruning.finalize.update_weights_", fail)
    result = prune(small(), weight_update=1, out=tmp_path / "run")
    assert "ΔW could not be computed: no such product" in result.notes
    ifso.load(tmp_path / "run", small())


def test_a_run_that_fails_at_once_leaves_no_folder(tmp_path):
    with pytest.raises(ZeroDivisionError):
        prune(small(), evaluate=lambda model: 1 / 0, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    prune(small(), out=tmp_path / "run")


@pytest.mark.parametrize("hidden", [False, True])
def test_generators_inside_samplers_follow_the_epoch(hidden: bool):
    def stream(position: tuple[int, int] = (0, 0)) -> BatchStream:
        data, generator = TensorDataset(torch.arange(12)), torch.Generator().manual_seed(3)
        if hidden:
            sampler = BatchSampler(RandomSampler(data, generator=generator), 4, drop_last=False)
            return BatchStream(DataLoader(data, batch_sampler=sampler), 0, position)
        return BatchStream(DataLoader(data, 4, shuffle=True, generator=generator), 0, position)

    first = stream()
    seen = [next(first)[0].tolist() for _ in range(6)]
    later = stream((1, 1))
    assert [next(later)[0].tolist() for _ in range(2)] == seen[4:]


def test_names_to_ignore_are_no_string():
    with pytest.raises(IfsoError, match="give a tuple of names"):
        prune(small(), ignore="0")


def test_other_weights_on_resume_are_explained(tmp_path):
    prune(small(), out=tmp_path / "run")
    with pytest.raises(IfsoError, match="as it was before the run"):
        prune(small(), resume=tmp_path / "run")


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused():
    with pytest.raises(IfsoError, match="LBFGS, which evaluates the loss itself"):
        prune(small(), optimizer=torch.optim.LBFGS)
