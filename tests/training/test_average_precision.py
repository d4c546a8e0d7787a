"""Average precision: by hand, against pycocotools, over resized images and over ranks."""

import contextlib
import io
import json
import sys

import ap_rank
import pytest
import torch
from processes import ranks_of
from torch import nn

from ifso.data.coco_batches import Annotations
from ifso.data.generated import generated_boxes
from ifso.errors import DataError, DivergedError, IfsoError
from ifso.training.average_precision import average_precision, evaluate_detector

pytest.importorskip("faster_coco_eval")

AREAS = ("map_small", "map_medium", "map_large")


def truth_of(rows, *, images=(1, 2), size=(200, 300), categories=("a", "b")):
    """Rows of image id, x1, y1, x2, y2, label and, if it is not 0, crowd."""
    rows = sorted((tuple(row) + (0,) * (7 - len(row)) for row in rows), key=lambda row: row[0])
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 7)
    counts = torch.tensor([int((table[:, 0] == image).sum()) for image in images])
    return Annotations(
        image_ids=torch.tensor(images),
        sizes=torch.tensor([size] * len(images)),
        first=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        boxes=table[:, 1:5],
        labels=table[:, 5].long(),
        areas=(table[:, 3] - table[:, 1]) * (table[:, 4] - table[:, 2]),
        crowd=table[:, 6] != 0,
        categories=dict(enumerate(categories, 1)),
    )


def measured(truth, found, images=(1, 2)):
    return average_precision(torch.tensor(found, dtype=torch.float64).reshape(-1, 7), truth, list(images))


class TestByHand:
    def test_a_false_one_between_two_right_ones_and_one_missed(self):
        truth = truth_of([(1, 0, 0, 50, 50, 1), (1, 100, 100, 150, 150, 1), (2, 0, 0, 50, 50, 1)])
        found = measured(
            truth,
            [(1, 0, 0, 50, 50, 0.9, 1), (1, 200, 0, 250, 50, 0.8, 1), (2, 0, 0, 50, 50, 0.7, 1)],
        )
        # Precision is 1 up to a recall of 1/3 (34 of 101 places), 2/3 up to 2/3 (33 places), then 0.
        expected = 100 * (34 + 33 * 2 / 3) / 101
        assert found.map == pytest.approx(expected)
        assert found.map50 == found.map75 == pytest.approx(expected)
        assert (found.map_small, found.map_medium, found.map_large) == (None, pytest.approx(expected), None)
        assert found.by_category == {"a": pytest.approx(expected), "b": None}
        assert found.images == 2

    def test_thresholds_of_the_overlap(self):
        truth = truth_of([(1, 0, 0, 100, 100, 2)])
        found = measured(truth, [(1, 0, 0, 100, 77, 0.9, 2)])
        # An overlap of 0.77 is enough for 0.5, 0.55, … 0.75: six of ten.
        assert (found.map50, found.map75) == (100.0, 100.0)
        assert found.map == pytest.approx(60.0)
        assert (found.map_medium, found.map_large) == (None, pytest.approx(60.0))

    def test_small_medium_and_large(self):
        truth = truth_of([(1, 0, 0, 31, 31, 1), (1, 50, 0, 140, 90, 1), (2, 0, 0, 150, 150, 1)])
        found = measured(truth, [(1, 0, 0, 31, 31, 0.9, 1), (2, 0, 0, 150, 150, 0.8, 1)])
        assert [getattr(found, area) for area in AREAS] == [pytest.approx(100.0), 0.0, pytest.approx(100.0)]

    def test_what_is_found_in_a_crowd_is_neither_right_nor_wrong(self):
        boxes = [(1, 0, 0, 50, 50, 1), (1, 100, 0, 300, 200, 1, 1)]
        inside, beside = [(1, 120, 20, 150, 50, 0.95, 1)], [(1, 0, 100, 50, 150, 0.95, 1)]
        right = [(1, 0, 0, 50, 50, 0.9, 1)]
        assert measured(truth_of(boxes), right + inside).map == pytest.approx(100.0)
        assert measured(truth_of(boxes), right + beside).map == pytest.approx(50.0)

    def test_nothing_found_and_nothing_to_find(self):
        assert measured(truth_of([(1, 0, 0, 50, 50, 1)]), []).map == 0.0
        assert measured(truth_of([]), [(1, 0, 0, 50, 50, 0.9, 1)]).map is None

    def test_only_the_images_that_were_seen_count(self):
        truth = truth_of([(1, 0, 0, 50, 50, 1), (2, 0, 0, 50, 50, 1)])
        right = [(1, 0, 0, 50, 50, 0.9, 1)]
        assert measured(truth, right, images=[1]).map == pytest.approx(100.0)
        assert measured(truth, right).map == pytest.approx(100 * 51 / 101)


def reference(truth, found, images):
    """The twelve numbers of pycocotools."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {**truth.as_coco(), "info": {}}
        coco.createIndex()
        results = [
            {"image_id": int(i), "bbox": [a, b, c - a, d - b], "score": score, "category_id": int(label)}
            for i, a, b, c, d, score, label in found.tolist()
        ]
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.params.imgIds = list(images)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    by_category = evaluation.eval["precision"][:, :, :, 0, -1].mean((0, 1))
    return evaluation.stats, by_category


@pytest.mark.parametrize("seed", range(3))
def test_as_pycocotools(seed):
    pytest.importorskip("pycocotools")
    random = torch.Generator().manual_seed(seed)
    images = tuple(range(10, 40))
    size = 4 + 150 * torch.rand(250, 2, generator=random) ** 2
    corner = torch.rand(250, 2, generator=random) * 120
    owner = torch.randint(10, 40, (250, 1), generator=random)
    label = torch.randint(1, 5, (250, 1), generator=random)
    crowd = (torch.rand(250, 1, generator=random) < 0.08).long()
    rows = torch.cat([owner, corner, corner + size, label, crowd], 1).double()
    truth = truth_of(rows.tolist(), images=images, size=(300, 300), categories=("a", "b", "c", "d"))
    wrong = torch.rand(250, 1, generator=random) < 0.2
    guess = torch.where(wrong, torch.randint(1, 5, (250, 1), generator=random), label)
    boxes = torch.cat([corner, corner + size], 1) + 0.08 * size.repeat(1, 2) * torch.randn(250, 4, generator=random)
    boxes[:, 2:] = torch.maximum(boxes[:, 2:], boxes[:, :2] + 1)
    score = (torch.rand(250, 1, generator=random) * 20).round() / 20
    found = torch.cat([owner, boxes, score, guess], 1).double().repeat(2, 1)
    found[250:, 1:5] += 9 * torch.randn(250, 4, generator=random).double().abs().cumsum(1)
    seen = images[:25]
    expected, by_category = reference(truth, found[torch.isin(found[:, 0], torch.tensor(seen).double())], seen)
    ours = average_precision(found, truth, seen)
    names = ("map", "map50", "map75", *AREAS)
    assert [getattr(ours, name) for name in names] == pytest.approx([100 * value for value in expected[:6]], abs=1e-9)
    assert list(ours.by_category.values()) == pytest.approx([100 * value for value in by_category], abs=1e-9)
    assert 5 < ours.map < 80


class ByColour(nn.Module):
    """Finds the generated shapes, which are redder, greener or bluer than their surroundings; one in each quarter."""

    def forward(self, images):
        return [self.found(image) for image in images]

    def found(self, image):
        height, width = image.shape[1] // 2, image.shape[2] // 2
        boxes, labels = [], []
        for top in (0, height):
            for left in (0, width):
                quarter = image[:, top : top + height, left : left + width]
                bright = (quarter > 0.78) & (quarter == quarter.amax(0))
                label = int(bright.sum((1, 2)).argmax())
                rows, columns = bright[label].nonzero(as_tuple=True)
                if len(rows) > 20:
                    boxes.append(
                        [left + columns.min(), top + rows.min(), left + columns.max() + 1, top + rows.max() + 1]
                    )
                    labels.append(label + 1)
        return {
            "boxes": torch.tensor(boxes).float().reshape(-1, 4),
            "labels": torch.tensor(labels, dtype=torch.int64),
            "scores": torch.ones(len(labels)),
        }


class TestDetectors:
    def test_generated_shapes_are_found_by_their_colour(self):
        data, model = generated_boxes(train=1, test=12), ByColour().train()
        found = evaluate_detector(model, data.test_batches(5))
        assert found.map > 99
        assert list(found.by_category) == ["square", "disc", "cross"]
        assert found.images == 12
        assert model.training

    def test_boxes_in_resized_images_are_brought_back(self):
        data = generated_boxes(train=1, test=6)
        larger = [
            ([nn.functional.interpolate(x[None], size=(192, 384))[0] for x in images], targets)
            for images, targets in data.test_batches(4)
        ]
        assert evaluate_detector(ByColour(), larger, data.test.annotations).map > 99
        assert evaluate_detector(ByColour(), larger).map < 50

    def test_targets_are_the_truth_where_there_is_no_other(self):
        data = generated_boxes(train=1, test=7)
        model, batches = ap_rank.Wobbly(data), data.test_batches(3)
        known, own = evaluate_detector(model, batches), evaluate_detector(model, list(batches))
        assert own.map == pytest.approx(known.map, abs=1e-4)
        assert list(own.by_category.values()) == pytest.approx(list(known.by_category.values()), abs=1e-4)
        assert list(own.by_category) == ["1", "2", "3"]
        crowds = [
            (images, [{**target, "iscrowd": torch.ones(len(target["labels"]))} for target in targets])
            for images, targets in batches
        ]
        assert evaluate_detector(model, crowds).map is None


class Saying(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, images):
        return self.output


def answer(box=(0.0, 0, 9, 9), label=1, score=0.5):
    return [{"boxes": torch.tensor([box]), "labels": torch.tensor([label]), "scores": torch.tensor([score])}]


class TestBadInput:
    @pytest.fixture
    def batches(self):
        return generated_boxes(train=1, test=1).test_batches(1)

    @pytest.mark.parametrize(
        ("output", "error", "words"),
        [
            (torch.zeros(1, 4), DataError, "the network gave Tensor for 1 images"),
            ([], DataError, "gave list for 1 images"),
            ([{"boxes": torch.zeros(0, 4)}], DataError, "a list of dicts with boxes, scores and labels"),
            (answer(label=4), DataError, "label 4, but the data has the labels 1 to 3"),
            (answer(label=0), DataError, "label 0"),
            (answer(score=float("nan")), DivergedError, "not finite for image 1; its weights have diverged"),
        ],
    )
    def test_outputs(self, batches, output, error, words):
        with pytest.raises(error, match=words) as caught:
            evaluate_detector(Saying(output), batches)
        assert "\n" not in str(caught.value)

    def test_batches(self, batches):
        batch = next(iter(batches))
        with pytest.raises(DataError, match="there is nothing to evaluate on"):
            evaluate_detector(Saying(answer()), [])
        with pytest.raises(DataError, match="image 1 comes twice"):
            evaluate_detector(Saying(answer()), [batch, batch])
        with pytest.raises(DataError, match=r"batches of \(images, targets\)"):
            evaluate_detector(Saying(answer()), [(torch.zeros(1, 3, 8, 8), torch.zeros(1))])
        batch[1][0]["image_id"] = torch.tensor(77)
        with pytest.raises(DataError, match="image 77 of the batches is not among the 1 images"):
            evaluate_detector(Saying(answer()), [batch], batches.truth)

    def test_labels_between_two_categories_are_left_out(self, batches):
        truth = truth_of([(1, 0, 0, 9, 9, 1)], images=(1,), size=(96, 128))
        truth.categories[2] = "b"
        truth.categories[5] = truth.categories.pop(2)
        output = [{key: torch.cat([answer()[0][key], answer(label=3)[0][key]]) for key in answer()[0]}]
        assert evaluate_detector(Saying(output), batches, truth).by_category == {"a": pytest.approx(100.0), "b": None}

    def test_without_the_evaluator(self, batches, monkeypatch):
        monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
        with pytest.raises(IfsoError, match=r'computed by faster-coco-eval.*pip install "ifso\[detection\]"$'):
            evaluate_detector(Saying(answer()), batches)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    ranks_of(ap_rank.main, ap_rank.WORLD, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ap_rank.WORLD)]


class TestRanks:
    @pytest.mark.parametrize("scenario", ap_rank.SCENARIOS[:-1])
    def test_like_one_process(self, results, scenario):
        alone = ap_rank.outcome(scenario, 0, 1)
        first, second = (result[scenario] for result in results)
        assert first == second
        assert first == alone
        assert alone["images"] == (1 if scenario == "fewer images than ranks" else 7)
        assert 5 < alone["map"] < 95

    def test_a_rank_that_fails_fails_all(self, results):
        good, bad = (result["one fails"] for result in results)
        assert bad.startswith("a detector is evaluated on batches of (images, targets)")
        assert good == "stopped, because rank 1 failed; see its own message"
