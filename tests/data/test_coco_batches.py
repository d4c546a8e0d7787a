"""Images with boxes: what is in a batch, what an epoch depends on, where the files may lie."""

import coco_folders
import numpy as np
import pytest
import torch
from coco_folders import SIZES, pixels_of, write_folder, write_images, write_json

from ifso.data import open_data
from ifso.data.coco_batches import BoxLoading
from ifso.data.generated import generated_boxes
from ifso.errors import DataError
from ifso.tasks.detection import detection_loss

pytest.importorskip("torchvision")
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")

EQUAL = ((36, 50),) * 6


@pytest.fixture
def root(tmp_path):
    return write_folder(tmp_path)


def opened(root, **options):
    return open_data(f"coco:{root}", **{"workers": 0, **options})


def flat(batches):
    """All (image, target) pairs."""
    return [pair for images, targets in batches for pair in zip(images, targets, strict=True)]


def same(first, second):
    pairs = list(zip(flat(first), flat(second), strict=True))
    assert pairs
    return all(
        torch.equal(x, u) and y.keys() == v.keys() and all(torch.equal(y[key], v[key]) for key in y)
        for (x, y), (u, v) in pairs
    )


def ids(batches):
    return [int(target["image_id"]) for _, target in flat(batches)]


class TestContents:
    def test_a_test_batch_is_what_the_files_say(self, root):
        data = opened(root)
        assert (data.task, data.num_classes, data.categories) == ("detection", 3, ("cat", "dog"))
        assert (len(data.train), len(data.validation), len(data.test), data.notes) == (6, 6, 6, ())
        found = flat(data.test_batches(4))
        assert len(data.test_batches(4)) == 2
        for k, (image, target) in enumerate(found):
            expected = pixels_of("test", k, *SIZES[k]).transpose(2, 0, 1).astype(np.float32) / 255
            assert image.dtype == torch.float32
            assert np.allclose(image.numpy(), expected, atol=1e-7)
            assert set(target) == {"boxes", "labels", "image_id"}
            assert (target["boxes"].dtype, target["labels"].dtype) == (torch.float32, torch.int64)
            assert target["image_id"].shape == ()
        boxes = [target["boxes"].tolist() for _, target in found]
        assert boxes[0] == [[2, 3, 12, 15], [20.5, 10, 40, 30]]
        assert boxes[1] == boxes[4] == []
        assert found[1][1]["boxes"].shape == (0, 4)
        assert boxes[2] == [[0, 0, 50, 24]]
        assert [target["labels"].tolist() for _, target in found] == [[1, 2], [], [2], [1], [], [2]]
        assert ids(data.test_batches()) == [11, 12, 13, 14, 15, 16]

    def test_the_truth_has_crowds_and_the_areas_of_the_file(self, root):
        truth = opened(root).test_batches().truth
        assert truth.crowd.tolist() == [False, False, True, False, False, False]
        assert truth.areas.tolist() == [120, 390, 600, 321.5, 12, 128]
        assert truth.categories == {1: "cat", 2: "dog"}

    def test_what_a_detector_is_tried_with(self, root):
        data = opened(root)
        ((image,),) = data.example_inputs()
        assert image.shape == (3, 30, 40)
        images, targets = data.first_batch()
        assert [int(target["image_id"]) for target in targets] == [11, 12]
        assert len(images) == 2
        assert data.input_shape is None

    def test_equal_sizes_are_told(self, tmp_path):
        data = opened(write_folder(tmp_path, sizes=EQUAL))
        assert data.input_shape == (3, 36, 50)
        assert opened(tmp_path, size=18).input_shape == (3, 18, 25)

    def test_labels_may_be_the_ids(self, root):
        data = opened(root, labels="ids")
        assert (data.num_classes, data.categories) == (8, ("", "", "cat", "", "", "", "dog"))
        assert next(target["labels"].tolist() for _, target in flat(data.test_batches())) == [3, 7]
        assert data.test.annotations.categories == {3: "cat", 7: "dog"}

    def test_images_without_boxes_can_be_left_out_of_training(self, root):
        data = opened(root, keep_empty=False)
        assert sorted(ids(data.train_batches(1))) == [11, 13, 14, 16]
        assert len(data.test) == len(data.validation) == 6


class TestResizing:
    def test_boxes_go_with_the_pixels(self, root):
        plain, smaller = opened(root), opened(root, size=(15, 20))
        assert smaller.train.sizes == [(15, 20), (15, 20), (10, 20), (19, 15), (15, 20), (15, 20)]
        for (x, y), (u, v), (height, width) in zip(
            flat(plain.test_batches()), flat(smaller.test_batches()), smaller.test.sizes, strict=True
        ):
            assert u.shape == (3, height, width)
            scale = torch.tensor([width / x.shape[2], height / x.shape[1]]).repeat(2)
            assert torch.allclose(v["boxes"], y["boxes"] * scale)
            assert torch.equal(v["labels"], y["labels"])
            assert float((u.mean() - x.mean()).abs()) < 0.02
        assert smaller.test_batches().truth.sizes.tolist() == [list(size) for size in SIZES]

    def test_as_pillow_resizes(self, root):
        from PIL import Image

        found, _ = flat(opened(root, size=15).test_batches())[0]
        image = Image.fromarray(pixels_of("test", 0, 30, 40)).resize((20, 15), Image.Resampling.BILINEAR)
        assert np.abs(found.numpy() * 255 - np.asarray(image).transpose(2, 0, 1)).max() < 1.6

    @pytest.mark.parametrize("size", [0, -3, (20, 10), (1, 2, 3), "480", 2.5, True, ()])
    def test_sizes_that_are_none(self, root, size):
        with pytest.raises(DataError, match="size must be the pixels of the shorter side"):
            opened(root, size=size)


class TestEpochs:
    @pytest.mark.parametrize("sizes", [SIZES, EQUAL])
    @pytest.mark.parametrize("size", [None, (12, 18)])
    def test_held_or_decoded_makes_no_difference(self, tmp_path, sizes, size):
        root = write_folder(tmp_path, sizes=sizes)
        held, decoded = (opened(root, hold=hold, size=size, seed=3) for hold in (True, False))
        assert held.train.pixels is not None
        assert decoded.train.pixels is None
        first, second = held.train_batches(2), decoded.train_batches(2)
        assert len(first) == len(second) == 3
        for _ in range(2):
            assert same(first, second)
        assert same(held.test_batches(4), decoded.test_batches(4))
        assert same([held.first_batch()], [decoded.first_batch()])

    @pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
    def test_pixels_are_divided_and_not_multiplied(self, device):
        values = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
        (found,), _ = BoxLoading(torch.device(device), 0).to_device([values], [])
        exact = np.arange(256, dtype=np.float32) / np.float32(255)
        assert np.array_equal(found[0, 0].cpu().numpy(), exact)
        assert not np.array_equal(np.arange(256, dtype=np.float32) * np.float32(1 / 255), exact)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    @pytest.mark.parametrize("hold", [True, False])
    @pytest.mark.parametrize("sizes", [SIZES, EQUAL])
    def test_on_a_gpu_they_are_the_same(self, tmp_path, sizes, hold):
        root = write_folder(tmp_path, sizes=sizes)
        here, there = opened(root, seed=3), opened(root, seed=3, device="cuda", hold=hold)
        for first, second in (
            (here.train_batches(2), there.train_batches(2)),
            (here.test_batches(), there.test_batches()),
        ):
            found = list(second)
            assert all(image.is_cuda and target["boxes"].is_cuda for image, target in flat(found))
            assert same(
                first, [([x.cpu() for x in xs], [{k: v.cpu() for k, v in y.items()} for y in ys]) for xs, ys in found]
            )

    def test_workers_change_nothing(self, root):
        alone, workers = (opened(root, hold=False, workers=count).train_batches(2) for count in (0, 2))
        assert same(alone, workers)

    def test_small_sets_are_held_and_large_ones_not(self, root, monkeypatch):
        assert opened(root).train.pixels is not None
        bytes_of_all = 3 * sum(3 * height * width for height, width in SIZES)
        monkeypatch.setattr("ifso.data.coco.HELD_BYTES", bytes_of_all)
        assert opened(root).train.pixels is not None
        monkeypatch.setattr("ifso.data.coco.HELD_BYTES", bytes_of_all - 1)
        assert opened(root).train.pixels is None

    def test_mirrored_in_half_of_all_cases_with_the_boxes(self, root):
        data = opened(root, seed=1)
        plain = {int(y["image_id"]): (x, y) for x, y in flat(data.train_batches(1, augment=False))}
        mirrored = []
        batches = data.train_batches(3)
        for _ in range(20):
            for x, y in flat(batches):
                u, v = plain[int(y["image_id"])]
                assert torch.equal(y["labels"], v["labels"])
                if torch.equal(x, u):
                    assert torch.equal(y["boxes"], v["boxes"])
                    continue
                mirrored.append(int(y["image_id"]))
                assert torch.equal(x, u.flip(2))
                width = x.shape[2]
                expected = [[width - c, b, width - a, d] for a, b, c, d in v["boxes"].tolist()]
                assert y["boxes"].tolist() == expected
        assert 40 <= len(mirrored) <= 80
        assert all(0 < mirrored.count(image) < 20 for image in plain)

    def test_epochs_depend_on_the_seed_alone(self, root):
        first, again, other = (opened(root, seed=seed).train_batches(2) for seed in (5, 5, 6))
        epochs = [ids(first) for _ in range(3)]
        assert epochs == [ids(again) for _ in range(3)]
        assert epochs != [ids(other) for _ in range(3)]
        assert len({tuple(epoch) for epoch in epochs}) > 1
        assert all(sorted(epoch) == [11, 12, 13, 14, 15, 16] for epoch in epochs)
        again.set_epoch(1)
        assert ids(again) == epochs[1]

    @pytest.mark.parametrize("hold", [True, False])
    def test_ranks_share_every_joint_batch(self, root, hold):
        whole = opened(root, seed=2, hold=hold).train_batches(4, drop_last=False)
        parts = [opened(root, seed=2, hold=hold, rank=rank, ranks=2) for rank in (0, 1)]
        halves = [flat(part.train_batches(2, drop_last=False)) for part in parts]
        joint = [*halves[0][:2], *halves[1][:2], *halves[0][2:], *halves[1][2:]]
        assert [int(y["image_id"]) for _, y in joint] == ids(whole)
        whole.set_epoch(0)
        assert all(torch.equal(x, u) for (x, _), (u, _) in zip(flat(whole), joint, strict=True))
        assert [ids(part.test_batches()) for part in parts] == [[11, 13, 15], [12, 14, 16]]


class TestSplits:
    def test_validation_is_the_file_or_cut_from_training(self, root):
        assert opened(root).validation.source == root / "instances_val.json"
        data = opened(root, validation=2, seed=4)
        assert (len(data.train), len(data.validation)) == (4, 2)
        both = ids(data.validation_batches()) + ids(data.train_batches(1))
        assert sorted(both) == [11, 12, 13, 14, 15, 16]
        assert data.validation.source == root / "instances_train.json"
        assert ids(opened(root, validation=2, seed=4).validation_batches()) == ids(data.validation_batches())

    def test_without_a_test_file_it_is_the_validation_file(self, tmp_path):
        data = opened(write_folder(tmp_path, splits=("train", "val")))
        assert data.test.source == tmp_path / "instances_val.json"
        (note,) = data.notes
        assert note.endswith(f"has no instances_test.json: its test set is {tmp_path / 'instances_val.json'}")
        with pytest.raises(DataError, match="without a validation part"):
            data.validation_batches()

    def test_cocos_own_layout(self, tmp_path):
        for split in ("train", "val"):
            write_images(tmp_path / f"{split}2017", split)
            write_json(tmp_path / "annotations" / f"instances_{split}2017.json", coco_folders.document(split))
        write_json(tmp_path / "annotations" / "captions_val2017.json", {})
        data = opened(tmp_path)
        assert (data.train.files.folder, data.test.files.folder) == (tmp_path / "train2017", tmp_path / "val2017")
        assert len(flat(data.test_batches())) == 6
        write_json(tmp_path / "annotations" / "instances_val2014.json", coco_folders.document("val"))
        with pytest.raises(DataError, match="are both there; leave one for 'val'"):
            opened(tmp_path)

    def test_names_may_have_folders(self, tmp_path):
        write_folder(tmp_path, splits=("train", "test"))
        said = coco_folders.document("train")
        (tmp_path / "images" / "inside").mkdir()
        for entry in said["images"]:
            name = entry["file_name"]
            (tmp_path / "images" / name).rename(tmp_path / "images" / "inside" / name)
            entry["file_name"] = f"inside/{name}"
        write_json(tmp_path / "instances_train.json", said)
        assert len(opened(tmp_path).train) == 6


class TestDetectors:
    def test_a_detector_of_torchvision_learns_and_finds(self, root):
        from torchvision.models.detection import retinanet_resnet50_fpn

        data = opened(root)
        model = retinanet_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=data.num_classes, min_size=32, max_size=64
        )
        loss = detection_loss(model, next(iter(data.train_batches(3))))
        assert loss.isfinite()
        with torch.no_grad():
            (found,) = model.eval()(*data.example_inputs())
        assert set(found) == {"boxes", "scores", "labels"}


class TestGenerated:
    def test_shapes_fill_their_boxes(self):
        data = generated_boxes(train=6, test=3)
        assert (len(data.train), len(data.test), data.task) == (6, 3, "detection")
        for image, target in flat(data.train_batches(2, augment=False)):
            height, width = image.shape[1:]
            assert len(target["boxes"]) in {1, 2, 3}
            for (left, top, right, bottom), label in zip(
                target["boxes"].int().tolist(), target["labels"].tolist(), strict=True
            ):
                assert 0 <= left < right <= width
                assert 0 <= top < bottom <= height
                colour = image[label - 1, top:bottom, left:right]
                bright = (colour > 0.8) & (colour == image[:, top:bottom, left:right].amax(0))
                assert bool(bright.any(0).float().mean() > 0.9)
                assert bool(bright.any(1).float().mean() > 0.9)

    def test_always_the_same_images(self):
        first, second = generated_boxes(seed=0), generated_boxes(seed=9)
        images, again, others = map(torch.stack, (first.train.pixels, second.train.pixels, first.test.pixels))
        assert torch.equal(images, again)
        assert not torch.equal(images[:16], others)
        assert ids(first.train_batches(2)) != ids(second.train_batches(2))
