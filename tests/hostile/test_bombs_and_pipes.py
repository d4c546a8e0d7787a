"""Small files that would take much memory, block for ever or lead elsewhere; and what fuzzing found, each by hand."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from binaries import Sentinel
from contract import time_limit
from PIL import Image
from safetensors.torch import save_file
from seeds import Net, coco, latencies, result

from ifso.common.serialization import parsed, read_lines, read_tensor_file, write_tensor_file
from ifso.common.text import one_line
from ifso.costs.latency import LatencyModel
from ifso.data.cifar import open_cifar, read_npz
from ifso.data.coco_format import read_document
from ifso.data.decoding import ImageFiles
from ifso.data.registry import open_data
from ifso.errors import DataError, IfsoError, RunError, WeightsError
from ifso.models.registry import read_name
from ifso.models.weights import load_weights
from ifso_repro.config import read_toml
from ifso_repro.reader import decode
from ifso_repro.results import read_file

NAMES = ("x_train", "y_train", "x_test", "y_test")


def npy(dtype, shape, content=b""):
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def write_npz(path, member, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as file:
        for name in NAMES:
            file.writestr(f"{name}.npy", member)
    return path


def one_line_of(error):
    assert str(error.value).isprintable()
    return str(error.value)


class TestArrays:
    @pytest.mark.parametrize(
        ("member", "said"),
        [
            (npy("'|u1'", "(10000000000000,)"), "cannot be read as .npz"),
            (npy("'|V2147483647'", "(1000,)"), "cannot be read as .npz"),
            (npy("'|O'", "()", pickle.dumps(1)), "cannot be read as .npz"),
            (npy("'|u1'", "-" * 5000 + "1"), "cannot be read as .npz"),
            (npy("'|u1'", "(" * 5000), "cannot be read as .npz"),
            (npy("'|u1'", f"({10**400},)"), "cannot be read as .npz"),
        ],
    )
    def test_headers_that_lie(self, member, said, tmp_path):
        with pytest.raises(DataError) as error:
            read_npz(write_npz(tmp_path / "a.npz", member), NAMES)
        assert said in one_line_of(error)

    def test_other_packings(self, tmp_path):
        with pytest.raises(DataError, match="numpy does not write"):
            read_npz(write_npz(tmp_path / "a.npz", npy("'|u1'", "(1,)", b"1"), zipfile.ZIP_BZIP2), NAMES)

    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_what_numpy_writes(self, save, tmp_path):
        arrays = {name: np.arange(6, dtype=np.int16).reshape(2, 3) + place for place, name in enumerate(NAMES)}
        arrays["y_test"] = np.asfortranarray(arrays["y_test"])
        save(tmp_path / "a.npz", **arrays)
        for found, name in zip(read_npz(tmp_path / "a.npz", NAMES), NAMES, strict=True):
            assert np.array_equal(found, arrays[name])

    def test_names_with_line_breaks(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
            file.writestr("a\nb\x1b[1m.npy", b"")
        with pytest.raises(DataError) as error:
            open_cifar("cifar10", str(tmp_path / "a.npz"))
        assert "a b\\x1b[1m" in one_line_of(error)


def write_coco(root, **changes):
    (root / "images").mkdir(parents=True)
    for split in ("train", "val"):
        document = coco(split)
        document["images"][0] |= changes if split == "train" else {}
        (root / f"instances_{split}.json").write_text(json.dumps(document))
        for k in range(3):
            Image.new("RGB", (8, 6)).save(root / "images" / f"{split}_{k}.png")
    return root


class TestCoco:
    def test_the_folder_itself(self, tmp_path):
        assert open_data(f"coco:{write_coco(tmp_path)}", workers=0).num_classes == 3

    @pytest.mark.parametrize(
        "name", ["../secret.png", "{}/secret.png", "a/../../secret.png", "..\\secret.png", "C:x", "a\0b", "\ud800"]
    )
    def test_names_that_lead_away(self, name, tmp_path):
        Image.new("RGB", (8, 6)).save(tmp_path / "secret.png")
        with pytest.raises(DataError) as error:
            open_data(f"coco:{write_coco(tmp_path / 'set', file_name=name.format(tmp_path))}", workers=0)
        assert "leads out of the folder of images" in one_line_of(error)

    @pytest.mark.parametrize("name", ["x" * 5000, "a\nb", "images", "."])
    def test_names_of_no_file(self, name, tmp_path):
        with pytest.raises(DataError) as error:
            open_data(f"coco:{write_coco(tmp_path / 'set', file_name=name)}", workers=0)
        assert len(one_line_of(error)) < 2000

    @pytest.mark.parametrize(
        "change", [{"width": 10**30}, {"height": 2**31}, {"id": [1] * 5000}, {"file_name": 10**4000}]
    )
    def test_numbers_beyond_measure(self, change, tmp_path):
        with pytest.raises(DataError) as error:
            open_data(f"coco:{write_coco(tmp_path / 'set', **change)}", workers=0)
        assert len(one_line_of(error)) < 2000

    @pytest.mark.parametrize("value", [10**400, float("inf"), 1e300])
    def test_boxes_beyond_measure(self, value, tmp_path):
        folder, document = write_coco(tmp_path / "set"), coco("train")
        document["annotations"][0]["bbox"][0] = value
        (folder / "instances_train.json").write_text(json.dumps(document))
        with pytest.raises(DataError) as error:
            open_data(f"coco:{folder}", workers=0)
        assert "give four numbers" in one_line_of(error)

    def test_an_id_that_would_need_a_huge_network(self, tmp_path):
        folder = write_coco(tmp_path / "set")
        for split in ("train", "val"):
            document = coco(split)
            document["categories"][0]["id"] = document["annotations"][1]["category_id"] = 2**50
            (folder / f"instances_{split}.json").write_text(json.dumps(document))
        with pytest.raises(DataError, match="let labels be contiguous"), time_limit(5):
            open_data(f"coco:{folder},labels=ids", workers=0)


def png(data, width=16, height=16):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


class TestImages:
    def read(self, folder, name):
        return ImageFiles(folder, np.array([os.fsencode(name)]), torch.zeros(1)).read(0)

    @pytest.mark.parametrize(
        "hurt", [lambda data: data[: len(data) // 2], lambda data: data[:-1] + b"\0", lambda data: b""]
    )
    def test_a_png_that_would_end_the_process(self, hurt, tmp_path):
        packed = zlib.compress(bytes(16 * 49))
        (tmp_path / "a.png").write_bytes(png(packed))
        assert self.read(tmp_path, "a.png").shape == (3, 16, 16)
        (tmp_path / "a.png").write_bytes(png(hurt(packed)))
        with pytest.raises(DataError) as error:
            self.read(tmp_path, "a.png")
        assert "a.png cannot be read as an image" in one_line_of(error)

    def test_a_picture_of_many_pixels_in_few_bytes(self, tmp_path):
        (tmp_path / "a.png").write_bytes(png(zlib.compress(bytes(100)), 60_000, 60_000))
        with pytest.raises(DataError, match="cannot be read as an image"):
            self.read(tmp_path, "a.png")

    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
    def test_colours(self, mode, tmp_path):
        grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
        if mode == "I;16":
            Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "a.png")
            expected = np.stack([grey] * 3)
        else:
            image = Image.fromarray(np.stack([grey, grey.T, 255 - grey], 2)).convert(mode)
            image.save(tmp_path / "a.png")
            expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        assert np.array_equal(self.read(tmp_path, "a.png").numpy(), expected)

    def test_no_other_program_is_started(self, tmp_path):
        (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
        with pytest.raises(DataError, match="cannot be read as an image"):
            self.read(tmp_path, "a.png")


class TestWeights:
    def refused(self, tmp_path, content):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(WeightsError) as error, time_limit(10):
            load_weights(Net(), tmp_path / "w.pth")
        return one_line_of(error)

    def test_a_dictionary_in_itself(self, tmp_path):
        content = {}
        content["model"] = content
        assert "holds no state dict" in self.refused(tmp_path, content)

    def test_keys_that_are_no_text(self, tmp_path):
        assert "holds no state dict" in self.refused(tmp_path, {1: torch.ones(2)})

    @pytest.mark.parametrize("strange", [torch.ones(3, 2).to_sparse(), torch.ones(2, device="meta")])
    def test_strange_tensors(self, strange, tmp_path):
        assert "a.bias is no dense tensor" in self.refused(tmp_path, {**Net().state_dict(), "a.bias": strange})

    def test_code_is_not_run_and_not_advised(self, tmp_path):
        told = self.refused(tmp_path, OrderedDict({"a.bias": Sentinel(str(tmp_path / "executed"))}))
        assert not (tmp_path / "executed").exists()
        assert "holds more than tensors (Unsupported" in told
        assert "weights_only" not in told

    def test_bytes_of_any_length(self, tmp_path):
        (tmp_path / "w.pth").write_bytes(b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.")
        with pytest.raises(WeightsError, match="arrays of bytes, of any length"):
            load_weights(Net(), tmp_path / "w.pth")
        assert "arrays of bytes" in self.refused(tmp_path, {"a.bias": bytearray(3)})

    @pytest.mark.parametrize("items", [2, 50])
    @pytest.mark.parametrize("zipped", [True, False])
    def test_a_tuple_that_would_be_hashed_without_end(self, items, zipped, tmp_path):
        data = b"\x80\x02}K\x01\x85q\x00"
        for number in range(60):
            data += b"(" + b"h" + bytes([number]) + (b"h" + bytes([number])) * (items - 1) + b"tq" + bytes([number + 1])
        data += b"K\x02s."
        if zipped:
            with zipfile.ZipFile(tmp_path / "w.pth", "w") as file:
                file.writestr("w/data.pkl", data)
        else:
            (tmp_path / "w.pth").write_bytes(data)
        with pytest.raises(WeightsError, match="a tuple that holds itself too often"):
            load_weights(Net(), tmp_path / "w.pth")

    @pytest.mark.parametrize("zipped", [True, False])
    def test_whole_checkpoints_are_read(self, zipped, tmp_path):
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.zeros(2, 1, 5, 5)).sum().backward()
        optimizer.step()
        content = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": 3,
            "shape": torch.Size((2, 3)),
        }
        torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
        fresh = Net()
        load_weights(fresh, tmp_path / "w.pth")
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), fresh.parameters(), strict=True))

    def test_names_with_line_breaks(self, tmp_path):
        save_file({"a\n\x1b[1mb": torch.ones(1), "x" * 5000: torch.ones(1)}, tmp_path / "w.safetensors")
        with pytest.raises(WeightsError) as error:
            load_weights(Net(), tmp_path / "w.safetensors")
        assert len(one_line_of(error)) < 2000


class TestDocuments:
    def test_a_state_that_is_no_json(self, tmp_path, monkeypatch):
        monkeypatch.setattr("ifso.common.serialization.strict_json", lambda _: "[" * 10_000)
        write_tensor_file(tmp_path / "c.safetensors", {"a": torch.ones(1)})
        with pytest.raises(RunError, match=r"c\.safetensors: its state is no JSON"):
            read_tensor_file(tmp_path / "c.safetensors")

    @pytest.mark.parametrize(
        "text", ['{"a": "\\ud800"}', '{"\\uDfff": 1}', '{"a": ' + "[" * 70 + "]" * 70 + "}", '{"a": NaN}']
    )
    def test_json_that_cannot_be_written_again(self, text):
        assert parsed(text.encode()) is None
        assert parsed(b'{"a": "\\ud83d\\ude00", "b": [[{}], [{}], ' + b"[]," * 100 + b"0]}") is not None

    @pytest.mark.parametrize("right", ["[" * 100_000, "9" * 5000, "1" + "0" * 400, f"'{'x' * 5000}'"])
    def test_toml(self, right, tmp_path):
        (tmp_path / "a.toml").write_text(f"removed = {right}\n")
        with pytest.raises(IfsoError) as error:
            decode({"removed": float}, read_toml(tmp_path / "a.toml"), "a.toml")
        assert "a.toml" in one_line_of(error)
        assert len(one_line_of(error)) < 2000

    @pytest.mark.parametrize(
        "change", [{"seconds": 10**400}, {"row": "a\nb"}, {"x" * 5000: 1}, {"history": [[0] * 5000]}]
    )
    def test_results(self, change, tmp_path):
        path = tmp_path / "resnet32-cifar10-50.ifso+normalize=none.paper.0.json"
        path.write_text(json.dumps(result()))
        assert read_file(path).seed == 0
        path.write_text(json.dumps({**result(), **change}))
        with pytest.raises(IfsoError) as error:
            read_file(path)
        assert len(one_line_of(error)) < 2000

    def test_deep_results(self, tmp_path):
        (tmp_path / "a.json").write_text("[" * 100_000)
        with pytest.raises(IfsoError, match=r"a\.json is damaged"):
            read_file(tmp_path / "a.json")

    def test_latencies(self):
        with pytest.raises(RunError, match="damaged"):
            LatencyModel.from_json({**latencies(), "constant": 10**400})

    @pytest.mark.parametrize("value", ["{[]:1}", "-" * 5000 + "1", "(" * 5000])
    def test_options_that_are_no_literals(self, value):
        assert read_name(f"ifso:resnet20,depth={value}").options == {"depth": value}

    def test_one_line(self):
        assert one_line("a\n b\tc\x1b[1m\ud800") == "a b c\\x1b[1m\\ud800"
        assert len(one_line("\x7f" * 5000)) == 500


class TestPipes:
    """A pipe in the place of a file would be waited for without end."""

    @pytest.mark.parametrize(
        ("name", "read"),
        [
            ("metrics.jsonl", read_lines),
            ("00000001.safetensors", read_tensor_file),
            ("instances_train.json", read_document),
            ("a.npz", lambda path: read_npz(path, NAMES)),
            ("w.safetensors", lambda path: load_weights(Net(), path)),
            ("w.pth", lambda path: load_weights(Net(), path)),
            ("a.png", lambda path: TestImages().read(path.parent, "a.png")),
        ],
    )
    def test_refused(self, name, read, tmp_path):
        os.mkfifo(tmp_path / name)
        with pytest.raises(IfsoError) as error, time_limit(5):
            read(tmp_path / name)
        assert name in one_line_of(error)


LIMITED = """
import sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
import torch
from binaries import *
from long_run import limit_memory
from test_bombs_and_pipes import NAMES, bombs, refusals
torch.set_num_threads(1)
folder = Path(sys.argv[3])
files = bombs(folder)
refusals(files)
limit_memory(600 * 2**20)
print(refusals(files))
"""


def bombs(folder):
    """Files of a few kilobytes that speak of gigabytes, with what reads them."""
    files = {
        "shape.npz": write_npz(folder / "shape.npz", npy("'|u1'", "(4000000000,)")),
        "packed.npz": write_npz(
            folder / "packed.npz", npy("'|u1'", "(4000000000,)", bytes(2**20)), zipfile.ZIP_DEFLATED
        ),
        "picture.png": folder / "picture.png",
        "photo.jpg": folder / "photo.jpg",
        "header.safetensors": folder / "header.safetensors",
        "offsets.safetensors": folder / "offsets.safetensors",
        "bytes.pth": folder / "bytes.pth",
    }
    files["picture.png"].write_bytes(png(zlib.compress(bytes(10_000)), 65_000, 65_000))
    target = io.BytesIO()
    Image.new("RGB", (16, 16)).save(target, "JPEG", progressive=True)
    data = target.getvalue()
    place = data.index(b"\xff\xc2") + 5
    files["photo.jpg"].write_bytes(data[:place] + struct.pack(">HH", 60_000, 60_000) + data[place + 4 :])
    files["header.safetensors"].write_bytes(struct.pack("<Q", 2**40) + b"{}")
    text = b'{"a": {"dtype": "F32", "shape": [1000000000], "data_offsets": [0, 4000000000]}}'
    files["offsets.safetensors"].write_bytes(struct.pack("<Q", len(text)) + text)
    files["bytes.pth"].write_bytes(b"\x80\x02cbuiltins\nbytearray\nJ" + struct.pack("<i", 2**31 - 1) + b"\x85R.")
    return files


def refusals(files):
    """How many of them are refused by an IfsoError."""
    readers = {
        ".npz": lambda path: read_npz(path, NAMES),
        ".png": lambda path: TestImages().read(path.parent, path.name),
        ".jpg": lambda path: TestImages().read(path.parent, path.name),
        ".safetensors": lambda path: load_weights(Net(), path),
        ".pth": lambda path: load_weights(Net(), path),
    }
    count = 0
    for path in files.values():
        try:
            readers[path.suffix](path)
        except IfsoError:
            count += 1
    return count


def test_bombs_with_little_memory(tmp_path):
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(here), str(here.parents[1] / "src"), str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "7", done.stdout + done.stderr[-2000:]
