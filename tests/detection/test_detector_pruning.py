"""Detectors pruned by ``ifso.prune`` and by the command: steps, budgets, files, resuming, regions that change."""

from __future__ import annotations

import json

import pytest
import torch
from mini import MiniRetina, scene
from torch import nn
from torch.optim import SGD
from zoo_of_boxes import boxes_for, detector, relative_error, seeded

import ifso
from ifso.cli.main import main
from ifso.common.batches import rough_count
from ifso.costs.cost import recount
from ifso.pruning.events import Silent
from ifso.pruning.measures import compare
from ifso.pruning.result import Check
from ifso.surgery.compact import in_float64
from ifso.tasks.detection import detection_loss

QUICKLY = {"accumulate": 1, "batches_per_score": 1, "recalibrate": 2}


def batches(count: int = 3):
    return [scene(seed=seed) for seed in range(count)]


def prune(model: nn.Module, **options):
    train = options.pop("train", batches())
    example = options.pop("example_inputs", (train[0][0][:1],))
    return ifso.prune(model, train, detection_loss, example_inputs=example, **{**QUICKLY, **options})


@pytest.mark.parametrize(
    ("criterion", "train_mode"), [("ifso", True), ("group-fisher", False), ("taylor", True), ("magnitude", False)]
)
def test_step_by_step(criterion, train_mode, tmp_path):
    torch.manual_seed(0)
    model = MiniRetina().train(train_mode)
    statistics = model.deep[1].running_mean.clone()
    result = prune(
        model,
        criterion=criterion,
        budget=ifso.Budget(macs=0.6),
        train_mode=train_mode,
        recalibrate=0,
        out=tmp_path / "r",
    )
    assert all(check.passed for check in result.checks)
    assert result.shares["macs"] <= 0.6
    assert result.removals > 1
    kept = result.keep["deep.0"]
    moved = not torch.equal(model.deep[1].running_mean, statistics[kept])
    assert moved == train_mode
    loaded = ifso.load(tmp_path / "r", MiniRetina())
    images = scene(seed=9)[0]
    assert relative_error(seeded(lambda: model.eval()(images)), seeded(lambda: loaded.eval()(images))) == 0


def test_at_once_with_weights_that_stay():
    model = MiniRetina()
    before = model.scores.weight.detach().clone()
    result = prune(model, budget=ifso.Budget(params=0.7), schedule="one-shot")
    kept = result.keep["tower"]
    assert torch.equal(model.scores.weight, before[:, kept])
    assert result.shares["params"] <= 0.7


class Interrupted(Silent):
    """Ctrl-C after so many removals."""

    def removed(self, removal):
        if removal.removal == 3:
            raise KeyboardInterrupt


def test_a_resumed_run_ends_where_it_would_have(tmp_path):
    def start() -> nn.Module:
        torch.manual_seed(0)
        return MiniRetina()

    options = {"budget": ifso.Budget(macs=0.5), "checkpoint_every": 0.0}
    straight = prune(start(), **options)
    with pytest.raises(KeyboardInterrupt):
        prune(start(), **options, out=tmp_path / "r", listener=Interrupted())
    resumed = prune(start(), **options, resume=tmp_path / "r")
    assert resumed.removals == straight.removals
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_in_stages_and_resumed(tmp_path):
    """The default: no steps, weights fitted in closed form; a resumed run ends with the same bits."""

    class Stopped(Silent):
        def staged(self, stage):
            if stage.number == 5:
                raise KeyboardInterrupt

    def staged(**options):
        torch.manual_seed(0)
        example = (batches()[0][0][:1],)
        budget = ifso.Budget(macs=(0.8, 0.5))
        return ifso.prune(
            MiniRetina(), batches(), detection_loss, example_inputs=example, budget=budget, progress=False, **options
        )

    straight = staged()
    assert all(check.passed for check in straight.checks)
    assert [network.targets["macs"] for network in straight.networks] == [0.8, 0.5]
    assert all(network.shares["macs"] <= network.targets["macs"] for network in straight.networks)
    with pytest.raises(KeyboardInterrupt):
        staged(out=tmp_path / "r", listener=Stopped())
    resumed = staged(resume=tmp_path / "r")
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    between = ifso.load(resumed.networks[0].folder, MiniRetina())
    images = scene(seed=9)[0]
    assert (
        relative_error(
            seeded(lambda: straight.networks[0].model.eval()(images)), seeded(lambda: between.eval()(images))
        )
        == 0
    )


class Sparse(nn.Module):
    """A second stage looks at the places that the first one finds worth it, in eval mode; at all in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh())
        self.worth = nn.Conv2d(8, 1, 1)
        self.second = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 2))

    def forward(self, images, targets=None):
        x = self.first(torch.stack(images))
        worth = self.worth(x)[:, 0]
        if self.training:
            return {"worth": (worth - 3).square().mean(), "size": self.second(x.movedim(1, 3)).square().mean()}
        places = (worth > 0).nonzero()
        return self.second(x[places[:, 0], :, places[:, 1], places[:, 2]])


def test_rows_may_become_more_on_the_way():
    """Training moves the number of rows that the second stage sees: costs are checked for each row then."""
    model = Sparse().eval()
    with torch.no_grad():
        model.worth.bias -= model.worth(model.first(scene()[0][0][None])).median()
    optimizer = {"optimizer": lambda parameters: SGD(parameters, lr=0.1)}
    result = prune(model, budget=ifso.Budget(params=0.7), criterion="taylor", **optimizer)
    assert all(check.passed for check in result.checks)
    small, kept = ifso.trace(model.eval(), result.graph.inputs), result.graph.kept(result.keep)
    assert small.on_real_tensors
    rows = [next(term.shape for term in graph.terms if term.kind == "linear") for graph in (result.graph, small)]
    assert rows[0][0] != rows[1][0], "the number of rows did not change: the test proves nothing"
    assert recount(result.graph, kept, small) == []
    another = kept.clone()
    another[result.graph.groups[-1].units] = True
    assert recount(result.graph, another, small) != []


@pytest.mark.slow
def test_regions_may_become_more_or_fewer_on_the_way(tmp_path):
    """A trained first stage proposes other regions than at the start: costs are checked for each row then."""
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    model = detector(name, rpn_nms_thresh=0.3, rpn_post_nms_top_n_test=1000).float()
    images, targets = boxes_for(name)
    train = [([image.float() for image in images], [{**one, "boxes": one["boxes"].float()} for one in targets])]
    counts = []
    handle = model.roi_heads.box_head.fc6.register_forward_pre_hook(
        lambda module, inputs: counts.append(len(inputs[0])) if not module.training else None
    )
    result = prune(
        model, train=train, criterion="taylor", budget=ifso.Budget(macs=0.9), units_per_step=400, out=tmp_path / "r",
        optimizer=lambda parameters: SGD(parameters, lr=0.05), recalibrate=0,
    )  # fmt: skip
    handle.remove()
    assert all(check.passed for check in result.checks)
    assert len(set(counts)) > 1, "the number of regions did not change: the test proves nothing"
    small = ifso.trace(model.eval(), ([train[0][0][0]],))
    kept = result.graph.kept(result.keep)
    assert recount(result.graph, kept, small) == []
    assert recount(result.graph, result.graph.kept(None), small) != []


def test_classes_keep_their_places():
    """Nothing goes that would give another number to a class: what max or argmax finds, or what is looked up."""
    graph = ifso.trace(MiniRetina().eval(), (scene()[0][:1],))
    reasons = {axis.parameter: axis.reason for axis in graph.frozen if axis.dim == 0}
    assert reasons["scores.weight"] == "its order matters in aten.max"
    assert "corners.weight" in reasons

    class Largest(nn.Module):
        def __init__(self, ask):
            super().__init__()
            self.first, self.classes, self.ask = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1), ask

        def forward(self, x):
            return self.ask(self.classes(self.first(x)))

    def sizes(ask):
        return [group.size for group in ifso.trace(Largest(ask), torch.zeros(1, 3, 2, 2)).groups]

    assert sizes(lambda x: x.argmax(1)) == sizes(lambda x: x.min(1).indices * 2) == [4]
    assert sizes(lambda x: x.max(1).values) == sizes(lambda x: x.amax(1)) == [4, 5]
    assert sizes(lambda x: x.flatten(2).max(2)[1]) == [4]


class TestChecks:
    def test_float64_leaves_nothing_behind(self):
        model = MiniRetina()
        model.deep[1].running_mean += 1 / 3
        before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
        with in_float64(model):
            assert all(tensor.dtype != torch.float32 for tensor in model.state_dict().values())
            assert torch.zeros(1).dtype == torch.float64
            model.train()
            detection_loss(model, [[image.double() for image in part] for part in (scene()[0],)] + [scene()[1]])
        for name, tensor in model.state_dict(keep_vars=True).items():
            assert tensor is before[name][0]
            assert tensor.dtype == before[name][1].dtype
            assert torch.equal(tensor, before[name][1])
        assert torch.zeros(1).dtype == torch.float32

    def test_the_rougher_side_says_what_is_equal(self):
        one = torch.ones(3, dtype=torch.float64)
        assert compare([one], [one.float() * (1 + 1e-6)]).passed
        assert not compare([one], [one * (1 + 1e-6)]).passed
        assert isinstance(compare([one], [one]), Check)


def test_samples_of_whatever_a_network_is_called_with():
    images, targets = scene(((16, 20),) * 4, (1, 1, 1, 1))
    assert rough_count((images, targets)) == 4
    assert rough_count((images[:1],)) == 1
    assert rough_count((torch.zeros(6, 3, 2, 2), torch.zeros(6))) == 6
    assert rough_count(torch.zeros(5, 2)) == 5


NET = """
from torch import nn
from mini import MiniRetina

def make():
    return MiniRetina()

def classifier():
    return nn.Conv2d(3, 2, 1)
"""


@pytest.fixture
def folder(tmp_path):
    """A COCO folder of four generated images, and a file with networks."""
    from PIL import Image

    (tmp_path / "images").mkdir()
    images, targets = scene(((32, 40),) * 4, (2, 1, 0, 2))
    annotations = []
    for number, (image, target) in enumerate(zip(images, targets, strict=True)):
        pixels = (image * 255).byte().movedim(0, 2).numpy()
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
        for (left, top, right, bottom), label in zip(target["boxes"].tolist(), target["labels"].tolist(), strict=True):
            box = [left, top, right - left, bottom - top]
            annotations.append(
                {"id": len(annotations) + 1, "image_id": number, "category_id": label, "bbox": box, "iscrowd": 0,
                 "area": box[2] * box[3]}
            )  # fmt: skip
    document = {
        "images": [{"id": n, "file_name": f"{n}.png", "height": 32, "width": 40} for n in range(len(images))],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}],
    }
    for part in ("train", "test"):
        (tmp_path / f"instances_{part}.json").write_text(json.dumps(document))
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def command(folder, out, *more: str, model: str = "net.py:make") -> int:
    where = f"{folder}/{model}" if model.startswith("net.py") else model
    few = ["--accumulate", "1", "--batches-per-score", "1", "--recalibrate", "2", "--schedule", "one-shot"]
    return main(["prune", "--model", where, "--data", f"coco:{folder}", "--out", str(out), *few, *more])


class TestCommand:
    def test_a_network_of_ones_own(self, folder, tmp_path, capsys):
        assert command(folder, tmp_path / "r", "--macs", "0.6", "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["shares"]["macs"] <= 0.6
        assert {"map", "map50", "map75"} <= summary["measures"][0].keys()
        config = json.loads((tmp_path / "r" / "config.json").read_text())
        assert config["about"]["counted_on"] == "3x32x40"
        assert config["settings"]["train_mode"] is True

    def test_costs_are_counted_at_the_input_that_is_named(self, folder, tmp_path, capsys):
        assert command(folder, tmp_path / "r", "--macs", "0.6", "--input", "2,3,64,80", "--eval-mode", "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        config = json.loads((tmp_path / "r" / "config.json").read_text())
        assert config["about"]["counted_on"] == "3x64x80 + 3x64x80"
        assert config["settings"]["train_mode"] is False
        graph = ifso.trace(MiniRetina().eval(), ([torch.rand(3, 64, 80) for _ in range(2)],))
        assert summary["before"]["macs"] == ifso.cost(MiniRetina(), graph).macs

    def test_in_stages_by_default(self, folder, tmp_path, capsys):
        """No step is made, so that the rate of steps with boxes has no say; one network for each share."""
        task = ["--model", f"{folder}/net.py:make", "--data", f"coco:{folder}"]
        assert main(["prune", *task, "--macs", "0.8", "0.6", "--out", str(tmp_path / "r"), "--json"]) == 0
        path = json.loads(capsys.readouterr().out)["path"]
        assert [step["asked"].get("macs") for step in path] == [None, 0.8, 0.6]
        assert all("map" in step["values"] for step in path)
        config = json.loads((tmp_path / "r" / "config.json").read_text())
        assert (config["settings"]["schedule"], config["settings"]["update"]) == ("staged", True)
        assert "lr" not in config["about"]["arguments"]
        images = scene(seed=9)[0]
        for step in path[1:]:
            loaded = ifso.load(tmp_path / "r" / step["folder"], MiniRetina())
            assert ifso.cost(loaded, ifso.trace(loaded.eval(), (images[:1],))).macs > 0
            share = step["shares"]["macs"]
            assert step["asked"]["macs"] - 0.2 < share <= step["asked"]["macs"]

    @pytest.mark.parametrize(
        ("options", "rate"),
        [
            (["--preset", "paper"], 0.001),
            (["--accumulate", "1"], 0.001),
            (["--schedule", "mixed:0.5"], 0.001),
            (["--preset", "authors"], 0.1),
            (["--lr", "0.02"], 0.02),
        ],
    )
    def test_the_rate_of_algorithm_2_with_boxes(self, folder, tmp_path, options, rate, monkeypatch):
        class Nothing(Exception):
            pass

        def record(*args, **told):
            rates.append(told["optimizer"].keywords["learning_rate"] if "optimizer" in told else 0.1)
            raise Nothing

        rates = []
        monkeypatch.setattr("ifso.pruning.prune.prune", record)
        task = ["--model", f"{folder}/net.py:make", "--data", f"coco:{folder}", "--macs", "0.6"]
        with pytest.raises(Nothing):
            main(["prune", *task, "--out", str(tmp_path / "r"), *options])
        assert rates == [rate]

    @pytest.mark.parametrize(
        ("model", "options", "message"),
        [
            ("net.py:classifier", (), "has boxes, but Conv2d"),
            ("net.py:make", ("--input", "1,1,64,80"), "is no shape of images for a detector; write N,3,H,W"),
            ("ifso:retinanet_resnet18_fpn,norms=cold", (), "norms='cold' is unknown; choose batch or frozen"),
        ],
    )
    def test_bad_input_is_one_line_before_any_file(self, folder, tmp_path, capsys, model, options, message):
        assert command(folder, tmp_path / "r", "--macs", "0.6", *options, model=model) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error
        assert not (tmp_path / "r").exists()
