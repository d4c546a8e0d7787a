"""A network padded to the shape before pruning trains as the pruned one does, to the last bits of float64."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from nets import convolution
from torch import nn

import ifso
from ifso.cli.main import main
from ifso.cli.progress import PlainTrainingProgress
from ifso.common.module_state import named_tensors
from ifso.data import open_data
from ifso.errors import RecipeError, RunError
from ifso.models import create_model
from ifso.surgery.recipe import recipe_of
from ifso.tasks.classification import cross_entropy
from ifso.training.checkpoint import FILE
from ifso.training.padded_finetune import Padding, padded_
from ifso.training.runs import SilentTraining, Training, train_side_by_side
from ifso.training.settings import TrainSettings
from ifso.training.trainer import fit

torch.set_num_threads(1)


def plain(bias=True):
    """Convolutions with biases and without norms, then layers of which the units are read through a flattening."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=bias), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 10),
    )  # fmt: skip


def activated(activation, norm=None):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), norm or nn.Identity(), activation, nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(96, 10)
    )


def normed():
    return activated(nn.ReLU(), nn.BatchNorm2d(8))


class Grey(nn.Module):
    """A network for images of three channels and three classes of outputs, for grey images of ten."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.expand(-1, 3, -1, -1)).repeat(1, 4)[:, :10]


NETS = {
    "residual": lambda: create_model("ifso:resnet8-digits"),
    "biases": plain,
    "joined": lambda: Grey(convolution.Dense()),
    "depthwise": lambda: Grey(convolution.depthwise()),
    "grouped": lambda: Grey(convolution.grouped()),
}


@pytest.fixture(scope="module")
def data():
    found = open_data("digits", seed=1)
    return replace(found, train=found.train.part(slice(0, 192)), test=found.test.part(slice(0, 64)))


def network(build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def removal(graph, step=0):
    """A third of every group, others in each step; of grouped layers what makes them equal again."""
    keep = {group.name: (torch.arange(group.size) + step) % 3 != 1 for group in graph.groups}
    return ifso.balance(graph, keep)


def pruned(build, data, rounds=1, dtype=torch.float64):
    model = network(build).to(dtype)
    for step in range(rounds):
        graph = ifso.trace(model, data.example_inputs().to(dtype))
        ifso.compact_(model, graph, removal(graph, step))
    return model


def double(model, batch):
    return cross_entropy(model, (batch[0].double(), batch[1]))


OURS = TrainSettings(
    epochs=2, batch=64, lr=0.05, schedule="cosine", weight_decay=5e-3, nesterov=True, decay_all=False, ema=0.8, clip=1.0
)
PAPER = TrainSettings(epochs=2, batch=64, lr=0.05, label_smoothing=0.1)


def differences(first, second):
    found = named_tensors(second)
    return max(float((tensor - found[name]).detach().abs().max()) for name, tensor in named_tensors(first).items())


@pytest.mark.parametrize(("rounds", "settings"), [(1, PAPER), (2, OURS)], ids=["once", "twice"])
@pytest.mark.parametrize("name", NETS)
def test_it_trains_as_the_small_one(name, rounds, settings, data):
    small = pruned(NETS[name], data, rounds)
    wide, start = network(NETS[name]).double(), copy.deepcopy(small)
    recipe = recipe_of(small)
    assert len(recipe.rounds) == rounds
    assert recipe.removed_units > 3
    padding = Padding(wide, recipe, data.example_inputs())
    padding.pad_(wide, small)
    assert differences(padding.unpad_(copy.deepcopy(start), wide), start) == 0
    for model in (wide, small):
        fit(model, data.train_batches(64), settings, loss_fn=double)
    for key, tensor in named_tensors(wide).items():
        assert not padding.elsewhere(key, tensor).any()
    read = padding.unpad_(copy.deepcopy(start), wide)
    assert differences(read, start) > 1e-2
    assert differences(read, small) < 1e-10


@pytest.mark.parametrize("name", NETS)
def test_padded_to_a_multiple_only(name, data):
    small, wide = pruned(NETS[name], data, dtype=torch.float32), network(NETS[name])
    before = copy.deepcopy(small)
    padding = padded_(wide, small, data, multiple=4)
    sizes = {key: (tensor.numel(), named_tensors(wide)[key].numel()) for key, tensor in named_tensors(small).items()}
    whole = {key: tensor.numel() for key, tensor in named_tensors(network(NETS[name])).items()}
    assert all(own <= padded <= whole[key] for key, (own, padded) in sizes.items())
    assert any(padded < whole[key] for key, (_, padded) in sizes.items())
    for step in (group for group in recipe_of(wide).rounds[0].groups if len(group.kept) < group.size):
        assert len(step.kept) % 4 == 0
    assert differences(padding.unpad_(copy.deepcopy(small), wide), before) == 0
    for model in (wide, small):
        fit(model, data.train_batches(64), PAPER)
    for key, tensor in named_tensors(wide).items():
        assert not padding.elsewhere(key, tensor).any()
    assert differences(padding.unpad_(copy.deepcopy(before), wide), small) < 1e-3
    assert differences(small, before) > 1e-2


def test_after_several_rounds_it_is_padded_to_the_former_shape(data):
    small, wide = pruned(plain, data, 2, dtype=torch.float32), network(plain)
    padded_(wide, small, data, multiple=4)
    assert [tuple(t.shape) for t in wide.parameters()] == [tuple(t.shape) for t in network(plain).parameters()]


def test_another_network_is_refused(data):
    small = pruned(plain, data)
    padding = Padding(network(plain).double(), recipe_of(small), data.example_inputs())
    message = r"'0.weight' has shape \[8, 1, 3, 3\], by the recipe it is \[5, 1, 3, 3\]"
    with pytest.raises(RecipeError, match=message):
        padding.pad_(network(plain).double(), network(plain).double())


class TestWhereItIsNotTheSame:
    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: activated(nn.Sigmoid()), "what was removed from 3.weight would not stay zero"),
            (lambda: activated(nn.Softplus()), "what was removed from 3.weight would not stay zero"),
            (lambda: activated(nn.ReLU(), nn.GroupNorm(1, 8)), "units of 0 were removed, which are flagged"),
            (lambda: activated(nn.Softmax(1)), "units of 0 were removed, which are flagged"),
        ],
    )
    def test_it_is_refused(self, build, message, data):
        small = pruned(build, data, dtype=torch.float32)
        with pytest.raises(RecipeError, match=message):
            padded_(network(build), small, data)

    def test_nothing_removed(self, data):
        with pytest.raises(RecipeError, match="nothing was removed"):
            padded_(network(plain), network(plain), data)

    @pytest.mark.parametrize(
        "build", [lambda: activated(nn.GELU()), lambda: activated(nn.PReLU(8), nn.BatchNorm2d(8)), plain]
    )
    def test_others_are_not_and_are_left_as_they_were(self, build, data):
        small, wide = pruned(build, data, dtype=torch.float32), network(build).eval()
        modes, random = [module.training for module in small.modules()], torch.get_rng_state()
        padding = padded_(wide, small, data)
        assert differences(padding.unpad_(copy.deepcopy(small), wide), small) == 0
        assert not any(module.training for module in wide.modules())
        assert [module.training for module in small.modules()] == modes
        assert torch.equal(torch.get_rng_state(), random)
        assert all(parameter.grad is None for parameter in (*wide.parameters(), *small.parameters()))


class Notes(SilentTraining):
    """What was said; interrupts where it is told to."""

    def __init__(self, until=99):
        self.lines, self.until = [], until

    def said(self, line):
        self.lines.append(line)

    def stepped(self, name, done):
        if done >= self.until:
            raise KeyboardInterrupt


class TestInAFolder:
    settings = TrainSettings(epochs=2, batch=64, lr=0.05, schedule="cosine", ema=0.8)

    def training(self, folder, data, build=normed, *, padded=True):
        wide = network(build) if padded else None
        model = pruned(build, data, dtype=torch.float32)
        return Training(
            name="net", folder=folder, model=model, data=data, settings=self.settings, wide=wide, start="pruned"
        )

    def test_the_small_one_is_saved_and_it_goes_on_after_an_interruption(self, data, tmp_path, monkeypatch):
        monkeypatch.setattr("ifso.training.runs.SAVE_EVERY", 0.0)
        found = {}
        for name, padded in (("own", False), ("whole", True)):
            training = self.training(tmp_path / name, data, padded=padded)
            (found[name],) = train_side_by_side([training], SilentTraining())
            loaded = ifso.load(tmp_path / name, network(normed))
            assert differences(loaded, training.model) == 0
            assert recipe_of(loaded).removed_units == recipe_of(training.model).removed_units > 3
        with pytest.raises(KeyboardInterrupt):
            train_side_by_side([self.training(tmp_path / "cut", data)], Notes(1.5))
        (resumed,) = train_side_by_side([self.training(tmp_path / "cut", data)], SilentTraining(), resume=True)
        own, whole, cut = (ifso.load(tmp_path / name, network(normed)) for name in ("own", "whole", "cut"))
        assert differences(whole, own) < 1e-3
        assert differences(whole, cut) == 0
        assert [summary["padded"] for summary in (found["own"], found["whole"], resumed)] == [False, True, True]
        assert found["whole"]["before"] == found["own"]["before"] == resumed["before"]

    def test_what_was_begun_in_the_former_shape_goes_on_in_it(self, data, tmp_path, monkeypatch):
        monkeypatch.setattr("ifso.training.runs.SAVE_EVERY", 0.0)
        monkeypatch.setattr("ifso.training.runs.MULTIPLE", None)
        train_side_by_side([self.training(tmp_path / "whole", data)], SilentTraining())
        with pytest.raises(KeyboardInterrupt):
            train_side_by_side([self.training(tmp_path / "cut", data)], Notes(1.5))
        monkeypatch.setattr("ifso.training.runs.MULTIPLE", 2)
        resumed, other = self.training(tmp_path / "cut", data), self.training(tmp_path / "narrowed", data)
        (summary,) = train_side_by_side([resumed], SilentTraining(), resume=True)
        train_side_by_side([other], SilentTraining())
        assert summary["padded"]
        assert resumed.wide[0].weight.shape == (8, 1, 3, 3)
        assert other.wide[0].weight.shape == (6, 1, 3, 3)
        whole, cut, narrowed = (ifso.load(tmp_path / name, network(normed)) for name in ("whole", "cut", "narrowed"))
        assert differences(whole, cut) == 0
        assert differences(whole, narrowed) < 1e-3

    def test_a_damaged_checkpoint_fails_its_own_training_only(self, data, tmp_path, monkeypatch):
        monkeypatch.setattr("ifso.training.runs.SAVE_EVERY", 0.0)
        for name in ("one", "two"):
            with pytest.raises(KeyboardInterrupt):
                train_side_by_side([self.training(tmp_path / name, data)], Notes(1.5))
        (tmp_path / "one" / FILE).write_bytes(b"damaged")
        again = [self.training(tmp_path / name, data) for name in ("one", "two")]
        failed, done = train_side_by_side(again, SilentTraining(), resume=True)
        assert isinstance(failed, RunError)
        assert "to train from the beginning, delete the file" in str(failed)
        assert done["epochs"] == 2

    def test_where_it_is_not_the_same_that_is_said(self, data, tmp_path):
        notes, build = Notes(), lambda: activated(nn.Sigmoid())
        (padded,) = train_side_by_side([self.training(tmp_path / "a", data, build)], notes)
        (own,) = train_side_by_side([self.training(tmp_path / "b", data, build, padded=False)], Notes())
        reason = "what was removed from 3.weight would not stay zero"
        assert notes.lines == [f"net: trained in its own shape, because {reason}"]
        assert (padded["padded"], padded["loss"]) == (False, own["loss"])


NET = """
from torch import nn

def make():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 10),
    )
"""


def test_on_the_command_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    run = str(tmp_path / "run")
    pruning = ["--macs", "0.6", "--criterion", "magnitude", "--schedule", "one-shot", "--recalibrate", "0"]
    task = ["--model", f"{tmp_path}/net.py:make", "--data", "digits"]
    assert main(["prune", *task, *pruning, "--out", run]) == 0
    losses = {}
    for option in ("--padded", "--no-padded", "--epochs=1"):
        capsys.readouterr()
        out = str(tmp_path / option.strip("-"))
        assert main(["finetune", run, "--epochs", "1", option, "--out", out, "--json"]) == 0
        (summary,) = json.loads(capsys.readouterr().out)["runs"]
        losses[option] = summary["loss"]
        assert summary["padded"] is summary["about"]["arguments"]["padded"] is (option == "--padded")
    assert losses["--padded"] == pytest.approx(losses["--no-padded"], rel=1e-4)
    monkeypatch.setattr("ifso.training.runs.SAVE_EVERY", 0.0)
    monkeypatch.setattr(PlainTrainingProgress, "stepped", lambda self, name, done: Notes(1.3).stepped(name, done))
    argv = ["finetune", run, "--out", str(tmp_path / "cut")]
    assert main([*argv, "--epochs", "2", "--padded"]) == 130
    monkeypatch.undo()
    capsys.readouterr()
    assert main([*argv, "--resume", "--no-padded"]) == 2
    assert "padded is False and was True" in capsys.readouterr().err
    assert main([*argv, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["padded"]
