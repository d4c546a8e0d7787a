"""How a recipe is chosen: on images held out, by the mean over seeds, with a table and a file of it."""

import json
from dataclasses import replace

import pytest
import torch
from tiny_rows import NETWORKS, few_images, status_of

from ifso.cli.main import main
from ifso.data.generated import generated_images
from ifso.errors import DataError, TrainingError
from ifso_repro import recipe_search as choosing
from ifso_repro.recipe_search import CANDIDATES, SMOKE, choose, smoke_images

torch.set_num_threads(1)

FEW = {"labels": {"lr": 0.05}, "taught": {"lr": 0.05, "distill": 0.9}}
KEYS = ("network", "removed", "held_out", "base_epochs", "epochs", "seeds", "best", "failed")


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "nets.py").write_text(NETWORKS.replace("def tiny(num_classes)", "def tiny(num_classes=10)"))
    return f"{tmp_path}/nets.py:tiny"


def test_smoke_images_are_held_out_or_learned_from():
    data, all_of_them = smoke_images(), generated_images("cifar10")
    train, held_out = ({image.numpy().tobytes() for image in part.pixels} for part in (data.train, data.validation))
    assert (len(train), len(held_out), len(train & held_out)) == (96, 32, 0)
    assert train | held_out == {image.numpy().tobytes() for image in all_of_them.x_train}


def test_every_candidate_is_judged_by_the_images_held_out_alone(tiny, monkeypatch):
    """The accuracies are those of their own lanes at the end; the test set could be anything."""
    seen, made = [], choosing.Trainer

    class Trainer(made):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            seen.append(self)

    monkeypatch.setattr(choosing, "Trainer", Trainer)
    data = smoke_images()
    data = replace(data, test=data.test.part(slice(0, 1)))
    lines, effort = [], replace(SMOKE, epochs=2, seeds=2)
    choice = choose(data, effort, say=lines.append, network=tiny, candidates=FEW)
    base, *lanes = seen
    assert [lane.settings.seed for lane in lanes] == [0, 0, 1, 1]
    assert [lane.settings.distill for lane in lanes] == [0, 0.9, 0, 0.9]
    assert base.settings.epochs == 1
    for number, name in enumerate(FEW):
        wanted = [_accuracy(lanes[2 * seed + number].model, data.validation) for seed in (0, 1)]
        assert choice["validation_top1"][name] == wanted
        assert choice["mean"][name] == pytest.approx(sum(wanted) / 2)
        assert all(f"{name}, seed {seed}: {wanted[seed]:.2f} %" in lines for seed in (0, 1))
    assert choice["best"] == max(choice["mean"], key=choice["mean"].get) == next(iter(choice["mean"]))
    assert choice["unpruned"] == _accuracy(base.model, data.validation)
    assert lanes[0].model[0].out_channels + lanes[0].model[3].out_channels < 12
    weights = [lane.model[3].weight for lane in lanes]
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


@torch.no_grad()
def _accuracy(model, images):
    model.eval()
    return 100 * float((model(images.normalized(images.pixels)).argmax(1) == images.labels).double().mean())


def test_one_that_fails_is_not_the_best(tiny):
    lines = []
    choice = choose(
        smoke_images(), SMOKE, say=lines.append, network=tiny, candidates={"wild": {"lr": 1e30}, "tame": {"lr": 0.01}}
    )
    assert (choice["best"], choice["failed"], list(choice["mean"])) == ("tame", ["wild"], ["tame"])
    assert any(line.startswith("wild, seed 0: the loss was") for line in lines)
    with pytest.raises(TrainingError, match="every candidate failed"):
        choose(smoke_images(), SMOKE, say=lines.append, network=tiny, candidates={"wild": {"lr": 1e30}})


def test_without_images_held_out():
    with pytest.raises(DataError, match="without a validation part"):
        choose(generated_images("cifar10"), SMOKE, say=print)


def test_candidates_are_settings():
    for changes in CANDIDATES.values():
        assert SMOKE.settings(changes, 3).epochs == 3


class TestCommand:
    @pytest.fixture(autouse=True)
    def small(self, tiny, monkeypatch):
        made = choosing.choose
        monkeypatch.setattr(
            choosing, "choose", lambda *args, **options: made(*args, network=tiny, candidates=FEW, **options)
        )

    def test_smoke(self, tmp_path, capsys):
        assert main(["repro", "recipe", "--smoke", "--seeds", "2", "--out", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        choice = json.loads((tmp_path / "results" / "smoke" / "recipe" / "choice.json").read_text())
        assert choice["smoke"]
        assert {key: choice[key] for key in KEYS if key not in ("network", "best")} == {
            "removed": 0.5, "held_out": 32, "base_epochs": 1, "epochs": 1, "seeds": 2, "failed": [],
        }  # fmt: skip
        assert "Candidates for the recipe of fine-tuning, 2 seed(s)" in printed
        for name, mean in choice["mean"].items():
            (line,) = (line for line in printed.splitlines() if line.startswith(f"│ {name} "))
            assert f"│ {mean:.2f} │" in line
        assert f"best: {choice['best']}; written: " in printed
        assert not (tmp_path / "results" / "recipe").exists()

    def test_real_images(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(choosing, "Effort", lambda: SMOKE)
        words = ["repro", "recipe", "--data", f"cifar10:{few_images(tmp_path)}", "--validation", "16", "--epochs", "2"]
        assert main([*words, "--out", str(tmp_path), "--json"]) == 0
        choice = json.loads(capsys.readouterr().out)
        assert choice == json.loads((tmp_path / "results" / "recipe" / "choice.json").read_text())
        assert (choice["held_out"], choice["epochs"], choice["data"], choice["smoke"]) == (16, 2, "cifar10", False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("recipe", "recipe takes one data set; give --data cifar10:PATH"),
        ("recipe --data imagenet:there", "recipe takes one data set"),
        ("recipe --data cifar10:a --data cifar10:b", "recipe takes one data set"),
        ("recipe --data cifar10:none.npz", "none.npz"),
        ("recipe table2", "recipe is a study of its own kind; run it alone"),
        ("recipe --smoke --masks 3", "unrecognized arguments: --masks"),
        ("recipe --smoke --table", "no table, figure or row 'recipe'"),
        ("recipe --smoke --epochs 0", "--epochs: must be a whole number from 1 up, got '0'"),
        ("recipe --smoke --device gpu", "device 'gpu' cannot be used"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert status_of(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
