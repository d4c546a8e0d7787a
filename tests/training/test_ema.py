"""The moving average against its equation in float64; what is averaged, what is copied, what comes back."""

import copy

import pytest
import torch
from torch import nn

from ifso.errors import RunError, TrainingError
from ifso.training.optimizers import Ema


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self[3].weight = nn.Parameter(self[0].weight.detach().new_ones(4, 4))


def move(model, seed):
    """Other weights, other statistics, a counter that counts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.train()(torch.randn(6, 3, generator=generator).to(model[0].weight.dtype))
    model.table.add_(seed)


def tensors(model):
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_average_is_what_its_equation_says(decay):
    model = Net().double()
    wanted, average = tensors(model), Ema(model, decay)
    for step in range(5):
        move(model, step)
        average.update()
        kept = min(decay, (1 + step) / (10 + step))
        now = tensors(model)
        for name in ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "3.weight"):
            wanted[name] = kept * wanted[name] + (1 - kept) * now[name]
    wanted |= {name: now[name] for name in ("1.num_batches_tracked", "mask", "table")}
    with average.applied():
        found = tensors(model)
        assert found["1.num_batches_tracked"] == 5
        for name in wanted.keys() - {"3.bias"}:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-13, atol=1e-15)


def test_own_weights_come_back_in_the_same_memory_even_after_an_error():
    model = Net()
    average = Ema(model, 0.9)
    move(model, 1)
    average.update()
    move(model, 2)
    before, places = tensors(model), [parameter.data_ptr() for parameter in model.parameters()]
    inside = []

    def look():
        with average.applied():
            inside.append(model[0].weight.detach().clone())
            raise KeyError

    with pytest.raises(KeyError):
        look()
    assert not torch.equal(inside[0], before["0.weight"])
    after = tensors(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    move(model, 3)
    average.update()
    with average.applied():
        assert not torch.equal(model[0].weight, after["0.weight"])


def test_training_goes_on_as_if_nobody_had_looked():
    torch.manual_seed(0)
    models = [Net(), None]
    models[1] = copy.deepcopy(models[0])
    for looked, model in enumerate(models):
        average, optimizer = Ema(model, 0.9), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(6, 3, generator=generator)).square().mean().backward()
            optimizer.step()
            average.update()
            if looked:
                with average.applied():
                    pass
    first, second = map(tensors, models)
    assert all(torch.equal(first[name], value) for name, value in second.items())


def test_half_precision_is_averaged_in_float32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.0)
    average = Ema(model, 0.999)
    average.load_state_dict({"updates": torch.tensor(10**6), "average.weight": torch.ones(1, 1)})
    nn.init.constant_(model.weight, 2.0)
    for _ in range(100):
        average.update()
    assert average.state_dict()["average.weight"].item() == pytest.approx(2 - 0.999**100, rel=1e-5)
    with average.applied():
        assert model.weight.dtype == torch.bfloat16
        assert model.weight.item() == pytest.approx(2 - 0.999**100, rel=4e-3)


def test_a_tied_weight_is_averaged_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    average = Ema(model, 0.5)
    before = model[0].weight.detach().clone()
    nn.init.zeros_(model[0].weight)
    average.update()
    assert list(average.state_dict()) == ["updates", "average.0.weight"]
    with average.applied():
        torch.testing.assert_close(model[1].weight.detach(), 0.1 * before)


def test_a_buffer_that_was_replaced_is_seen():
    model = Net()
    average = Ema(model, 0.5)
    model.table = torch.full((2,), 7.0)
    average.update()
    assert average.state_dict()["average.table"].tolist() == [7.0, 7.0]


def test_state_carries_over_to_another_average():
    model = Net()
    average = Ema(model, 0.99)
    for step in range(3):
        move(model, step)
        average.update()
    stored = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    other = copy.deepcopy(model)
    resumed = Ema(other, 0.99)
    resumed.load_state_dict(stored)
    for each, mean in ((model, average), (other, resumed)):
        move(each, 7)
        mean.update()
    first, second = average.state_dict(), resumed.state_dict()
    assert first["updates"] == second["updates"] == 4
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(stored["average.0.weight"], first["average.0.weight"])


def test_bad_use():
    model = Net()
    average = Ema(model, 0.9)
    with average.applied():
        with pytest.raises(TrainingError, match="holds its average now"):
            average.update()
        with pytest.raises(TrainingError, match="holds its average now"), average.applied():
            pass
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    state = {**before, "average.0.weight": torch.zeros(2, 2), "updates": torch.tensor(9)}
    with pytest.raises(RunError, match=r"average.0.weight is float32 \[4, 3\] and was float32 \[2, 2\]"):
        average.load_state_dict(state)
    assert average.state_dict()["updates"] == 0
    with pytest.raises(RunError, match=r"average.0.bias is float32 .* and was not there"):
        average.load_state_dict({name: tensor for name, tensor in before.items() if "0.bias" not in name})
