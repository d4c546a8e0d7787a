"""SGD against its equations in float64; which parameters decay; rates given as tensors."""

import copy

import pytest
import torch
from torch import nn

from ifso.errors import TrainingError
from ifso.training.checkpoint import copy_tensors_
from ifso.training.optimizers import momenta, optimizer_of, set_rate_
from ifso.training.settings import TrainSettings

SETTINGS = TrainSettings(lr=0.3, momentum=0.8, weight_decay=0.05)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4)).double()


def backward(model, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 2, 3, 3, dtype=torch.float64, generator=generator)
    model.zero_grad()
    model(x).square().mean().backward()


@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.8, True), (0.8, False), (0.0, False)])
def test_steps_follow_the_equations(decay_all, momentum, nesterov):
    settings = TrainSettings(
        lr=0.3, momentum=momentum, weight_decay=0.05, nesterov=nesterov, decay_all=decay_all, schedule="constant"
    )
    model = network()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    velocity = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    optimizer = optimizer_of(model, settings)
    for step, lr in enumerate((0.3, 0.2, 0.07)):
        backward(model, step)
        set_rate_(optimizer, lr)
        optimizer.step()
        for name, parameter in model.named_parameters():
            decay = 0.05 if decay_all or weights[name].dim() > 1 else 0.0
            gradient = parameter.grad + decay * weights[name]
            velocity[name] = momentum * velocity[name] + gradient
            change = gradient + momentum * velocity[name] if nesterov else velocity[name]
            weights[name] = weights[name] - lr * change
            torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-12, atol=1e-14)


def test_norms_and_biases_are_spared_only_when_asked():
    model = network()
    everything = optimizer_of(model, SETTINGS).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in everything] == [(6, 0.05)]
    decaying, spared = optimizer_of(model, TrainSettings(decay_all=False)).param_groups
    assert [id(parameter) for parameter in decaying["params"]] == [id(model[0].weight), id(model[3].weight)]
    assert (decaying["weight_decay"], spared["weight_decay"]) == (1e-4, 0.0)
    wanted = [model[0].bias, model[1].weight, model[1].bias, model[3].bias]
    assert [id(parameter) for parameter in spared["params"]] == [id(parameter) for parameter in wanted]


def test_shared_parameters_once_frozen_ones_never():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    groups = optimizer_of(model, SETTINGS).param_groups
    found = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(found) == sorted(map(id, (model[0].weight, model[0].bias, model[1].bias)))


def test_groups_without_members_are_left_out():
    norm = nn.BatchNorm1d(3)
    assert [group["weight_decay"] for group in optimizer_of(norm, TrainSettings(decay_all=False)).param_groups] == [0.0]


def test_nothing_to_train_is_refused():
    for model in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(TrainingError, match=f"{type(model).__name__} has no parameter to train"):
            optimizer_of(model, SETTINGS)


@pytest.mark.parametrize("decay_all", [True, False])
def test_a_rate_in_a_tensor_is_read_at_each_step(decay_all):
    settings = TrainSettings(weight_decay=0.05, decay_all=decay_all)
    model, lr = network(), torch.tensor(0.25)
    other = copy.deepcopy(model)
    with_tensor, with_float = optimizer_of(model, settings, lr=lr), optimizer_of(other, settings, lr=0.25)
    for step, value in enumerate((0.25, 0.125, 0.5)):
        if step == 1:
            lr.fill_(value)
        else:
            set_rate_(with_tensor, value)
        set_rate_(with_float, value)
        for each, optimizer in ((model, with_tensor), (other, with_float)):
            backward(each, step)
            optimizer.step()
    assert all(group["lr"] is lr for group in with_tensor.param_groups)
    assert lr.item() == 0.5
    for found, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_momenta_are_there_from_the_start_and_carry_on():
    model = network()
    model[3].bias.requires_grad_(False)
    optimizer = optimizer_of(model, SETTINGS)
    names = [name for name, _ in model.named_parameters() if name != "3.bias"]
    assert list(momenta(model, optimizer)) == names
    assert all(not value.any() and not value.requires_grad for value in momenta(model, optimizer).values())
    backward(model, 0)
    optimizer.step()
    other = copy.deepcopy(model)
    resumed = optimizer_of(other, SETTINGS)
    copy_tensors_(momenta(other, resumed), momenta(model, optimizer))
    for each, used in ((model, optimizer), (other, resumed)):
        backward(each, 1)
        used.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert momenta(model, optimizer_of(model, TrainSettings(momentum=0.0))) == {}


class TestAdam:
    @pytest.mark.parametrize("name", ["adam", "adamw"])
    def test_steps_as_torch_does(self, name):
        settings = TrainSettings(opt=name, lr=0.01, momentum=0.8, weight_decay=0.1)
        torch.manual_seed(0)
        model, truth = nn.Linear(3, 2), nn.Linear(3, 2)
        truth.load_state_dict(model.state_dict())
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
        optimizers = optimizer_of(model, settings), kind(truth.parameters(), 0.01, betas=(0.8, 0.999), weight_decay=0.1)
        for step in range(3):
            for net, optimizer in zip((model, truth), optimizers, strict=True):
                optimizer.zero_grad()
                net(torch.full((4, 3), float(step + 1))).square().sum().backward()
                optimizer.step()
        assert all(
            torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), truth.parameters(), strict=True)
        )

    def test_all_of_its_state_is_there_from_the_start_and_kept(self):
        model = nn.Linear(3, 2)
        optimizer = optimizer_of(model, TrainSettings(opt="adamw", lr=0.01))
        before = momenta(model, optimizer)
        assert sorted(before) == sorted(
            f"{n}.{k}" for n in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq")
        )
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        after = momenta(model, optimizer)
        assert all(after[name] is before[name] for name in before)
        assert after["weight.step"].item() == 1

    def test_one_without_decay_of_norms_and_biases(self):
        groups = optimizer_of(nn.Linear(3, 2), TrainSettings(opt="adamw", lr=0.01, decay_all=False)).param_groups
        assert [group["weight_decay"] for group in groups] == [1e-4, 0.0]

    def test_settings(self):
        assert "opt" not in TrainSettings().as_dict()
        assert TrainSettings(opt="adam").as_dict()["opt"] == "adam"
        with pytest.raises(TrainingError, match="optimizer 'lion' is unknown; choose one of sgd, adam, adamw"):
            TrainSettings(opt="lion")
        with pytest.raises(TrainingError, match="nesterov is of SGD"):
            TrainSettings(opt="adam", nesterov=True)
