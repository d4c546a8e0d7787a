"""The programs in examples/ do what they say: smaller networks that come back whole from their folders."""

import importlib.util
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ifso

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 40
EXTRA = 'it is not installed; pip install "ifso[examples]"'


def example(name):
    """A program of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def same(model, other, *shape):
    """Do two networks give the same in eval mode?"""
    torch.manual_seed(1)
    images = torch.randn(shape)
    with torch.no_grad():
        ours, theirs = (getattr(net, "logits", net) for net in (model.eval()(images), other.eval()(images)))
    return torch.equal(ours, theirs)


def test_examples_are_short():
    found = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(found) == 8
    assert {name: lines for name, lines in found.items() if lines > MOST_LINES} == {}


def test_keras_resnet50_strides_and_normalises_as_keras_does():
    pytest.importorskip("torchvision", reason=EXTRA)
    model = ifso.create_model(f"{EXAMPLES / 'keras_resnet50.py'}:resnet50")
    assert set(model.state_dict()) == set(ifso.create_model("torchvision:resnet50").state_dict())
    strides = [(stage[0].conv1.stride, stage[0].conv2.stride) for stage in (model.layer2, model.layer3, model.layer4)]
    assert strides == [((2, 2), (1, 1))] * 3
    assert (model.layer1[0].conv1.stride, model.layer2[1].conv1.stride) == ((1, 1), (1, 1))
    assert {module.eps for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)} == {1e-3}
    with torch.no_grad():
        assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


def test_plain_loop(tmp_path, capsys, few_samples):
    accuracy = example("plain_loop").main(tmp_path / "run", epochs=1)
    assert accuracy > 0.8
    assert "budget met" in capsys.readouterr().out


def test_timm_by_name(tmp_path, capsys):
    pytest.importorskip("timm", reason='it is not installed; pip install "ifso[vision]"')
    module = example("timm_model")
    model, again = module.main(tmp_path, size=32)
    assert parameters(model) < parameters(ifso.create_model(module.NAME))
    assert same(model, again, 2, 3, 32, 32)


def test_torchvision_by_name(tmp_path, capsys):
    pytest.importorskip("torchvision", reason='it is not installed; pip install "ifso[vision]"')
    module = example("torchvision_model")
    model, again = module.main(tmp_path, size=32)
    assert parameters(model) < 0.6 * parameters(ifso.create_model(module.NAME))
    assert same(model, again, 2, 3, 32, 32)


def test_hugging_face(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason=EXTRA)
    module = example("hugging_face")
    model, again = module.main(tmp_path)
    fresh = transformers.ResNetForImageClassification(transformers.ResNetConfig(**module.SMALL))
    assert parameters(model) < 0.7 * parameters(fresh)
    assert same(model, again, 2, 3, 32, 32)
    assert model(torch.randn(1, 3, 32, 32), labels=torch.tensor([1])).loss.isfinite()
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.json", "model.safetensors", "config.json"}


def test_the_page_about_other_libraries_runs():
    pytest.importorskip("transformers", reason=EXTRA)
    page = (EXAMPLES.parent / "docs" / "interop.md").read_text()
    (code,) = re.findall(r"<!-- needs: transformers -->\n```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(code, "docs/interop.md", "exec"), names)
    assert set(names["scores"]) == {group.name for group in names["graph"].groups}
    assert set(re.findall(r"examples/(\w+)\.py", page)) == {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize(
    "name", ["vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("convnext", "swin"))]
)
def test_other_architectures_of_hugging_face(name):
    """Traced by keyword, and exact: a model that returns a ModelOutput needs no wrapper."""
    transformers = pytest.importorskip("transformers", reason=EXTRA)
    configs = {
        "convnext": ("ConvNext", {"patch_size": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
        "vit": ("ViT", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32,
                        "image_size": 32, "patch_size": 8}),
        "swin": ("Swin", {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}),
    }  # fmt: skip
    family, sizes = configs[name]
    config = getattr(transformers, f"{family}Config")(**sizes, num_labels=5)
    model = getattr(transformers, f"{family}ForImageClassification")(config).eval()
    images = torch.randn(2, 3, 32, 32)
    graph = ifso.trace(model, {"pixel_values": images})
    assert graph.num_units >= 32
    keep = {group.name: torch.arange(group.size) % 4 != 1 for group in graph.groups}
    keep = ifso.balance(graph, keep)
    with torch.no_grad():
        with ifso.masked(model, graph, keep):
            soft = model(pixel_values=images).logits
        before = parameters(model)
        ifso.compact_(model, graph, keep)
        hard = model(pixel_values=images).logits
    assert parameters(model) < before
    torch.testing.assert_close(soft, hard, rtol=1e-4, atol=1e-5)


def test_lightning(tmp_path, few_samples):
    pytest.importorskip("pytorch_lightning", reason=EXTRA)
    module = example("lightning_module")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, accuracy = module.main(**quiet, enable_checkpointing=False, default_root_dir=tmp_path)
    assert accuracy > 0.8
    assert parameters(model) < 0.8 * parameters(module.Classifier())
    ifso.save(model, tmp_path / "run")
    assert same(model, ifso.load(tmp_path / "run", module.Classifier()), 2, 1, 8, 8)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of examples/hub_folder.py, and the network in it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hub") / "network"
    return folder, example("hub_folder").write(folder)


class TestHubFolder:
    def test_it_loads_from_a_copy_elsewhere(self, written, tmp_path):
        folder, model = written
        shutil.copytree(folder, tmp_path / "copy")
        again = example("hub_folder").read(tmp_path / "copy")
        assert isinstance(again, nn.Module)
        assert same(model, again, 2, 1, 8, 8)

    def test_its_files_name_no_place_on_this_machine(self, written):
        folder, _ = written
        for path in folder.iterdir():
            assert str(folder.parent).encode() not in path.read_bytes()

    def test_just_its_files_are_pushed(self, written, tmp_path, monkeypatch):
        hub = pytest.importorskip("huggingface_hub", reason="it is not installed; it comes with timm")
        import huggingface_hub.hf_api as hf_api

        pushed = []

        class Offline(hub.HfApi):
            """Chooses the files as always, and notes them in place of sending."""

            def _validate_yaml(self, content, **_):
                assert hub.ModelCard(content).data.library_name == "ifso"

            def create_commit(self, repo_id, operations, **_):
                pushed.extend((repo_id, operation.path_in_repo) for operation in operations)

        monkeypatch.setattr(hf_api, "is_xet_available", lambda: False, raising=False)
        folder = shutil.copytree(written[0], tmp_path / "copy")
        (folder / ".lock").touch()
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "1.safetensors").touch()
        module = example("hub_folder")
        module.push(folder, "somebody/small", Offline())
        assert sorted(pushed) == [("somebody/small", name) for name in sorted(module.FILES)]


def squares(folder, number=8, size=64):
    """Red and green squares on noise, as ultralytics wants them; the file that describes them."""
    image_of = pytest.importorskip("PIL.Image").fromarray
    random = torch.Generator().manual_seed(0)
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for place in range(number):
        x, y, colour = torch.randint(2, 40, (3,), generator=random).tolist()
        pixels = torch.randint(0, 90, (size, size, 3), generator=random, dtype=torch.uint8)
        pixels[y : y + 20, x : x + 20, colour % 2] = 255
        image_of(pixels.numpy()).save(folder / "images" / f"{place}.png")
        box = " ".join(str(number / size) for number in (x + 10, y + 10, 20, 20))
        (folder / "labels" / f"{place}.txt").write_text(f"{colour % 2} {box}\n")
    described = folder / "data.yaml"
    described.write_text(f"path: {folder}\ntrain: images\nval: images\nnames: {{0: red, 1: green}}\n")
    return str(described)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yolov8n", "yolo11n"])
def test_ultralytics_yolo(name, tmp_path, monkeypatch, capsys):
    """The trainer keeps the pruned shapes, its checkpoint holds them, and both exported files give what they should."""
    for variable, value in {"AUTOINSTALL": "false", "OFFLINE": "true", "CONFIG_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"YOLO_{variable}", value)
    pytest.importorskip("ultralytics", reason="it is not installed; pip install ultralytics")
    pytest.importorskip("onnx", reason='it is not installed; pip install "ifso[onnx]"')
    runtime = pytest.importorskip("onnxruntime", reason='it is not installed; pip install "ifso[onnx]"')
    from ultralytics import YOLO
    from ultralytics.utils import ROOT, YAML
    from ultralytics.utils.torch_utils import strip_optimizer

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    (file,) = (ROOT / "cfg" / "models").rglob(f"{name[:-1]}.yaml")
    YAML.save(f"{name}.yaml", {**YAML.load(file), "nc": 2, "scales": {"n": [0.33, 0.125, 1024]}})
    YOLO(f"{name}.yaml").save("best.pt")
    strip_optimizer("best.pt")
    options = {"imgsz": 64, "epochs": 1, "batch": 4, "workers": 0, "device": "cpu", "plots": False, "simplify": False}
    yolo, onnx, script = example("ultralytics_yolo").main(
        f"{name}.yaml", squares(tmp_path / "data"), images=8, **options
    )
    assert "budget met" in capsys.readouterr().out
    assert parameters(yolo.model) < 0.8 * parameters(YOLO(f"{name}.yaml").model)
    assert parameters(YOLO(yolo.trainer.best).model) == parameters(yolo.model)
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        wanted = yolo.model.eval()(images)[0]
    session = runtime.InferenceSession(onnx)
    found = session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
    assert torch.allclose(torch.from_numpy(found), wanted, rtol=1e-3, atol=1e-3)
    assert torch.allclose(torch.jit.load(script)(images), wanted, rtol=1e-3, atol=1e-3)
