"""One clear line, with the id, for whatever is wrong with a COCO folder."""

import copy
import sys

import coco_folders
import pytest
from coco_folders import document, write_folder, write_json
from PIL import Image

from ifso.data import open_data
from ifso.errors import DataError

pytest.importorskip("torchvision")
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


@pytest.fixture
def root(tmp_path):
    return write_folder(tmp_path)


def opened(root, **options):
    return open_data(f"coco:{root}", **{"workers": 0, **options})


def refused(root, **options):
    with pytest.raises(DataError) as caught:
        opened(root, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(root, change, split="val"):
    """The folder after a change of what one of its files says."""
    said = copy.deepcopy(document(split))
    change(said)
    write_json(root / f"instances_{split}.json", said)
    return root


def entry(kind, place, **values):
    """A change of one entry; None takes a value away."""

    def change(said):
        said[kind][place].update(values)
        for key in [key for key, value in said[kind][place].items() if value is None]:
            del said[kind][place][key]

    return change


ANNOTATION = "instances_val.json: annotation 102 of image 11"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (entry("annotations", 2, bbox=[20.5, 10, 21, 20]), "annotation 102 reaches from (20.5, 10) to (41.5, 30)"),
        (entry("annotations", 2, bbox=[20.5, 10, 21, 20]), "outside image 11 of 40×30 pixels; mend the box"),
        (entry("annotations", 2, bbox=[-1.5, 10, 9, 9]), "annotation 102 reaches from (-1.5, 10)"),
        (entry("annotations", 2, bbox=[0, 31.5, 9, 9]), "outside image 11"),
        (entry("annotations", 2, bbox=[5, 5, 0, 9]), f"{ANNOTATION} has a box without area (0×9 pixels); mend"),
        (entry("annotations", 2, bbox=[5, 5, 9, -3]), f"{ANNOTATION} has a box without area (9×-3 pixels)"),
        (entry("annotations", 2, bbox=[-0.5, 5, 0.5, 9]), "without area (0×9 pixels)"),
        (entry("annotations", 2, bbox=[5, 5, 9]), f"{ANNOTATION} has the bbox [5, 5, 9]; give four numbers"),
        (entry("annotations", 2, bbox=[5, 5, 9, float("nan")]), f"{ANNOTATION} has the bbox [5, 5, 9, nan]"),
        (entry("annotations", 2, bbox=[5, 5, 9, True]), f"{ANNOTATION} has the bbox [5, 5, 9, True]"),
        (entry("annotations", 2, bbox=None), f"{ANNOTATION} has the bbox None"),
        (entry("annotations", 2, area=-4), f"{ANNOTATION} has the area -4"),
        (entry("annotations", 2, iscrowd=2), f"{ANNOTATION} has iscrowd 2; give 0 or 1"),
        (entry("annotations", 2, image_id=77), "annotation 102 has the image_id 77, which the file does not list"),
        (entry("annotations", 2, image_id="11"), "annotation 102 has the image_id '11'"),
        (entry("annotations", 2, image_id=None), "annotation 102 has the image_id None"),
        (entry("annotations", 2, category_id=4), "annotation 102 has the category_id 4, which the file does not list"),
        (entry("annotations", 2, id=100), "two annotations have the id 100"),
        (entry("annotations", 2, id=None), "the id of annotations[2] is None; give a whole number"),
        (entry("annotations", 2, id=-1), "the id of annotations[2] is -1"),
        (entry("images", 1, id=11), "two images have the id 11 ('val_0.png' and 'val_1.png')"),
        (entry("images", 1, id="b"), "the id of images[1] is 'b'"),
        (entry("images", 1, file_name=None), "image 12 has the file_name None"),
        (entry("images", 1, width=None), "image 12 has width None and height 30; give its pixels"),
        (entry("images", 1, height=0), "image 12 has width 40 and height 0"),
        (entry("images", 1, file_name="gone.png"), "the file gone.png of image 12 is not in"),
        (entry("images", 0, file_name="gone.png"), "the file gone.png of image 11 is in none of"),
        (entry("images", 1, file_name="no/gone.png"), "the file no/gone.png of image 12 is not in"),
        (entry("images", 1, width=60), "image 12 of"),
        (entry("images", 1, width=60), "has 40×30 pixels in its file, but width and height there say 60×30"),
        (entry("categories", 1, id=7), "two categories have the id 7 ('dog' and 'cat')"),
        (entry("categories", 1, name="dog"), "two categories have the name 'dog'"),
        (entry("categories", 1, name=""), "category 3 has the name ''"),
        (entry("categories", 1, id=4), "lacks the category 3 ('cat') of the training set"),
        (entry("categories", 1, name="Cat"), "calls the category 3 'Cat', but the training set 'cat'"),
        (lambda said: said["categories"].append({"id": 9, "name": "eel"}), "has the category 9 ('eel'), which the"),
        (lambda said: said.update(images=[]), "instances_val.json has no images"),
        (lambda said: said.update(categories=[]), "instances_val.json has no categories"),
        (lambda said: said.pop("annotations"), "instances_val.json has no list 'annotations' of objects"),
        (lambda said: said.update(images={"a": 1}), "has no list 'images' of objects; it is no COCO JSON"),
        (lambda said: said["annotations"].append(3), "has no list 'annotations' of objects"),
    ],
)
def test_a_file_that_says_something_wrong(root, change, words):
    assert words in refused(changed(root, change))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read as JSON"),
        ('{"images": [', "cannot be read as JSON"),
        ("\xff\x00", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "holds a list, not an object; it is no COCO JSON"),
        ("{}", "has no list 'images' of objects"),
    ],
)
def test_a_file_that_is_not_coco(root, text, words):
    write_json(root / "instances_train.json", text)
    found = refused(root)
    assert words in found
    assert found.startswith(str(root / "instances_train.json"))


class TestDegenerateBoxes:
    def test_are_dropped_with_a_count(self, root):
        def change(said):
            said["annotations"] += [
                {"id": 200 + k, "image_id": 15, "category_id": 3, "bbox": [3, 3, k, 0.001]} for k in range(3)
            ]

        changed(root, change, "train")
        assert "annotation 200 of image 15 has a box without area (0×0.001 pixels) (2 more like it)" in refused(root)
        data = opened(root, drop_degenerate=True)
        assert data.notes == (
            f"{root / 'instances_train.json'}: 3 boxes without area were left out, the first is annotation 200",
        )
        assert len(data.train.annotations.boxes) == len(coco_folders.BOXES)

    def test_a_box_outside_is_never_dropped(self, root):
        changed(root, entry("annotations", 2, bbox=[60, 60, 5, 5]))
        assert "annotation 102 reaches from (60, 60)" in refused(root, drop_degenerate=True)

    def test_what_rounding_leaves_outside_is_cut_off_for_training_alone(self, root):
        changed(root, entry("annotations", 2, bbox=[20, 10, 20.6, 20.25]), "train")
        data = opened(root)
        assert data.first_batch()[1][0]["boxes"][1].tolist() == [20, 10, 40, 30]
        assert data.train.annotations.boxes[1].tolist() == [20, 10, 40.6, 30.25]


class TestFiles:
    def test_no_folder_and_no_files(self, tmp_path):
        assert "there is no folder" in refused(tmp_path / "nowhere")
        assert "holds no instances_train.json" in refused(tmp_path)
        write_folder(tmp_path, splits=("train",))
        assert "holds neither instances_val.json nor instances_test.json" in refused(tmp_path)

    def test_missing_images_are_counted(self, root):
        for k in (2, 4):
            (root / "images" / f"test_{k}.png").unlink()
        found = refused(root)
        assert found.endswith(f"the file test_2.png of image 13 is not in {root / 'images'} (1 more like it)")

    @pytest.mark.parametrize("hold", [True, False])
    def test_an_image_that_cannot_be_read(self, root, hold):
        path = root / "images" / "train_3.png"
        path.write_bytes(b"no image")
        words = f"image 14 of {root / 'instances_train.json'}: {path} cannot be read as an image"
        if hold:
            assert refused(root).startswith(words)
            return
        batches = opened(root, hold=False).train_batches(2)
        with pytest.raises(DataError) as caught:
            list(batches)
        assert str(caught.value).startswith(words)

    def test_an_image_of_another_size_is_named_by_workers_too(self, root):
        Image.new("RGB", (33, 30)).save(root / "images" / "train_0.png")
        batches = opened(root, hold=False, workers=1).train_batches(6)
        with pytest.raises(DataError, match=r"image 11 of .* has 33×30 pixels in its file, but .* say 40×30"):
            list(batches)

    def test_no_box_to_learn_from(self, root):
        changed(root, lambda said: said.update(annotations=said["annotations"][3:4]), "train")
        assert "no image of the training set has a box to learn from" in refused(root)


class TestOptions:
    def test_unknown_ones(self, root):
        assert "has no option colour; it has size, drop_degenerate, keep_empty" in refused(root, colour=1)
        assert "has no option sise; it has size" in refused(f"{root},sise=3,drop_degenerate")
        assert "labels must be one of contiguous, ids, got labels='names'" in refused(root, labels="names")
        with pytest.raises(DataError, match="digits has no option size; only coco:PATH and folder:PATH have"):
            open_data("digits", size=8)

    def test_stand_in_the_name(self, root):
        data = opened(f"{root},size=15x18,keep_empty=no,labels=ids,hold=no")
        assert data.name == f"coco:{root},size=15x18,keep_empty=no,labels=ids,hold=no"
        assert (data.test.sizes[0], len(data.train), data.num_classes) == ((14, 18), 4, 8)
        assert data.train.pixels is None
        assert opened(f"{root},hold=no", hold=True).train.pixels is not None
        assert "hold must be yes or no, got hold='maybe'" in refused(f"{root},hold=maybe")
        assert "got size='15x'" in refused(f"{root},size=15x")
        assert "got drop_degenerate=None" in refused(root, drop_degenerate=None)

    def test_folders_may_have_commas(self, root):
        (root / "a,b").mkdir()
        assert "holds no instances_train.json" in refused(root / "a,b")

    def test_ids_that_cannot_be_labels(self, root):
        for split in ("train", "val", "test"):
            changed(root, lambda said: (entry("categories", 1, id=0)(said), said.update(annotations=[])), split)
        assert "category 0 cannot be a label" in refused(root, labels="ids")

    def test_batches_that_cannot_be_filled(self, root):
        data = opened(root)
        with pytest.raises(DataError, match="batches of 7 cannot be filled by 6 training images"):
            data.train_batches(7)
        with pytest.raises(DataError, match=r"batch size must be .* got 0"):
            data.test_batches(0)

    def test_without_torchvision(self, root, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchvision", None)
        assert 'pip install "ifso[detection]"' in refused(root)
