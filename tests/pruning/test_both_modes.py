"""Networks that do something else in train mode than in eval mode lose no input of what only one mode runs."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ifso
from ifso.cli.main import main
from ifso.pruning.result import PruneResult
from ifso.tasks.classification import classification, cross_entropy
from ifso.training.distillation import distillation


class Outputs(NamedTuple):
    logits: Tensor
    auxiliary: Tensor


class Heads(nn.Module):
    """A head, an auxiliary head that only trains and, perhaps, a projection that only eval mode has."""

    def __init__(self, only_eval: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(n, 8, 3, padding=1) for n in (2, 8, 8))
        self.head, self.auxiliary = nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        self.only_eval = nn.Linear(8, 3) if only_eval else None

    def forward(self, x: Tensor) -> Tensor | Outputs:
        early = self.second(self.first(x).relu()).relu()
        pooled = self.third(early).relu().mean((2, 3))
        if self.training:
            return Outputs(self.head(pooled), self.auxiliary(early.mean((2, 3))))
        return self.head(pooled) if self.only_eval is None else self.head(pooled) + self.only_eval(pooled)


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 2, 6, 6), torch.randint(3, (8,))) for _ in range(3)]


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    answer = model(batch[0])
    return F.cross_entropy(answer.logits if isinstance(answer, Outputs) else answer, batch[1])


def pruned(model: nn.Module) -> PruneResult:
    torch.manual_seed(0)
    result = ifso.prune(
        model, batches(), loss_fn, budget=ifso.Budget(macs=0.6), example_inputs=torch.zeros(1, 2, 6, 6), progress=False
    )
    assert all(check.passed for check in result.checks)
    return result


@pytest.mark.parametrize("training", [False, True])
def test_an_auxiliary_head_loses_its_inputs_and_keeps_its_own_units(training: bool):
    result = pruned(model := Heads().train(training))
    assert model.training is training
    assert any("costs are those of train mode" in note and "auxiliary" in note for note in result.notes)
    assert model.second.out_channels < 8
    assert model.auxiliary[0].in_features == model.second.out_channels
    assert model.auxiliary[0].out_features == 6
    for mode in (True, False):
        model.train(mode)(torch.randn(4, 2, 6, 6))


@pytest.mark.parametrize("training", [False, True])
def test_where_each_mode_has_heads_of_its_own_what_leads_to_them_is_left_alone(training: bool):
    result = pruned(model := Heads(only_eval=True).train(training))
    assert any("each mode has heads of its own" in note for note in result.notes)
    assert model.first.out_channels < 8
    for mode in (True, False):
        model.train(mode)(torch.randn(4, 2, 6, 6))


class Normed(Heads):
    """An auxiliary head with a batch norm that cannot train on the one sample of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary.insert(1, nn.BatchNorm1d(6))


@pytest.mark.parametrize("training", [False, True])
def test_batch_norms_that_cannot_train_on_the_example(training: bool):
    result = pruned(model := Normed().train(training))
    assert any("costs are those of train mode" in note for note in result.notes)
    assert model.auxiliary[0].in_features == model.second.out_channels < 8
    for mode in (True, False):
        model.train(mode)(torch.randn(4, 2, 6, 6))


def test_a_network_that_is_the_same_in_both_modes_has_no_note():
    class Plain(Heads):
        def forward(self, x: Tensor) -> Tensor:
            pooled = self.third(self.second(self.first(x).relu()).relu()).relu().mean((2, 3))
            return self.head(pooled) + self.auxiliary(pooled)

    assert not any("mode" in note for note in pruned(Plain().train()).notes)


def test_losses_of_classifiers_are_those_of_the_logits_beside_auxiliary_ones():
    model, batch = Heads().train(), batches()[0]
    wanted = F.cross_entropy(model(batch[0]).logits, batch[1])
    assert torch.equal(cross_entropy(model, batch), wanted)
    assert torch.isclose(classification(1e-9)(model, batch), wanted)
    assert torch.isclose(distillation(model, weight=0.0)(model, batch), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("googlenet", 64), ("inception_v3", 299)])
def test_networks_of_torchvision_with_auxiliary_heads(name: str, size: int, tmp_path: Path, capsys):
    source = f"""
        import torch
        class Source:
            num_classes, input_shape = 4, (3, {size}, {size})
            train_batches = test_batches = [(torch.randn(4, 3, {size}, {size}), torch.arange(4))]
        """
    (tmp_path / "data.py").write_text(textwrap.dedent(source))
    given = f"--model torchvision:{name} --data {tmp_path}/data.py:Source --macs 0.8 --schedule one-shot"
    assert main(["prune", *given.split(), "--criterion", "magnitude", "--out", str(tmp_path / "run")]) == 0
    assert "costs are those of train mode" in capsys.readouterr().out
    assert main(["finetune", str(tmp_path / "run"), "--epochs", "1"]) == 0
