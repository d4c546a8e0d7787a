"""Every choice that cannot be meant is refused in one line; recipes are the paper's and ours."""

import dataclasses
import json

import pytest

from ifso.errors import IfsoError, TrainingError
from ifso.training.settings import RECIPES, SCHEDULES, TrainSettings, training_recipe

NAN, INF = float("nan"), float("inf")

BAD = {
    "epochs": (-1, 1.5, "10", True, None, NAN),
    "batch": (0, -3, 12.0, "128", False),
    "accumulate": (0, 0.5, True),
    "seed": (-1, 1.0, 2**63, None),
    "lr": (-0.1, NAN, INF, "0.1", None, True, [0.1]),
    "factor": (-1, NAN, INF, "x"),
    "warm_up": (-1, NAN, INF, "5", None),
    "warm_up_steps": (-1, 0.5, "500", True, None),
    "momentum": (-0.1, 1.0, NAN, "0.9"),
    "weight_decay": (-1e-4, NAN, INF, None),
    "label_smoothing": (-0.1, 1.0, NAN, True),
    "ema": (-0.5, 1.0, 1.1, NAN, None),
    "clip": (-1.0, NAN, INF, "no"),
    "distill": (-0.1, 1.0000001, NAN, True),
    "temperature": (0.0, -1, NAN, INF),
    "mixup": (-0.1, 1.0000001, NAN, True, "0.5", None),
    "cutmix": (-0.1, 1.0000001, NAN, True, "0.5", None),
    "milestones": ((0.8, 0.6), (0.5, 0.5), (0, 0.5), (0.5, 1), (120, 160), (NAN,), ("a",), "0.6", 0.6, None, (True,)),
    "nesterov": ("no", 1, None),
    "decay_all": ("yes", 0),
    "channels_last": (1,),
    "compile": ("",),
    "schedule": ("linear", "", None, ["step"]),
    "opt": ("lion", "", None, ["sgd"]),
    "precision": ("fp8", "", None, ["bf16"], 32),
}


def test_every_setting_has_bad_values_here():
    assert BAD.keys() == {field.name for field in dataclasses.fields(TrainSettings)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_refused_in_one_line(name, value):
    with pytest.raises(IfsoError) as caught:
        TrainSettings(**{name: value})
    message = str(caught.value)
    assert "\n" not in message
    assert name in message
    assert repr(value) in message
    assert " must be " in message or "; choose one of " in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 5, "warm_up": 5}, "5 epochs of warm-up leave nothing of 5; give fewer"),
        ({"epochs": 0, "warm_up": 0.5}, "0.5 epochs of warm-up leave nothing of 0; give fewer"),
        ({"schedule": "one-cycle", "warm_up": 2}, "a warm-up of 2 epochs before one-cycle, which rises by itself; gi"),
        ({"batch": 128, "accumulate": 3}, "a batch of 128 cannot be cut into 3 equal micro-batches"),
        ({"batch": 2, "accumulate": 4}, "a batch of 2 cannot be cut into 4 equal micro-batches"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum"),
    ],
)
def test_choices_that_do_not_go_together(changes, message):
    with pytest.raises(TrainingError, match=f"^{message}"):
        TrainSettings(**changes)


def test_the_ends_of_the_ranges_are_allowed():
    TrainSettings(
        epochs=0, batch=1, seed=2**63 - 1, lr=0, factor=0, momentum=0, weight_decay=0, distill=1, milestones=()
    )
    TrainSettings(distill=1.0, label_smoothing=0.0, ema=0.9999, clip=0.0, temperature=1e-6, warm_up=199.5)
    assert TrainSettings(milestones=[0.3, 0.9]).milestones == (0.3, 0.9)
    assert [TrainSettings(schedule=name).schedule for name in SCHEDULES] == list(SCHEDULES)


def test_the_papers_recipe():
    paper = RECIPES["paper"]
    assert (paper.epochs, paper.batch, paper.lr, paper.schedule, paper.milestones) == (
        200,
        128,
        0.1,
        "step",
        (0.6, 0.8),
    )
    assert (paper.factor, paper.momentum, paper.weight_decay, paper.nesterov) == (0.1, 0.9, 1e-4, False)
    assert (paper.distill, paper.ema, paper.label_smoothing, paper.decay_all) == (0.0, 0.0, 0.0, True)


def test_recipes_with_changes():
    assert training_recipe("paper") == TrainSettings()
    assert training_recipe("ours", epochs=3, distill=0.0) == dataclasses.replace(RECIPES["ours"], epochs=3, distill=0.0)
    known = "paper, brief, short, quick, ours, patient, scratch, detection"
    with pytest.raises(TrainingError, match=f"recipe 'best' is unknown; choose one of {known}"):
        training_recipe("best")
    with pytest.raises(TrainingError, match="training has no setting learning_rate, wd; it has accumulate, batch"):
        training_recipe("paper", wd=0, learning_rate=1)
    with pytest.raises(TrainingError, match="lr must be a rate of 0 or more, got -1"):
        training_recipe("paper", lr=-1)


@pytest.mark.parametrize("name", RECIPES)
def test_settings_come_back_from_json(name):
    stored = json.loads(json.dumps(RECIPES[name].as_dict(), allow_nan=False))
    assert stored == RECIPES[name].as_dict()
    assert TrainSettings(**stored) == RECIPES[name]
