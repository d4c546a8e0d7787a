"""Networks by name, their weights, and the inputs they are traced with."""

import argparse
import os
import sys
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ifso.errors import ModelNotFound, TraceError, WeightsError
from ifso.models import create_model, default_inputs, load_weights
from ifso.models.registry import OWN
from ifso.models.resnet import PaddedShortcut


def weights_of(model):
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))


def macs(model, inputs):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(inputs)
    return counter.get_total_flops() // 2


@pytest.fixture
def no_download(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)


class TestNetworks:
    def test_resnet32_is_the_papers(self):
        model = create_model("ifso:resnet32")
        assert weights_of(model) == 464_432
        assert macs(model, torch.randn(1, 3, 32, 32)) == 69_124_736

    def test_vgg16_has_13_convolutions_and_one_linear(self):
        model = create_model("ifso:vgg16")
        assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 13
        assert [m.in_features for m in model.modules() if isinstance(m, nn.Linear)] == [512]
        assert macs(model, torch.randn(1, 3, 32, 32)) == 313_201_664

    def test_keys_are_those_of_the_authors_weights(self):
        keys = set(create_model("ifso:resnet32").state_dict())
        assert len(keys) == 200
        assert {"conv1.weight", "bn1.running_mean", "layer1.4.conv2.weight", "fc.bias"} <= keys
        assert {"layer2.0.downsample.0.weight", "layer3.0.downsample.1.running_var"} <= keys
        assert not any(key.startswith(("layer1.0.downsample", "layer2.1.downsample")) for key in keys)

    def test_padded_shortcuts_have_no_parameters(self):
        model = create_model("ifso:resnet56-padded")
        assert not any("downsample" in key for key in model.state_dict())
        shortcuts = {n: (m.front, m.back) for n, m in model.named_modules() if isinstance(m, PaddedShortcut)}
        assert shortcuts == {"layer2.0.downsample": (8, 8), "layer3.0.downsample": (16, 16)}

    def test_padded_shortcut_follows_its_attributes(self):
        shortcut = PaddedShortcut(front=2, back=1)
        x = torch.randn(1, 3, 4, 4)
        assert torch.equal(shortcut(x)[:, 2:5], x[:, :, ::2, ::2])
        assert shortcut(x)[:, [0, 1, 5]].abs().sum() == 0
        shortcut.front, shortcut.back = 0, 2
        assert shortcut(x).shape == (1, 5, 2, 2)
        assert torch.equal(shortcut(x)[:, :3], x[:, :, ::2, ::2])

    @pytest.mark.parametrize("name", OWN)
    def test_own_networks_run(self, name):
        model = create_model(f"ifso:{name}", num_classes=7).eval()
        image = default_inputs(f"ifso:{name}", model)
        assert model(image.expand(2, -1, -1, -1)).shape == (2, 7)


class TestNames:
    def test_torchvision(self, no_download):
        assert create_model("torchvision:mobilenet_v3_small", num_classes=5).classifier[-1].out_features == 5
        with pytest.raises(ModelNotFound, match="says num_classes=2, but 10 are needed"):
            create_model("ifso:resnet20,num_classes=2", num_classes=10)

    def test_torchvision_backbones_are_not_downloaded(self, no_download):
        assert isinstance(create_model("torchvision:lraspp_mobilenet_v3_large"), nn.Module)

    def test_timm_with_options(self):
        model = create_model("timm:test_resnet", num_classes=5, in_chans=1)
        assert model(torch.randn(2, 1, 64, 64)).shape == (2, 5)

    @pytest.mark.parametrize(
        ("name", "suggestion"),
        [
            ("torchvision:resnet51", "torchvision:resnet50"),
            ("timm:resnest", "timm:resne"),
            ("ifso:resnet57", "ifso:resnet56"),
            ("resnet56", "ifso:resnet56"),
            ("torchvison:resnet50", "torchvision:resnet50"),
        ],
    )
    def test_unknown_names_come_with_close_ones(self, name, suggestion):
        with pytest.raises(ModelNotFound) as caught:
            create_model(name)
        message = str(caught.value)
        assert repr(name) in message
        assert f"did you mean {suggestion}" in message or f", {suggestion}" in message
        assert "\n" not in message

    @pytest.mark.parametrize("name", ["", "nonsense:x", "ifso:", "timm:"])
    def test_hopeless_names_are_refused(self, name):
        with pytest.raises(ModelNotFound, match=r"there are .* more|write torchvision:NAME"):
            create_model(name)

    @pytest.mark.parametrize("package", ["torchvision", "timm"])
    def test_a_missing_package_says_what_to_install(self, package, monkeypatch):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.models", None)
        with pytest.raises(ModelNotFound, match=r'pip install "ifso\[vision\]"'):
            create_model(f"{package}:resnet18")
        with pytest.raises(ModelNotFound, match="did you mean ifso:resnet56"):
            create_model("resnet56")


FILE = """
from torch import nn
from helper import WIDTH

def make(width=WIDTH):
    return nn.Linear(width, 2)

def wrong():
    return "no module"

def broken():
    raise ValueError("not today")
"""


class TestPublishedWeights:
    def test_the_head_is_new_where_there_are_other_classes(self, monkeypatch):
        from torchvision.models import WeightsEnum, squeezenet1_1

        published = squeezenet1_1().state_dict()
        monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: published)
        model = create_model("torchvision:squeezenet1_1", num_classes=7, pretrained=True)
        found = model.state_dict()
        assert found["classifier.1.weight"].shape[0] == 7
        assert all(torch.equal(found[name], published[name]) for name in found if not name.startswith("classifier"))
        whole = create_model("torchvision:squeezenet1_1", num_classes=1000, pretrained=True).state_dict()
        assert all(torch.equal(whole[name], published[name]) for name in published)

    def test_without_a_network_it_ends_soon_with_one_line(self, monkeypatch, tmp_path, capfd):
        from huggingface_hub import constants

        def fails(*_):
            raise OSError("Name or service not known")

        monkeypatch.setattr("ifso.models.registry.getproxies", dict)
        monkeypatch.setattr("ifso.models.registry.socket.getaddrinfo", fails)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        began = time.monotonic()
        with pytest.raises(ModelNotFound, match=r"cannot be built with pretrained=True: .*give their file with"):
            create_model("timm:resnet10t", pretrained=True)
        assert time.monotonic() - began < 20
        assert "Retrying" not in capfd.readouterr().err
        assert not constants.HF_HUB_OFFLINE


class TestFiles:
    @pytest.fixture
    def file(self, tmp_path):
        (tmp_path / "helper.py").write_text("WIDTH = 3")
        path = tmp_path / "net.py"
        path.write_text(FILE)
        return path

    def test_the_factory_is_called_without_arguments_or_with_options(self, file):
        before = list(sys.path)
        assert create_model(f"{file}:make").in_features == 3
        assert create_model(f"{file}:make", width=4).in_features == 4
        assert sys.path == before

    @pytest.mark.parametrize(
        ("factory", "message"),
        [
            ("mak", "has no function 'mak'; did you mean make"),
            ("wrong", "returned str; it must return a torch.nn.Module"),
            ("broken", "failed: ValueError: not today"),
            ("", "has no function ''"),
        ],
    )
    def test_bad_factories(self, file, factory, message):
        with pytest.raises(ModelNotFound, match=message):
            create_model(f"{file}:{factory}")

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(ModelNotFound, match=r"no file .*nothing\.py"):
            create_model(f"{tmp_path}/nothing.py:make")

    def test_a_file_with_an_error(self, tmp_path):
        path = tmp_path / "bad.py"
        path.write_text("def make(:")
        with pytest.raises(ModelNotFound, match=r"bad\.py cannot be imported: SyntaxError"):
            create_model(f"{path}:make")


class TestWeights:
    @pytest.fixture
    def source(self):
        model = create_model("ifso:resnet20")
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.num_batches_tracked.fill_(3)
        return model

    def assert_loaded(self, model, source):
        for key, value in source.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key

    @pytest.mark.parametrize("suffix", ["safetensors", "pt", "pth"])
    def test_formats(self, source, suffix, tmp_path):
        path = tmp_path / f"w.{suffix}"
        (save_file if suffix == "safetensors" else torch.save)(source.state_dict(), path)
        self.assert_loaded(create_model("ifso:resnet20", weights=path), source)

    @pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
    def test_wrappers_and_prefixes(self, source, prefix, tmp_path):
        state = {prefix + key: value for key, value in source.state_dict().items()}
        torch.save({"state_dict": state, "epoch": 3}, tmp_path / "w.pth")
        self.assert_loaded(create_model("ifso:resnet20", weights=tmp_path / "w.pth"), source)

    def test_a_prefix_of_the_models_own_is_kept(self, tmp_path):
        source, model = (nn.ModuleDict({"model": nn.Linear(2, 2)}) for _ in range(2))
        torch.save({"model": source.state_dict()}, tmp_path / "w.pth")
        load_weights(model, tmp_path / "w.pth")
        self.assert_loaded(model, source)

    def test_other_names_and_no_counters(self, source, tmp_path):
        state = {
            key.replace("fc.", "linear."): value
            for key, value in source.state_dict().items()
            if not key.endswith("num_batches_tracked")
        }
        save_file(state, tmp_path / "w.safetensors")
        model = create_model("ifso:resnet20", weights=tmp_path / "w.safetensors")
        assert torch.equal(model.fc.weight, source.fc.weight)
        assert torch.equal(model.layer3[2].bn2.running_mean, source.layer3[2].bn2.running_mean)
        assert model.bn1.num_batches_tracked == 0

    def test_misfits_are_named_and_nothing_is_loaded(self, source, tmp_path):
        state = source.state_dict()
        del state["conv1.weight"]
        state["extra.weight"] = torch.ones(1)
        state["fc.bias"] = torch.ones(100)
        save_file(state, tmp_path / "w.safetensors")
        model = create_model("ifso:resnet20")
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(WeightsError) as caught:
            load_weights(model, tmp_path / "w.safetensors")
        for part in ("1 missing (conv1.weight)", "1 unexpected (extra.weight)", "fc.bias [100] for [10]"):
            assert part in str(caught.value)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    def test_weights_of_another_network(self, tmp_path):
        save_file(create_model("ifso:resnet32").state_dict(), tmp_path / "w.safetensors")
        with pytest.raises(WeightsError, match=r"72 unexpected \(layer1\.3\.bn1\.\w+, .*, …\)"):
            create_model("ifso:resnet20", weights=tmp_path / "w.safetensors")

    @pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
    def test_damaged_files(self, name, tmp_path):
        (tmp_path / name).write_bytes(b"not weights at all")
        with pytest.raises(WeightsError, match="is damaged"):
            create_model("ifso:resnet20", weights=tmp_path / name)

    def test_pickled_objects_are_refused(self, source, tmp_path):
        torch.save(source, tmp_path / "w.pth")
        with pytest.raises(WeightsError, match="holds more than tensors"):
            create_model("ifso:resnet20", weights=tmp_path / "w.pth")

    @pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, torch.ones(2)])
    def test_a_checkpoint_without_weights(self, content, tmp_path):
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(WeightsError, match="holds no state dict"):
            create_model("ifso:resnet20", weights=tmp_path / "w.pt")

    def test_missing_and_strange_files(self, tmp_path):
        with pytest.raises(WeightsError, match="no weight file"):
            create_model("ifso:resnet20", weights=tmp_path / "w.pth")
        (tmp_path / "w.onnx").write_bytes(b"\x08\x07 no weights")
        with pytest.raises(WeightsError, match=r"w\.onnx is damaged or holds more than tensors"):
            create_model("ifso:resnet20", weights=tmp_path / "w.onnx")

    @pytest.mark.parametrize("name", ["w.pth.tar", "epoch=3.ckpt", "pytorch_model.bin", "weights"])
    @pytest.mark.parametrize("wrapper", ["model", "state_dict", "model_state_dict", "state_dict_ema"])
    def test_checkpoints_are_known_by_their_content(self, source, name, wrapper, tmp_path):
        arguments = argparse.Namespace(lr=0.1, data=["a"], nested=argparse.Namespace(seed=1))
        torch.save({"epoch": 3, wrapper: source.state_dict(), "args": arguments}, tmp_path / name)
        self.assert_loaded(create_model("ifso:resnet20", weights=tmp_path / name), source)

    def test_safetensors_under_another_name(self, source, tmp_path):
        save_file(source.state_dict(), tmp_path / "model.bin")
        self.assert_loaded(create_model("ifso:resnet20", weights=tmp_path / "model.bin"), source)

    def test_the_average_is_taken_where_there_is_nothing_else(self, source, tmp_path):
        average = {key: torch.zeros_like(value) for key, value in source.state_dict().items()}
        torch.save({"state_dict_ema": average, "state_dict": source.state_dict()}, tmp_path / "w.pth.tar")
        self.assert_loaded(create_model("ifso:resnet20", weights=tmp_path / "w.pth.tar"), source)

    def test_nothing_in_an_argparse_namespace_is_run(self, source, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "executed"),)

        torch.save({"model": source.state_dict(), "args": argparse.Namespace(evil=Evil())}, tmp_path / "w.ckpt")
        with pytest.raises(WeightsError, match=r"w\.ckpt is damaged or holds more than tensors \([Uu]nsupported"):
            create_model("ifso:resnet20", weights=tmp_path / "w.ckpt")
        assert not (tmp_path / "executed").exists()


class TestDefaultInputs:
    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("ifso:vgg16", (1, 3, 32, 32)),
            ("ifso:resnet8-digits", (1, 1, 8, 8)),
            ("timm:test_resnet", (1, 3, 160, 160)),
            ("torchvision:resnet18", (1, 3, 224, 224)),
            ("torchvision:swin_v2_t", (1, 3, 256, 256)),
            ("torchvision:vit_b_32", (1, 3, 224, 224)),
            ("torchvision:lraspp_mobilenet_v3_large", (1, 3, 224, 224)),
            ("torchvision:mc3_18", (1, 3, 16, 112, 112)),
        ],
    )
    def test_shapes(self, name, shape):
        with torch.device("meta"):
            model = create_model(name)
        assert default_inputs(name, model).shape == shape

    def test_a_model_with_a_size_of_its_own(self):
        with torch.device("meta"):
            model = create_model("torchvision:vit_b_32", image_size=64)
        assert default_inputs("torchvision:vit_b_32", model).shape == (1, 3, 64, 64)

    def test_detectors_take_a_list_of_images(self):
        name = "torchvision:ssdlite320_mobilenet_v3_large"
        model = create_model(name, num_classes=3).eval()
        (images,) = default_inputs(name, model)
        with torch.no_grad():
            assert set(model(images)[0]) == {"boxes", "scores", "labels"}

    def test_a_file_needs_a_shape(self):
        with pytest.raises(TraceError, match=r"no example input is known for net\.py:make"):
            default_inputs("net.py:make", nn.Linear(2, 2))
