"""Detectors are trained by the same engine as classifiers: they learn, from lists, in half precision, and resumed."""

import copy
import json

import pytest
import torch
from small_detectors import boxes, fcos, frozen, retina
from torchvision.models import get_model

from ifso.errors import TrainingError
from ifso.tasks.detection import ANCHORS, HEADS, detection_loss, detection_losses, float32_heads
from ifso.training.average_precision import evaluate_detector
from ifso.training.evaluation import Measuring, quality
from ifso.training.objective import batches_and_loss
from ifso.training.optimizers import rates
from ifso.training.profiling import costs_of, time_forward, training_peak
from ifso.training.runs import SilentTraining, Training, finished_summary, train_side_by_side
from ifso.training.settings import TrainSettings, training_recipe
from ifso.training.steps import TrainStep
from ifso.training.trainer import TrainerHooks, fit


class Stopped(Exception):
    """Somebody pressed a key."""


def short(**changes):
    return training_recipe("detection", **{"epochs": 3, "batch": 4, "lr": 0.05, "warm_up_steps": 2, **changes})


def trained(model, data, settings, **watched):
    batches, loss_fn = batches_and_loss(data, settings)
    return fit(model, batches, settings, loss_fn=loss_fn, hooks=TrainerHooks(**watched))


def same(first, second):
    return all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


class TestLearning:
    def test_boxes_are_found_afterwards(self):
        data, model = boxes(train=32, test=16), retina(width=16)
        before = evaluate_detector(model, data.test_batches()).map50
        epochs = trained(model, data, short(epochs=16, warm_up_steps=20, clip=5.0))
        after = evaluate_detector(model, data.test_batches()).map50
        assert before < 5
        assert after > 25
        assert epochs[-1].loss < 0.6 * epochs[0].loss

    def test_losses_have_their_names(self):
        data, model = boxes(), frozen()
        epochs = trained(model, data, short(epochs=2, lr=0.0))
        batches = data.train_batches(4)
        batches.set_epoch(0)
        with torch.no_grad():
            wanted = [detection_losses(model, batch) for batch in batches]
        for name in ("classification", "bbox_regression"):
            assert epochs[0].losses[name] == pytest.approx(sum(float(each[name]) for each in wanted) / len(wanted))
        assert sum(epochs[1].losses.values()) == pytest.approx(epochs[1].loss)

    def test_micro_batches_make_the_step_of_the_whole_batch(self):
        batch = next(iter(boxes().train_batches(4)))
        networks = [frozen() for _ in range(2)]
        networks[1].load_state_dict(networks[0].state_dict())
        for model, parts in zip(networks, (1, 2), strict=True):
            TrainStep(model.train(), short(accumulate=parts), detection_loss)(batch)
        for (name, first), second in zip(networks[0].named_parameters(), networks[1].parameters(), strict=True):
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-7, msg=name)
        with pytest.raises(TrainingError, match="a batch of 4 cannot be cut into 3 equal micro-batches"):
            TrainStep(networks[0], short(batch=6, accumulate=3), detection_loss)(batch)

    @pytest.mark.parametrize("changes", [{"ema": 0.9}, {"precision": "bf16", "channels_last": True}], ids=str)
    def test_resumed_to_the_same_bits(self, tmp_path, changes):
        data, settings, straight = boxes(), short(**changes), retina()
        broken, resumed = copy.deepcopy(straight), copy.deepcopy(straight)
        wanted = trained(straight, data, settings)

        def stop(epoch):
            if epoch.number == 2:
                raise Stopped

        with pytest.raises(Stopped):
            trained(broken, data, settings, on_epoch=stop, folder=tmp_path, save_every=0.0)
        found = trained(resumed, data, settings, folder=tmp_path)
        assert same(straight, resumed)
        assert [epoch.losses for epoch in found] == [epoch.losses for epoch in wanted]

    def test_what_is_for_classifiers_and_a_missing_teacher_are_refused(self):
        with pytest.raises(TrainingError, match="label smoothing is for classifiers only"):
            batches_and_loss(boxes(), short(label_smoothing=0.1))
        with pytest.raises(TrainingError, match="detectors cannot be compiled"):
            batches_and_loss(boxes(), short(compile=True))
        with pytest.raises(TrainingError, match="needs a teacher"):
            batches_and_loss(boxes(), short(distill=0.5))


class TestRun:
    def test_folder_and_summary(self, tmp_path):
        data, model = boxes(), retina()
        training = Training("a", tmp_path / "run", model, data, short(epochs=2), start="weights given")
        [summary] = train_side_by_side([training], SilentTraining())
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert {"loss_classification", "loss_bbox_regression", "map", "map50", "map75"} <= lines[1].keys()
        assert lines[1]["loss"] == pytest.approx(lines[1]["loss_classification"] + lines[1]["loss_bbox_regression"])
        assert summary["last_map"] == lines[1]["map"]
        assert summary["best_map"] == max(line["map"] for line in lines)
        assert summary["before"].keys() == {"weights given"}
        assert "last_top1" not in summary
        assert finished_summary(tmp_path / "run") == json.loads(json.dumps(summary))

    def test_a_warm_up_as_long_as_the_run_is_refused_before_anything_is_done(self, tmp_path):
        training = Training("a", tmp_path / "run", retina(), boxes(), short(warm_up_steps=9))
        with pytest.raises(TrainingError, match="9 steps of warm-up leave nothing of the 9 of the run; give fewer"):
            train_side_by_side([training], SilentTraining())
        assert not (tmp_path / "run").exists()


class TestWarmUpInSteps:
    def test_rises_in_a_straight_line(self):
        found = rates(TrainSettings(epochs=5, lr=1.0, warm_up_steps=4), 2)
        assert found == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1, 0.1, 0.1, 0.01, 0.01])
        assert found == pytest.approx(rates(TrainSettings(epochs=5, lr=1.0, warm_up=2), 2))

    def test_batches_without_a_length(self):
        with pytest.raises(TrainingError, match="warm-up need batches with a length"):
            fit(retina(), iter(()), short(), loss_fn=detection_loss)

    @pytest.mark.parametrize("changes", [{"warm_up": 1.0}, {"schedule": "one-cycle"}])
    def test_not_together_with(self, changes):
        with pytest.raises(TrainingError, match="a warm-up of"):
            TrainSettings(warm_up_steps=5, **changes)

    def test_files_from_before_stay_valid(self):
        assert "warm_up_steps" not in TrainSettings().as_dict()
        assert TrainSettings(**training_recipe("detection").as_dict()) == training_recipe("detection")

    def test_the_recipe_of_the_paper(self):
        recipe = training_recipe("detection")
        found = rates(recipe, 600)
        assert (recipe.epochs, recipe.batch, recipe.momentum, recipe.weight_decay) == (12, 2, 0.9, 1e-4)
        assert found[500] == pytest.approx(1e-3)
        assert [found[epoch * 600] for epoch in (7, 8, 10, 11)] == pytest.approx([1e-3, 1e-4, 1e-4, 1e-5])


class TestHalfPrecision:
    def test_anchors_and_losses_are_in_float32(self):
        """An image 700 pixels wide: bfloat16 knows whole pixels up to 256 only."""
        model = retina(side=700)
        target = {"boxes": torch.tensor([[601.0, 613.0, 630.0, 641.0]]), "labels": torch.tensor([1])}
        batch = [torch.rand(3, 700, 700)], [target]
        anchors = []
        with torch.no_grad():
            wanted = detection_losses(model, batch)
        handle = model.anchor_generator.register_forward_hook(lambda module, inputs, found: anchors.append(found[0]))
        kept = [cell.clone() for cell in model.anchor_generator.cell_anchors]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            losses = detection_losses(model, batch)
        handle.remove()
        detection_losses(model, batch)
        assert anchors[0].dtype == torch.float32
        assert {float(edge) % 8 for edge in (anchors[0][:, 0] + anchors[0][:, 2]) / 2} == {0.0}
        assert all(map(torch.equal, kept, model.anchor_generator.cell_anchors))
        for name, loss in losses.items():
            assert loss.dtype == torch.float32
            assert loss.item() == pytest.approx(float(wanted[name]), rel=0.02)

    def test_boxes_that_are_found_too(self):
        model, image = retina().eval(), [torch.rand(3, 64, 64)]
        model.score_thresh = 0.0
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            narrow = model(image)[0]["boxes"]
            with float32_heads(model):
                wide = model(image)[0]["boxes"]
        assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)

    def test_nothing_is_left_behind(self):
        model = retina()
        with torch.autocast("cpu", torch.bfloat16), float32_heads(model):
            assert model.head._forward_hooks
        assert not model.head._forward_hooks
        with float32_heads(model):
            assert not model.head._forward_hooks

    @pytest.mark.parametrize("name", ["fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large"])
    def test_names_of_heads_and_anchors_are_those_of_torchvision(self, name):
        modules = dict(get_model(name, weights=None, weights_backbone=None).named_modules())
        found = [names for names in (HEADS, ANCHORS) if any(each in modules for each in names)]
        assert found == [HEADS, ANCHORS]
        if "rcnn" in name:
            assert {"rpn.head", "rpn.anchor_generator", "roi_heads.box_predictor"} <= modules.keys()


class TestMeasuring:
    def test_average_precision_is_what_counts(self):
        data, model = boxes(), fcos()
        wanted = evaluate_detector(model, data.test_batches())
        found = quality(model, data, data.test_batches(), "float32", over_ranks=False)
        assert found.detection == wanted
        assert found.as_dict()["samples"] == 6
        assert found.as_dict()["by_category"] == wanted.by_category
        measures = Measuring(model, data, short(), validation=False)(model)
        assert measures["map"] == wanted.map
        assert "map_large" not in measures

    def test_costs_time_and_memory(self):
        data, model = boxes(), retina()
        example = data.example_inputs()
        cost, memory = costs_of(model, example, "float32")
        head = 8 * 8 * 9 * (8 * 8) + 4 * 4 * 9 * (8 * 8)
        assert cost.macs > 8 * head
        assert memory == 4 * cost.activations
        assert time_forward({"a": model}, example, 2, "float32", repeats=2)["a"].batch == 2
        batches = [next(iter(data.train_batches(size))) for size in (2, 4)]
        small, large = (training_peak(model, batch, data.loss_fn, "float32") for batch in batches)
        assert 1.3 * small < large < 3 * small
