"""CutMix against slow loops and sums by hand; what is drawn, who draws it, what it is learned with, what is refused."""

import copy
import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from small_detectors import boxes
from torch import nn

from ifso.cli.main import _parser, main
from ifso.cli.train import gather, settings_of
from ifso.data import open_data
from ifso.data.base import ImageData
from ifso.data.batches import Augmentation, Images, Shard, TrainBatches, generator
from ifso.errors import RunError, TrainingError
from ifso.models import create_model
from ifso.tasks.classification import classification, cross_entropy
from ifso.training.checkpoint import check_same_settings
from ifso.training.distillation import distillation
from ifso.training.objective import MixedBatches, batches_and_loss, pasted, rectangles
from ifso.training.settings import RECIPES, TrainSettings, training_recipe
from ifso.training.steps import TrainStep, can_capture
from ifso.training.trainer import Trainer, TrainerHooks, fit, fit_side_by_side

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZE = (6, 9)
MOVED = Augmentation(shift=1, mirror=True)
DATA = open_data("digits")
TAUGHT = {"lr": 0.05, "batch": 200, "distill": 0.7, "temperature": 2.0, "cutmix": 0.5}


def held(count=23, size=5, augmentation=MOVED, drop_last=False, shard=None, seed=3):
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, *SIZE), generator=random, dtype=torch.uint8)
    mean, deviation = torch.full((3, 1, 1), 100.0), torch.full((3, 1, 1), 50.0)
    return TrainBatches(
        Images(pixels, torch.arange(count), mean, deviation), batch_size=size, augmentation=augmentation,
        drop_last=drop_last, seed=seed, shard=shard or Shard(),
    )  # fmt: skip


def mixed_slowly(images, corners):
    """Pixel by pixel, from the image before, and how much of each is left."""
    found, left = images.clone(), []
    for number, (top, left_, bottom, right) in enumerate(corners.tolist()):
        pasted_in = 0
        for row in range(top, bottom):
            for column in range(left_, right):
                found[number, :, row, column] = images[(number - 1) % len(images), :, row, column]
                pasted_in += 1
        left.append(1 - pasted_in / (images.shape[2] * images.shape[3]))
    return found, torch.tensor(left)


class Seeing(nn.Sequential):
    """A linear classifier that remembers the pixels it saw last, and how it was asked."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))

    def forward(self, x):
        y = super().forward(x)
        self.seen, self.answer, self.how = x, y, (self.training, y.requires_grad, y.dtype)
        return y


class TestRectangles:
    def test_lie_within_the_image_and_have_the_area_that_yun_et_al_give_them(self):
        corners = rectangles(20_000, (32, 48), 1.0, torch.Generator().manual_seed(1))
        top, left, bottom, right = corners.unbind(1)
        for first, last, side in ((top, bottom, 32), (left, right, 48)):
            assert (first >= 0).all()
            assert (first <= last).all()
            assert (last <= side).all()
            assert first.min() == 0
            assert last.max() == side
        area = ((bottom - top) * (right - left)) / (32 * 48)
        assert float(area.mean()) == pytest.approx(expected_area(), abs=0.01)
        inner = (top > 0) & (bottom < 32) & (left > 0) & (right < 48)
        height, width = (bottom - top)[inner] / 32, (right - left)[inner] / 48
        assert inner.sum() > 3000
        assert float((height - width).abs().max()) <= 0.5 / 32 + 0.5 / 48

    @pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
    def test_the_share_of_images(self, share):
        corners = rectangles(20_000, (224, 224), share, torch.Generator().manual_seed(2))
        full = ((corners[:, 2:] - corners[:, :2]).prod(1) > 0).float().mean()
        assert float(full) == pytest.approx(share, abs=0.012)

    def test_another_share_leaves_the_others_where_they_were(self):
        all_, half = (rectangles(500, (32, 32), share, torch.Generator().manual_seed(3)) for share in (1.0, 0.5))
        assert all(torch.equal(row, wanted) or not row.any() for row, wanted in zip(half, all_, strict=True))


def expected_area():
    """Of a square with side √u, centred anywhere in the unit square and cut off at its border: the mean over u.

    Along one axis the part of length s that lies within is s − s²/4 in the mean.
    """
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    side = u.sqrt()
    return float(((side - side**2 / 4) ** 2).mean())


class TestBatches:
    @pytest.mark.parametrize("augmentation", [None, MOVED])
    def test_pixels_labels_and_shares_are_those_of_a_slow_loop(self, augmentation):
        plain, mixed = held(augmentation=augmentation), MixedBatches(held(augmentation=augmentation), 0.7)
        _, moves = mixed.plan(0)
        corners, seen = moves[:, -4:], 0
        assert len(mixed) == len(plain) == 5
        for number, ((images, labels), batch) in enumerate(zip(plain, mixed, strict=True)):
            own = corners[number * 5 : (number + 1) * 5]
            wanted, left = mixed_slowly(images, own)
            assert torch.equal(batch[0], wanted)
            assert torch.equal(batch[1], labels)
            assert batch[2].tolist() == [*labels[-1:].tolist(), *labels[:-1].tolist()]
            torch.testing.assert_close(batch[3], left, rtol=1e-6, atol=1e-7)
            seen += int((left < 1).sum())
        assert number == 4
        assert len(images) == 3
        assert 8 < seen < 23

    def test_an_epoch_depends_on_seed_and_number_alone(self):
        first, again, other = MixedBatches(held(), 0.5), MixedBatches(held(), 0.5), MixedBatches(held(seed=4), 0.5)
        again.set_epoch(1)
        epochs = [[*first], [*first]]
        assert all(map(same_batch, epochs[1], again))
        assert torch.equal(first.plan(7)[1], again.plan(7)[1])
        for plan in (first.plan(8), other.plan(7)):
            assert not torch.equal(plan[1][:, -4:], first.plan(7)[1][:, -4:])

    def test_order_and_moves_are_those_of_plain_batches(self):
        order, moves = MixedBatches(held(), 0.5).plan(2)
        wanted, plain = held().plan(2)
        assert torch.equal(order, wanted)
        assert torch.equal(moves[:, :3], plain)
        assert torch.equal(moves[:, 3:], rectangles(23, SIZE, 0.5, generator(3, "cutmix/2")))

    @pytest.mark.parametrize("drop_last", [True, False])
    def test_ranks_together_have_the_plan_of_one_process(self, drop_last):
        alone = MixedBatches(held(size=6, drop_last=drop_last), 0.6).plan(1)
        parts = [MixedBatches(held(size=3, drop_last=drop_last, shard=Shard(rank, 2)), 0.6) for rank in (0, 1)]
        plans = [part.plan(1) for part in parts]
        places = torch.cat([part.base._indices for part in parts])
        for number in (0, 1):
            joint = torch.cat([plan[number] for plan in plans])
            assert torch.equal(joint, alone[number][places])
        assert len(joint) == (18 if drop_last else 22)
        for part, plan in zip(parts, plans, strict=True):
            part.set_epoch(1)
            images, _, others, _ = next(iter(part))
            assert torch.equal(others, part.base.images.labels[plan[0][:3]].roll(1))
            assert torch.equal(images, pasted(part.base.make(plan[0][:3], plan[1][:3, :3])[0], plan[1][:3, 3:]))

    def test_a_batch_of_one_image_is_mixed_with_itself(self):
        for (images, labels), batch in zip(held(3, 1), MixedBatches(held(3, 1), 1.0), strict=True):
            assert torch.equal(batch[0], images)
            assert torch.equal(batch[2], labels)

    def test_a_batch_is_made_and_learned_from_without_a_look_at_any_number(self):
        """Tensors on ``meta`` have none, so what would wait for a GPU fails on them."""
        mixed, (order, moves) = MixedBatches(held(), 0.5), MixedBatches(held(), 0.5).plan(0)
        mixed.base.images = mixed.base.images.to("meta")
        images, *labels = mixed.make(order[:5].to("meta"), moves[:5].to("meta"))
        assert images.shape == (5, 3, *SIZE)
        assert [(each.shape, each.dtype) for each in labels] == [
            ((5,), dtype) for dtype in (torch.int64, torch.int64, torch.float32)
        ]
        assert classification(0.1, mixed=True)(nn.Flatten(), (images, *labels)).shape == ()
        with pytest.raises((RuntimeError, NotImplementedError)):
            pasted(images, moves[:5].to("meta")[labels[0] > 2, -4:])


def same_batch(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


class TestLoss:
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_of_two_labels_by_hand(self, smoothing):
        logits, labels, others, share = answers()
        loss_fn = classification(smoothing, mixed=True)
        found = loss_fn(nn.Identity(), (logits, labels, others, share))
        torch.testing.assert_close(found, hard(logits, labels, others, share, smoothing), rtol=1e-12, atol=1e-12)

    def test_with_a_teacher_by_hand(self):
        logits, labels, others, share = answers()
        teacher = nn.Linear(4, 4).double()
        loss_fn = distillation(teacher, temperature=3.0, weight=0.6, label_smoothing=0.2, mixed=True)
        found = loss_fn(nn.Identity(), (logits, labels, others, share))
        p, q = ((z / 3).softmax(1) for z in (teacher(logits), logits))
        soft = (p * (p / q).log()).sum(1).mean()
        wanted = 0.4 * hard(logits, labels, others, share, 0.2) + 0.6 * 9 * soft
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)

    def test_nothing_is_new_without(self):
        assert classification() is cross_entropy
        logits, labels, others, share = answers()
        for loss_fn in (classification(0.1), cross_entropy):
            with pytest.raises(ValueError, match="too many values"):
                loss_fn(nn.Identity(), (logits, labels, others, share))
        taught = distillation(nn.Linear(4, 4).double(), weight=0.0)(nn.Identity(), (logits, labels, others, share))
        assert torch.equal(taught, F.cross_entropy(logits, labels))


def answers():
    random = torch.Generator().manual_seed(5)
    logits = torch.randn(5, 4, generator=random, dtype=torch.float64)
    labels, others = torch.randint(4, (2, 5), generator=random)
    return logits, labels, others, torch.tensor([1.0, 0.0, 0.25, 0.5, 0.9], dtype=torch.float64)


def hard(logits, labels, others, share, smoothing):
    total = 0.0
    for z, label, other, s in zip(logits, labels, others, share, strict=True):
        surprise = -(z.exp() / z.exp().sum()).log()
        both = [(1 - smoothing) * surprise[each] + smoothing * surprise.mean() for each in (label, other)]
        total += s * both[0] + (1 - s) * both[1]
    return total / len(logits)


class TestBatchesAndLoss:
    def test_without_it_all_is_as_before(self):
        batches, loss_fn = batches_and_loss(DATA, TrainSettings())
        assert type(batches) is TrainBatches
        assert loss_fn is cross_entropy
        batches, _ = batches_and_loss(DATA, TrainSettings(distill=0.5, epochs=3), Seeing())
        assert type(batches) is TrainBatches

    def test_mixed_images_and_two_labels(self):
        batches, loss_fn = batches_and_loss(DATA, TrainSettings(batch=50, cutmix=0.5, label_smoothing=0.1))
        assert isinstance(batches, MixedBatches)
        model, batch = Seeing().eval(), next(iter(batches))
        wanted = hard(*(tensor.detach().double() if tensor.is_floating_point() else tensor
                        for tensor in (model(batch[0]), *batch[1:])), 0.1)  # fmt: skip
        torch.testing.assert_close(loss_fn(model, batch).double(), wanted, rtol=1e-6, atol=1e-6)

    def test_a_teacher_is_asked_about_the_mixed_pixels_however_long_the_run(self, monkeypatch):
        monkeypatch.setattr("ifso.training.objective.cache_pays_off", lambda *_: True)
        teacher, model, tables = Seeing(1), Seeing(2), {}
        batches, loss_fn = batches_and_loss(DATA, TrainSettings(**TAUGHT, epochs=1000), teacher, caches=tables)
        assert isinstance(batches, MixedBatches)
        assert not tables
        batch, model = next(iter(batches)), model.eval()
        wanted = distillation(teacher, temperature=2.0, weight=0.7, mixed=True)(model, batch)
        assert torch.equal(loss_fn(model, batch), wanted)
        assert teacher.seen is model.seen
        assert not torch.equal(teacher.seen, next(iter(DATA.train_batches(200)))[0])

    @pytest.mark.parametrize("precision", ["float32", "bf16"])
    def test_a_teacher_is_asked_in_the_precision_of_the_network(self, precision):
        teacher, model = Seeing(1), Seeing(2).train()
        settings = TrainSettings(**TAUGHT, precision=precision)
        batches, loss_fn = batches_and_loss(DATA, settings, teacher)
        TrainStep(model, settings, loss_fn)(next(iter(batches)))
        assert teacher.how == (False, False, model.answer.dtype)
        assert model.answer.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
        assert teacher.training

    def test_micro_batches_are_parts_of_the_mixed_batch(self):
        batches, loss_fn = batches_and_loss(DATA, TrainSettings(batch=200, cutmix=1.0))
        batch, totals = next(iter(batches)), []
        for parts in (1, 4):
            train_step = TrainStep(Seeing().eval(), TrainSettings(batch=200, accumulate=parts, cutmix=1.0), loss_fn)
            train_step(batch)
            totals.append(float(train_step.total))
        assert totals[0] == pytest.approx(totals[1], rel=1e-6)

    def test_what_cannot_be_mixed_is_refused_in_one_line(self):
        parts = {field.name: getattr(DATA, field.name) for field in dataclasses.fields(ImageData)}
        settings = TrainSettings(batch=4, cutmix=0.5)
        for data, message in (
            (boxes(), "has boxes; cutmix is for classifiers only"),
            (OwnLoss(**parts), "digits has a loss of its own; cutmix is for classifiers only"),
            (
                FromFiles(**parts),
                "digits is neither held in memory nor in image files; cutmix and mixup need that",
            ),
        ):
            with pytest.raises(TrainingError, match=message) as caught:
                batches_and_loss(data, settings)
            assert "\n" not in str(caught.value)


class OwnLoss(ImageData):
    @staticmethod
    def loss_fn(model, batch):
        return model(batch[0]).square().mean()


class FromFiles(ImageData):
    def train_batches(self, *args, **options):
        return [*super().train_batches(*args, **options)]


class Stopped(Exception):
    """Somebody pressed a key."""


def test_a_run_with_a_teacher_learns_and_resumes_to_the_same_bits(tmp_path):
    settings = TrainSettings(**TAUGHT, epochs=4)
    teacher, start = Seeing(1), Seeing(2)
    batches, loss_fn = batches_and_loss(DATA, settings, teacher)
    whole = copy.deepcopy(start)
    wanted = fit(whole, batches, settings, loss_fn=loss_fn)
    assert wanted[-1].loss < wanted[0].loss

    def stop(epoch):
        if epoch.number == 2:
            raise Stopped

    batches, loss_fn = batches_and_loss(DATA, settings, teacher)
    with pytest.raises(Stopped):
        fit(copy.deepcopy(start), batches, settings, loss_fn=loss_fn,
            hooks=TrainerHooks(on_epoch=stop, folder=tmp_path, save_every=0.0))  # fmt: skip
    model, (batches, loss_fn) = Seeing(3), batches_and_loss(DATA, settings, teacher)
    found = fit(model, batches, settings, loss_fn=loss_fn, hooks=TrainerHooks(folder=tmp_path))
    assert [epoch.loss for epoch in found] == [epoch.loss for epoch in wanted]
    assert torch.equal(model[2].weight, whole[2].weight)
    other, hooks = dataclasses.replace(settings, cutmix=0.0), TrainerHooks(folder=tmp_path)
    with pytest.raises(RunError, match=r"has other settings: cutmix is not set and was 0\.5"):
        fit(Seeing(3), DATA.train_batches(200), other, loss_fn=loss_fn, hooks=hooks)


def test_batches_that_are_not_mixed_are_not_passed_over_in_silence():
    settings = TrainSettings(epochs=1, batch=200, cutmix=0.5)
    for loss_fn in (None, cross_entropy):
        with pytest.raises(TrainingError, match=r"cutmix=0\.5 needs MixedBatches"):
            fit(Seeing(), DATA.train_batches(200), settings, loss_fn=loss_fn)
    (batches, loss_fn), models = batches_and_loss(DATA, settings), [Seeing(), Seeing()]
    found = [
        fit(model, batches, settings, loss_fn=each)[0].loss for model, each in zip(models, (None, loss_fn), strict=True)
    ]
    assert found[0] == found[1]


class TestSettings:
    def test_files_from_before_are_those_of_today(self):
        old = json.loads(json.dumps(TrainSettings().as_dict()))
        assert not {"cutmix", "warm_up_steps"} & old.keys()
        check_same_settings(TrainSettings(cutmix=0), old, "runs/x")
        assert TrainSettings(**old) == TrainSettings()
        assert TrainSettings(cutmix=1).as_dict()["cutmix"] == 1
        with pytest.raises(RunError, match=r"cutmix is 0\.5 and was"):
            check_same_settings(TrainSettings(cutmix=0.5), old, "runs/x")

    def test_the_patient_recipe(self):
        patient = RECIPES["patient"]
        assert (patient.epochs, patient.distill, patient.temperature, patient.cutmix) == (180, 0.9, 4.0, 0.5)
        changed = {name: getattr(patient, name) for name in ("epochs", "weight_decay", "temperature", "cutmix")}
        assert patient == training_recipe("ours", **changed)

    @pytest.mark.parametrize("command", ["train --out", "finetune"])
    def test_the_option_reaches_them(self, command, tmp_path):
        for given, wanted in (([], 0.0), (["--cutmix", "0.3"], 0.3), (["--recipe", "patient"], 0.5)):
            args = _parser().parse_args([*command.split(), str(tmp_path / "x"), *given])
            assert settings_of(gather(args, tmp_path / "x", {}, "ifso")).cutmix == wanted

    def test_a_training_by_command(self, tmp_path, capsys):
        (tmp_path / "net.py").write_text(
            "from torch import nn\nnet = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
        )
        command = ["train", "--model", f"{tmp_path / 'net.py'}:net", "--data", "digits", "--epochs", "1", "--json"]
        assert main([*command, "--out", str(tmp_path / "a"), "--cutmix", "0.5"]) == 0
        assert json.loads((tmp_path / "a" / "config.json").read_text())["about"]["arguments"]["cutmix"] == 0.5
        capsys.readouterr()
        assert main([*command, "--out", str(tmp_path / "b"), "--cutmix", "1.5"]) == 2
        assert "cutmix must be a share of the images from 0 to 1, got 1.5" in capsys.readouterr().err
        assert not (tmp_path / "b").exists()


# ----------------------------------------------------------------------------------------------------- on a GPU


class Walked:
    """Batches that can only be walked through, so that no step of them is captured."""

    def __init__(self, batches):
        self._batches, self.set_epoch = batches, batches.set_epoch

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        return iter(self._batches)


@gpu
@pytest.mark.parametrize("distill", [0.0, 0.7])
def test_captured_steps_are_plain_steps(distill):
    """In float64, where the order of sums hardly matters."""
    data = open_data("digits", device="cuda")
    settings = TrainSettings(**{**TAUGHT, "distill": distill}, epochs=3, schedule="one-cycle", accumulate=2, ema=0.9)
    torch.manual_seed(0)
    teacher, start = (create_model("ifso:resnet8-digits").double().cuda() for _ in range(2))
    batches, loss_fn = batches_and_loss(data, settings, teacher)

    def double(model, batch):
        return loss_fn(model, (batch[0].double(), *batch[1:]))

    ways = batches, Walked(MixedBatches(data.train_batches(200), settings.cutmix))
    assert [can_capture(TrainStep(start, settings, double), each) for each in ways] == [True, False]
    lanes = [Trainer(copy.deepcopy(start), each, settings, loss_fn=double) for each in ways]
    for lane in lanes:
        assert fit_side_by_side([lane]) == [None]
        assert lane.notes == []
    captured, plain = lanes
    assert [epoch.loss for epoch in captured.done] == pytest.approx([epoch.loss for epoch in plain.done], rel=1e-5)
    for key, wanted in plain.model.state_dict().items():
        torch.testing.assert_close(captured.model.state_dict()[key], wanted, rtol=1e-6, atol=1e-7)


@gpu
def test_a_captured_step_with_a_teacher_in_bfloat16_takes_no_more_memory_from_epoch_to_epoch():
    data = open_data("digits", device="cuda")
    settings = TrainSettings(**TAUGHT, epochs=4, precision="bf16", channels_last=True)
    torch.manual_seed(0)
    teacher, model = (create_model("ifso:resnet8-digits").cuda() for _ in range(2))
    teacher.to(memory_format=torch.channels_last)
    batches, loss_fn = batches_and_loss(data, settings, teacher)
    statistics = teacher.bn1.running_mean.clone()
    taken = []
    lane = Trainer(model, batches, settings, loss_fn=loss_fn,
                hooks=TrainerHooks(on_epoch=lambda _: taken.append(torch.cuda.memory_allocated())))  # fmt: skip
    assert fit_side_by_side([lane]) == [None]
    assert lane.notes == []
    assert len(set(taken[1:])) == 1
    assert torch.equal(teacher.bn1.running_mean, statistics)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert lane.done[-1].loss < lane.done[0].loss


class TestMixup:
    def test_each_image_is_a_sum_of_two_and_so_are_its_labels(self):
        batches, _ = batches_and_loss(DATA, TrainSettings(batch=100, mixup=0.5))
        plain = DATA.train_batches(100)
        for (images, labels, others, shares), (own, own_labels) in zip(batches, plain, strict=True):
            weight = shares.view(-1, 1, 1, 1)
            assert torch.allclose(images, weight * own + (1 - weight) * own.roll(1, 0), atol=1e-5)
            assert torch.equal(labels, own_labels)
            assert torch.equal(others, own_labels.roll(1))
            assert 25 < (shares < 1).sum() < 75

    def test_those_that_are_pasted_into_are_not_blended(self):
        both = next(iter(batches_and_loss(DATA, TrainSettings(batch=200, cutmix=0.5, mixup=1.0))[0]))
        pasted_in = next(iter(batches_and_loss(DATA, TrainSettings(batch=200, cutmix=0.5))[0]))
        untouched = pasted_in[3] == 1
        assert torch.equal(both[0][~untouched], pasted_in[0][~untouched])
        assert torch.equal(both[3][~untouched], pasted_in[3][~untouched])
        assert (both[3][untouched] < 1).float().mean() > 0.99

    @pytest.mark.parametrize("options", [{"cutmix": 1.0}, {"mixup": 1.0}, {"cutmix": 0.5, "mixup": 0.5}])
    def test_images_in_files_are_mixed_the_same_way_in_every_process_that_sees_them_again(self, options, tmp_path):
        pytest.importorskip("torchvision")
        from PIL import Image

        for part, count in (("train", 6), ("val", 2)):
            for label in ("a", "b"):
                (tmp_path / part / label).mkdir(parents=True)
                for number in range(count):
                    colour = torch.randint(256, (40, 40, 3), dtype=torch.uint8).numpy()
                    Image.fromarray(colour).save(tmp_path / part / label / f"{number}.png")
        settings = TrainSettings(batch=4, **options)
        seen = []
        for _ in range(2):
            batches, loss_fn = batches_and_loss(open_data(f"folder:{tmp_path},size=32", workers=0), settings)
            seen.append([list(batches), list(batches)])
        again, first = seen
        assert all(map(torch.equal, again[0][0], first[0][0]))
        assert not torch.equal(again[0][0][3], again[1][0][3])
        _, labels, others, shares = again[0][0]
        assert torch.equal(others, labels.roll(1))
        assert (shares < 1).any()
        model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
        assert torch.isfinite(loss_fn(model, again[0][0]))
