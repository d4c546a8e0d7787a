"""Data sets by name: what they hold, and one clear line for everything that can be wrong with them."""

import hashlib
import http.server
import pickle
import sys
import tarfile
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from ifso.data import open_data
from ifso.data.digits import digits
from ifso.errors import DataError


@pytest.fixture
def arrays():
    random = np.random.default_rng(0)
    return {
        "x_train": random.integers(0, 256, (40, 32, 32, 3), np.uint8),
        "y_train": random.permutation(np.arange(40) % 10),
        "x_test": random.integers(0, 256, (12, 32, 32, 3), np.uint8),
        "y_test": np.arange(12) % 10,
    }


@pytest.fixture
def save(tmp_path):
    def write(arrays, kind="cifar10"):
        np.savez(tmp_path / "data.npz", **arrays)
        return f"{kind}:{tmp_path / 'data.npz'}"

    return write


def refused(name, **options):
    with pytest.raises(DataError) as caught:
        open_data(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestDigits:
    def test_the_packaged_split_centred(self):
        data = open_data("digits")
        (x, y), packaged = next(iter(data.test_batches(355))), digits()
        assert torch.equal(x, packaged.x_test - 0.5)
        assert torch.equal(y, packaged.y_test)
        assert (data.name, data.num_classes, data.input_shape) == ("digits", 10, (1, 8, 8))
        assert data.example_inputs().shape == (1, 1, 8, 8)

    def test_training_images_are_moved_by_a_pixel_and_never_mirrored(self):
        data = open_data("digits", seed=5)
        x, y = next(iter(data.train_batches(100)))
        originals = nn.functional.pad(data.x_train, (1, 1, 1, 1))
        windows = torch.stack([originals[:, :, i : i + 8, j : j + 8] for i in range(3) for j in range(3)], 1) - 0.5
        for image, label in zip(x, y, strict=True):
            same = (windows == image).flatten(2).all(2).any(1)
            assert label in data.y_train[same]


class TestValidation:
    @pytest.mark.parametrize(("validation", "count"), [(100, 100), (0.1, 144), (1, 1), (1e-9, 1)])
    def test_is_cut_from_the_training_set(self, validation, count):
        whole, data = open_data("digits"), open_data("digits", validation=validation)
        assert (len(data.validation), len(data.x_train)) == (count, 1442 - count)
        assert torch.equal(data.x_test, whole.x_test)
        both = torch.cat([data.validation.pixels, data.x_train]).flatten(1)
        assert torch.equal(both.unique(dim=0), whole.x_train.flatten(1).unique(dim=0))
        assert sum(len(y) for _, y in data.validation_batches(64)) == count

    def test_depends_on_the_seed_alone(self):
        first, again, other = (open_data("digits", validation=50, seed=seed).validation.pixels for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_none_unless_asked_for(self):
        with pytest.raises(DataError, match=r"validation=0\.1"):
            open_data("digits").validation_batches()

    @pytest.mark.parametrize("validation", [-1, 1442, 1.0, -0.1, float("nan"), True, "half", None])
    def test_bad_shares(self, validation):
        assert f"got {validation!r}" in refused("digits", validation=validation)


class TestCifar:
    def test_npz(self, arrays, save):
        data = open_data(save(arrays))
        assert data.x_train.dtype == torch.uint8
        assert (data.num_classes, data.input_shape, len(data.x_train), len(data.x_test)) == (10, (3, 32, 32), 40, 12)
        (x, y) = next(iter(data.test_batches()))
        mean, deviation = np.array([125.307, 122.961, 113.8575]), np.array([51.5865, 50.847, 51.255])
        expected = ((arrays["x_test"] - mean) / deviation).transpose(0, 3, 1, 2)
        assert np.allclose(x.numpy(), expected, atol=1e-5)
        assert y.tolist() == arrays["y_test"].tolist()

    def test_layouts_and_columns_of_labels(self, arrays, save):
        expected = open_data(save(arrays)).x_train.clone()
        planes = {**arrays, "x_train": arrays["x_train"].transpose(0, 3, 1, 2), "y_train": arrays["y_train"][:, None]}
        data = open_data(save(planes))
        assert torch.equal(data.x_train, expected)
        assert data.y_train.tolist() == arrays["y_train"].tolist()
        rows = {**arrays, "x_train": planes["x_train"].reshape(40, 3072)}
        assert torch.equal(open_data(save(rows)).x_train, expected)

    def test_a_hundred_classes(self, arrays, save):
        arrays["y_train"] = np.arange(40) + 60
        assert open_data(save(arrays, "cifar100")).num_classes == 100
        assert "from 60 to 99; they must lie in 0 to 9" in refused(save(arrays, "cifar10"))

    def test_cifar10_is_not_taken_for_cifar100(self, save):
        x, y = np.zeros((10_000, 32, 32, 3), np.uint8), np.arange(10_000) % 10
        parts = {"x_test": x[:20], "y_test": y[:20]}
        assert len(open_data(save({**parts, "x_train": x[1:], "y_train": y[1:]}, "cifar100")).train) == 9_999
        full = save({**parts, "x_train": x, "y_train": y}, "cifar100")
        assert "labels below 10 only, as CIFAR-10 has; give cifar10:" in refused(full)
        assert open_data(full.replace("cifar100:", "cifar10:")).num_classes == 10

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"x_train": np.zeros((40, 28, 28, 3), np.uint8)}, "x_train has shape (40, 28, 28, 3)"),
            ({"x_train": np.zeros((), np.uint8)}, "x_train has shape ()"),
            ({"x_test": np.zeros((0, 32, 32, 3), np.uint8)}, "x_test is empty"),
            ({"x_test": np.full((12, 32, 32, 3), np.nan)}, "x_test has dtype float64; give uint8"),
            ({"y_test": np.arange(11)}, "y_test has shape (11,) for 12 images"),
            ({"y_train": np.full(40, -1)}, "labels from -1 to -1"),
            ({"y_train": np.full(40, 10)}, "they must lie in 0 to 9"),
            ({"y_train": np.zeros(40)}, "y_train has dtype float64; give whole numbers"),
            ({"y_train": np.array(["cat"] * 40)}, "give whole numbers"),
            ({"x_train": np.array([None] * 40)}, "cannot be read as .npz"),
        ],
    )
    def test_bad_arrays(self, arrays, save, tmp_path, change, words):
        message = refused(save({**arrays, **change}))
        assert words in message
        assert str(tmp_path / "data.npz") in message

    @pytest.mark.parametrize("content", [b"", b"no arrays", b"PK\x03\x04 cut off", "npy"])
    def test_files_that_are_no_npz(self, tmp_path, content):
        file = tmp_path / "bad.npz"
        if content == "npy":
            with file.open("wb") as out:
                np.save(out, np.zeros(3))
        else:
            file.write_bytes(content)
        assert "cannot be read as .npz" in refused(f"cifar10:{file}")

    def test_missing_files_and_arrays(self, arrays, save, tmp_path):
        for download in (False, True):
            message = refused(f"cifar10:{tmp_path / 'none.npz'}", download=download)
            assert f"there is no file or folder {tmp_path / 'none.npz'}; give an .npz with x_train" in message
            assert "the folder that holds cifar-10-batches-py" in message
            assert "--download, or download=True" in message
        del arrays["x_test"], arrays["y_test"]
        assert (
            "holds no x_test and no y_test; it has x_train, y_train; give a file with x_train, y_train, x_test"
            in refused(save(arrays))
        )
        assert "holds no folder cifar-100-python" in refused(f"cifar100:{tmp_path}")

    @pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
    def test_folders_of_torchvision(self, arrays, save, tmp_path, unpacked, kind):
        unpacked(kind)
        data, expected = open_data(f"{kind}:{tmp_path}"), open_data(save(arrays, kind))
        for part in ("x_train", "y_train", "x_test", "y_test"):
            assert torch.equal(getattr(data, part), getattr(expected, part))

    @pytest.mark.parametrize("name", ["train", "test", "meta"])
    def test_which_file_is_damaged_or_missing(self, tmp_path, unpacked, name):
        reader = unpacked("cifar100")
        file = tmp_path / reader.base_folder / name
        file.write_bytes(b"damaged")
        message = refused(f"cifar100:{tmp_path}")
        assert f"{file} is damaged" in message
        assert f"unpack {reader.url} into {tmp_path}, or allow the download (--download" in message
        file.unlink()
        assert f"{file} is missing; unpack {reader.url}" in refused(f"cifar100:{tmp_path}")

    @pytest.mark.parametrize("state", ["nothing", "empty folder", "meta damaged", "train missing"])
    def test_downloads_what_is_missing_where_that_is_allowed(self, tmp_path, unpacked, served, state):
        reader, place = unpacked("cifar10", served=served), tmp_path / "place"
        if state != "nothing":
            place.mkdir()
        if state in ("meta damaged", "train missing"):
            (tmp_path / reader.base_folder).rename(place / reader.base_folder)
            (place / reader.base_folder / state.split()[0]).write_bytes(b"")
        refused(f"cifar10:{place}")
        assert len(open_data(f"cifar10:{place}", download=True).x_train) == 40
        assert len(open_data(f"cifar10:{place}").x_test) == 12

    def test_downloads_that_fail(self, tmp_path, unpacked, served, monkeypatch):
        reader = unpacked("cifar10", served=served)
        monkeypatch.setattr(reader, "url", f"{served}/gone.tar.gz")
        message = refused(f"cifar10:{tmp_path / 'place'}", download=True)
        assert f"{reader.url} cannot be downloaded into {tmp_path / 'place'} (" in message
        assert "try again, or unpack it there yourself" in message

    def test_nothing_is_downloaded_over_complete_data(self, tmp_path, unpacked, monkeypatch):
        reader = unpacked("cifar10")
        monkeypatch.setattr(reader, "url", "no address")
        assert len(open_data(f"cifar10:{tmp_path}", download=True).x_train) == 40

    def test_without_torchvision(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchvision", None)
        assert 'pip install "ifso[vision]", or give an .npz' in refused(f"cifar10:{tmp_path}")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The address at which the files of ``tmp_path`` can be had."""
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def unpacked(arrays, tmp_path, monkeypatch):
    """Files as torchvision unpacks them, and on request the archive from which it does."""
    datasets = pytest.importorskip("torchvision.datasets")

    def make(kind, served=None):
        reader = getattr(datasets, kind.upper())
        values = folder_of_torchvision(tmp_path, arrays, kind)
        if served:
            packed = tmp_path / "packed.tar.gz"
            with tarfile.open(packed, "w:gz") as file:
                file.add(tmp_path / values["base_folder"], values["base_folder"])
            values |= {"url": f"{served}/packed.tar.gz", "filename": "got.tar.gz", "tgz_md5": md5(packed.read_bytes())}
        for name, value in values.items():
            monkeypatch.setattr(reader, name, value)
        return reader

    return make


def md5(data):
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def folder_of_torchvision(place, arrays, kind):
    """Files as torchvision unpacks them, and the names and checksums by which it knows them."""
    base, label = ("cifar-10-batches-py", "labels") if kind == "cifar10" else ("cifar-100-python", "fine_labels")
    (place / base).mkdir()

    def put(name, content):
        data = pickle.dumps(content)
        (place / base / name).write_bytes(data)
        return [name, md5(data)]

    def part(of):
        rows = arrays[f"x_{of}"].transpose(0, 3, 1, 2).reshape(-1, 3072)
        return {"data": rows, label: arrays[f"y_{of}"].tolist()}

    name, checksum = put("meta", {"names": ["x"] * 10})
    return {
        "base_folder": base,
        "train_list": [put("train", part("train"))],
        "test_list": [put("test", part("test"))],
        "meta": {"filename": name, "key": "names", "md5": checksum},
    }


class TestNames:
    def test_boxes_need_a_path(self):
        assert "'coco' is no data set; write digits, cifar10:PATH" in refused("coco")

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("digit", "did you mean digits?"),
            ("cifar:there", "did you mean cifar10"),
            ("cifar10", "write digits, cifar10:PATH"),
            ("cifar10:", "write digits, cifar10:PATH"),
            ("digits:here", "is no data set"),
            ("imagenet", "did you mean imagenet:PATH?"),
            ("image-net:here", "did you mean imagenet:PATH?"),
            ("", "'' is no data set"),
            ("shapes", "did you mean folder:shapes?"),
            ("~nobody-here", "is no data set"),
            ("x" * 300, "is no data set"),
        ],
    )
    def test_unknown(self, name, words, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "shapes").mkdir()
        assert words in refused(name)

    def test_a_device_that_is_not_there(self):
        assert "device 'abacus' cannot be used" in refused("digits", device="abacus")
