"""``ifso.export``: files that compute what the network computes, or one clear line and no file."""

import copy
import sys
import zipfile

import pytest
import torch
from running_onnx import need_onnx, session_of
from torch import nn

import ifso
from ifso.errors import ExportError, VerificationError
from ifso.exporting import export as exporting
from ifso.exporting import formats
from ifso.exporting.export import in_order_of, relative_difference, worst_difference
from ifso.exporting.samples import Sample


def pruned(name, shape, every=2):
    """A network of which every second unit is left, or fewer, with running statistics that matter."""
    model = ifso.create_model(name)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    whole, graph = copy.deepcopy(model), ifso.trace(model.eval(), torch.zeros(shape))
    keep = {group.name: torch.arange(group.size) % every == 0 for group in graph.groups}
    ifso.compact_(model, graph, ifso.balance(graph, keep))
    return model, whole


def truth(model, images):
    with torch.no_grad():
        return copy.deepcopy(model).eval().double()(images.double())


def close(found, wanted):
    return float((torch.as_tensor(found).double() - wanted).abs().max() / wanted.abs().max()) < 1e-4


class Two(nn.Module):
    """Takes two tensors and gives several."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Embedding(5, 4)

    def forward(self, x, tokens):
        both = self.one(x) + self.two(tokens).mean(1)
        return {"sum": both, "parts": [both[:, :2], both[:, 2:]]}


class Chooses(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class OfTwo(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(2, 4)


class LooksAtItsBatch(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if len(x) == 2 else 1)


def line(caught):
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    return text


class TestOnnx:
    @pytest.fixture(autouse=True)
    def _packages(self):
        need_onnx()

    def test_a_pruned_resnet_in_any_batch(self, tmp_path):
        model, whole = pruned("ifso:resnet20", (1, 3, 32, 32))
        model.train()
        before = copy.deepcopy(model.state_dict())
        example = torch.randn(1, 3, 32, 32)
        found = ifso.export(model, tmp_path / "small.onnx", example)
        assert (found.to, found.checked, found.notes, found.outputs) == ("onnx", (1, 2, 5), (), ("output",))
        assert found.difference < 1e-5
        assert model.training
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        session = session_of(found.path)
        assert [(entry.name, entry.shape) for entry in session.get_inputs()] == list(found.inputs)
        assert found.inputs == (("x", ["batch", 3, 32, 32]),)
        assert session.get_outputs()[0].shape == ["batch", 10]
        images = torch.randn(7, 3, 32, 32)
        assert close(session.run(None, {"x": images.numpy()})[0], truth(model, images))
        content = found.path.read_bytes()
        assert len(content) == found.bytes < 0.4 * sum(p.numel() * 4 for p in whole.parameters())
        assert b".py" not in content
        assert [path.name for path in tmp_path.iterdir()] == ["small.onnx"]

    @pytest.mark.slow
    def test_a_pruned_mobilenet(self, tmp_path):
        model, whole = pruned("torchvision:mobilenet_v3_small", (1, 3, 64, 64))
        found = ifso.export(model, tmp_path / "small.onnx", torch.randn(1, 3, 64, 64))
        images = torch.randn(3, 3, 64, 64)
        assert close(session_of(found.path).run(None, {"x": images.numpy()})[0], truth(model, images))
        assert found.bytes < exporting.bytes_of(whole, torch.randn(1, 3, 64, 64), "onnx") / 2

    def test_several_inputs_and_outputs_have_names(self, tmp_path):
        model = Two()
        example = {"x": torch.randn(1, 3), "tokens": torch.tensor([[1, 2, 4]])}
        found = ifso.export(model, tmp_path / "two.onnx", example, opset=19)
        assert (found.opset, found.outputs) == (19, ("sum", "parts_0", "parts_1"))
        session = session_of(found.path)
        assert [entry.name for entry in session.get_inputs()] == ["x", "tokens"]
        x, tokens = torch.randn(4, 3), torch.randint(5, (4, 3))
        results = session.run(None, {"x": x.numpy(), "tokens": tokens.numpy()})
        wanted = model(x, tokens)
        for result, right in zip(results, [wanted["sum"], *wanted["parts"]], strict=True):
            assert close(result, right.detach().double())

    def test_a_batch_that_cannot_vary_can_be_fixed(self, tmp_path):
        model = OfTwo(4, 4)
        with pytest.raises(ExportError, match=r"a batch of 2 and not on one of 1: .* invalid .*--static") as caught:
            ifso.export(model, tmp_path / "fixed.onnx", torch.randn(2, 4))
        line(caught)
        with pytest.raises(ExportError, match=r"LooksAtItsBatch cannot be .* batch as dynamic .*--static") as caught:
            ifso.export(LooksAtItsBatch(4, 4), tmp_path / "fixed.onnx", torch.randn(2, 4))
        line(caught)
        assert list(tmp_path.iterdir()) == []
        found = ifso.export(model, tmp_path / "fixed.onnx", torch.randn(2, 4), static=True)
        assert (found.inputs, found.checked) == ((("x", [2, 4]),), (2, 2))

    def test_an_opset_that_pytorch_does_not_write(self, tmp_path):
        with pytest.raises(ExportError, match="cannot write opset 99"):
            ifso.export(nn.Linear(2, 2), tmp_path / "x.onnx", torch.randn(1, 2), opset=99)
        assert list(tmp_path.iterdir()) == []

    def test_weights_that_one_file_cannot_hold(self, tmp_path, monkeypatch):
        monkeypatch.setattr(formats, "MOST_BYTES", 10)
        with pytest.raises(ExportError, match=r"--to torch"):
            ifso.export(nn.Linear(2, 2), tmp_path / "x.onnx", torch.randn(1, 2))


def test_a_pruned_vgg_as_a_program(tmp_path):
    model, _ = pruned("ifso:vgg16", (1, 3, 32, 32), every=16)
    found = ifso.export(model, tmp_path / "small.pt2", torch.randn(1, 3, 32, 32))
    assert (found.to, found.opset, found.checked) == ("torch", None, (1, 2, 5))
    images = torch.randn(3, 3, 32, 32)
    assert close(torch.export.load(found.path).module()(images).detach(), truth(model, images))
    with zipfile.ZipFile(found.path) as file:
        assert b".py" not in b"".join(file.read(name) for name in file.namelist() if name.endswith(".json"))


class TestRefusals:
    @pytest.mark.parametrize(("name", "to"), [("x.onnx", "torch"), ("x.pt2", "onnx"), ("x.pth", None), ("x", None)])
    def test_suffixes(self, tmp_path, name, to):
        with pytest.raises(ExportError, match="suffix of an exported network must be") as caught:
            ifso.export(nn.Linear(2, 2), tmp_path / name, torch.randn(1, 2), to=to)
        line(caught)

    def test_formats_and_options_of_others(self, tmp_path):
        with pytest.raises(ExportError, match="onnx or torch, not to 'tflite'"):
            ifso.export(nn.Linear(2, 2), tmp_path / "x.onnx", torch.randn(1, 2), to="tflite")
        with pytest.raises(ExportError, match="opset=20 is for ONNX"):
            ifso.export(nn.Linear(2, 2), tmp_path / "x.pt2", torch.randn(1, 2), opset=20)
        with pytest.raises(ExportError, match="hold int; give tensors"):
            ifso.export(nn.Linear(2, 2), tmp_path / "x.pt2", (torch.randn(1, 2), 3))

    def test_places(self, tmp_path):
        (tmp_path / "folder.pt2").mkdir()
        with pytest.raises(ExportError, match="is a folder"):
            ifso.export(nn.Linear(2, 2), tmp_path / "folder.pt2", torch.randn(1, 2))
        with pytest.raises(ExportError, match="there is no folder"):
            ifso.export(nn.Linear(2, 2), tmp_path / "none" / "x.pt2", torch.randn(1, 2))

    def test_a_disk_that_is_full(self, tmp_path, monkeypatch):
        def full(program, path):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(exporting, "write_program", full)
        with pytest.raises(ExportError, match="cannot be written: No space left on device"):
            ifso.export(nn.Linear(2, 2), tmp_path / "x.pt2", torch.randn(1, 2))
        assert list(tmp_path.iterdir()) == []

    def test_a_package_that_is_missing(self, tmp_path, monkeypatch):
        need_onnx()
        monkeypatch.setitem(sys.modules, "onnxscript", None)
        with pytest.raises(ExportError, match=r'need onnxscript, .*; pip install "ifso\[onnx\]"') as caught:
            ifso.export(nn.Linear(2, 2), tmp_path / "x.onnx", torch.randn(1, 2))
        line(caught)

    def test_a_network_that_no_program_can_hold(self, tmp_path, capfd):
        with pytest.raises(ExportError, match=r"Chooses cannot be exported by torch\.export: GuardOnDataDep") as caught:
            ifso.export(Chooses(4, 4), tmp_path / "x.pt2", torch.randn(1, 4))
        line(caught)
        assert list(tmp_path.iterdir()) == []
        assert capfd.readouterr() == ("", "")

    def test_inputs_that_do_not_fit(self, tmp_path):
        with pytest.raises(ifso.IfsoError, match="does not run on the example inputs"):
            ifso.export(nn.Linear(3, 2), tmp_path / "x.pt2", torch.randn(1, 2))

    def test_results_that_differ_leave_the_earlier_file(self, tmp_path, monkeypatch):
        (tmp_path / "x.pt2").write_bytes(b"earlier")

        def wrong(path, samples):
            assert path.name == ".x.pt2.new"
            return [[sample.tensors[0] * 2.001] for sample in samples]

        monkeypatch.setitem(exporting.RUNNERS, "torch", (wrong, "a wrong runner"))
        with pytest.raises(VerificationError, match=r"differ by 0.0005 of the largest value, and 0.0001 is") as caught:
            ifso.export(Doubles(), tmp_path / "x.pt2", torch.randn(1, 4))
        line(caught)
        assert caught.value.exit_status == 4
        assert (tmp_path / "x.pt2").read_bytes() == b"earlier"
        assert [path.name for path in tmp_path.iterdir()] == ["x.pt2"]
        assert ifso.export(Doubles(), tmp_path / "x.pt2", torch.randn(1, 4), tolerance=1e-2).difference > 4e-4

    def test_ctrl_c_leaves_nothing(self, tmp_path, monkeypatch):
        def interrupted(path, samples):
            assert path.stat().st_size > 100
            raise KeyboardInterrupt

        monkeypatch.setitem(exporting.RUNNERS, "torch", (interrupted, ""))
        with pytest.raises(KeyboardInterrupt):
            ifso.export(Doubles(), tmp_path / "x.pt2", torch.randn(1, 4))
        assert list(tmp_path.iterdir()) == []


class Doubles(nn.Module):
    def forward(self, x):
        return 2 * x


class TestDetectors:
    @pytest.fixture(autouse=True)
    def _packages(self):
        need_onnx()

    def test_one_image_at_a_time_and_only_to_onnx(self, tmp_path):
        model = ifso.create_model("ifso:retinanet_resnet18_fpn,num_classes=3,min_size=32,max_size=32")
        with pytest.raises(ExportError, match=r"--to onnx"):
            ifso.export(model, tmp_path / "x.pt2", ([torch.rand(3, 32, 32)],))
        with pytest.raises(ExportError, match="one image at a time, not for 2"):
            ifso.export(model, tmp_path / "x.onnx", ([torch.rand(3, 32, 32)] * 2,))

    def test_the_boxes_are_those_of_pytorch(self, tmp_path):
        model = ifso.create_model("ifso:retinanet_resnet18_fpn,num_classes=3,min_size=64,max_size=96")
        logits = model.head.classification_head.cls_logits
        nn.init.normal_(logits.weight, std=0.02)
        nn.init.constant_(logits.bias, -3.0)
        found = ifso.export(model, tmp_path / "x.onnx", ([torch.rand(3, 64, 96)],))
        assert found.outputs == ("boxes", "scores", "labels")
        assert (found.notes, found.inputs) == ((), (("images", [3, 64, 96]),))
        image = torch.rand(3, 64, 96)
        with torch.no_grad():
            wanted = model.eval()([image])[0]
        boxes, scores, _ = session_of(found.path).run(None, {"images": image.numpy()})
        assert len(scores) == len(wanted["scores"]) > 10
        assert close(scores, wanted["scores"].double())
        distance = (torch.as_tensor(boxes)[:, None] - wanted["boxes"][None]).abs().amax(2)
        assert float(distance.amin(1).max()) < 0.01


def test_a_check_that_tells_little_is_noted(tmp_path, monkeypatch):
    monkeypatch.setitem(exporting.RUNNERS, "torch", (lambda path, samples: [[torch.zeros(1)]] * 3, ""))
    assert "nothing but zeros" in ifso.export(Nothing(), tmp_path / "x.pt2", torch.randn(1, 4)).notes[0]


class Nothing(nn.Module):
    def forward(self, x):
        return 0 * x.sum()[None]


def test_samples_of_a_batch_differ_from_each_other_and_are_the_same_again():
    sample = Sample.of(torch.zeros(1, 3, 4, 4))
    first, again = sample.drawn(5).tensors[0], sample.drawn(5).tensors[0]
    assert torch.equal(first, again)
    assert len({tuple(row.flatten().tolist()) for row in first}) == 5
    pixels = Sample.of(torch.rand(1, 3, 4, 4)).drawn(3).tensors[0]
    assert 0 <= float(pixels.min()) <= float(pixels.max()) <= 1


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("found", "wanted", "difference"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([1.0, -4.002], [1.0, -4.0], 0.0005),
        ([INF, NAN, 1.0], [INF, NAN, 1.0], 0.0),
        ([INF, NAN, 1.0], [INF, NAN, 2.0], 0.5),
        ([1.0, 1.0], [NAN, 1.0], INF),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([-INF], [INF], INF),
        ([0.1], [0.0], INF),
        ([1.0], [1.0, 1.0], INF),
        ([], [], 0.0),
    ],
)
def test_differences_are_shares_of_the_largest_value(found, wanted, difference):
    share = relative_difference(torch.tensor(found), torch.tensor(wanted))
    assert share == pytest.approx(difference, rel=1e-3)


def test_boxes_that_changed_places_are_the_same_and_others_are_not():
    boxes, scores = torch.rand(6, 4) * 100, torch.full((6,), 0.5)
    order = torch.randperm(6)
    found = in_order_of([boxes[order], scores], [boxes, scores])
    assert worst_difference([found], [[boxes, scores]]) == 0
    wrong = boxes.clone()
    wrong[3] += 30
    found = in_order_of([wrong[order], scores], [boxes, scores])
    assert worst_difference([found], [[boxes, scores]]) > 0.2
    assert worst_difference([in_order_of([boxes[:5], scores[:5]], [boxes, scores])], [[boxes, scores]]) == INF
