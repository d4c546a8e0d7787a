"""Detectors by name: options in the name, frozen norms, a backbone's weights from a file, their inputs."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import mobilenet_v3_large, resnet18, vgg16
from torchvision.ops import FrozenBatchNorm2d

from ifso.cli.main import main
from ifso.errors import ModelNotFound, WeightsError
from ifso.models import create_model, default_inputs
from ifso.models.registry import read_name

SMALL = "ifso:retinanet_resnet18_fpn"


@pytest.fixture
def no_download(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)


def norms(model: nn.Module) -> tuple[int, int]:
    """How many batch norms there are, and how many frozen ones."""
    kinds = [type(module) for module in model.modules()]
    return kinds.count(nn.BatchNorm2d), kinds.count(FrozenBatchNorm2d)


class TestNames:
    def test_options_follow_the_name(self, no_download):
        model = create_model(f"{SMALL},min_size=48,max_size=64,norms=frozen", num_classes=5)
        assert (model.transform.min_size, model.transform.max_size) == ((48,), 64)
        assert model.head.classification_head.num_classes == 5
        assert norms(model) == (0, 20)

    def test_values(self):
        found = read_name("nets,old/a.py:make,wide=true,depth=3,rate=0.5,kind=b/c.pth,none=none")
        assert found.source == "nets,old/a.py"
        assert found.inner == "make"
        assert found.options == {"wide": True, "depth": 3, "rate": 0.5, "kind": "b/c.pth", "none": None}

    def test_a_file_gets_them_too(self, tmp_path):
        (tmp_path / "net.py").write_text(
            "from torch import nn\ndef make(width=1, norms=''):\n    return nn.Linear(width, 2)"
        )
        assert create_model(f"{tmp_path}/net.py:make,width=4,norms=own").in_features == 4

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (f"{SMALL},min_size", "'min_size' is no option; write them as NAME,KEY=VALUE"),
            (f"{SMALL},min_szie=1", "has no option min_szie; did you mean min_size?"),
            ("torchvision:ssdlite320_mobilenet_v3_large,nms=1", "option nms|cannot be built with nms=1"),
            ("ifso:resnet20,nonsense=1", "cannot be built with nonsense=1"),
            (f"{SMALL},norms=cold", "norms='cold' is unknown; choose batch or frozen"),
            ("ifso:resnet20,norms=frozen", "is no detector; it takes no norms"),
            pytest.param(
                "torchvision:ssd300_vgg16,norms=frozen", "its backbone has no batch norms", marks=pytest.mark.slow
            ),
        ],
    )
    def test_bad_options(self, name, message):
        with pytest.raises(ModelNotFound, match=message) as caught:
            create_model(name)
        assert "\n" not in str(caught.value)

    def test_inspect_names_the_input(self, capsys):
        assert (
            main(["inspect", f"{SMALL},min_size=48,max_size=64,num_classes=3", "--input", "1,3,48,64", "--json"]) == 0
        )
        found = json.loads(capsys.readouterr().out)
        assert found["input"] == "3x48x64"
        assert found["cost"]["macs"] > 0


class TestWeights:
    def test_a_backbone_from_a_classifier(self, tmp_path):
        source = resnet18(num_classes=4)
        with torch.no_grad():
            for _, buffer in source.named_buffers():
                buffer.add_(1)
        torch.save(source.state_dict(), tmp_path / "r18.pth")
        for options in ({}, {"norms": "frozen"}):
            body = create_model(SMALL, backbone=tmp_path / "r18.pth", **options).backbone.body
            for name, tensor in body.state_dict().items():
                assert torch.equal(tensor, source.state_dict()[name]), name

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("name", "make"),
        [("ssd300_vgg16", vgg16), ("fasterrcnn_mobilenet_v3_large_fpn", mobilenet_v3_large)],
    )
    def test_other_backbones(self, name, make, tmp_path):
        source = make(num_classes=2)
        save_file(source.state_dict(), tmp_path / "w.safetensors")
        model = create_model(f"torchvision:{name}", num_classes=2, backbone=tmp_path / "w.safetensors")
        wanted = next(tensor for key, tensor in source.state_dict().items() if tensor.dim() == 4)
        found = next(tensor for tensor in model.backbone.state_dict().values() if tensor.dim() == 4)
        assert torch.equal(found, wanted)

    def test_a_file_that_is_no_backbone(self, tmp_path):
        save_file({"other.weight": torch.ones(2)}, tmp_path / "w.safetensors")
        with pytest.raises(WeightsError, match=r"holds no weights of the backbone of RetinaNet: it has other\.weight"):
            create_model(SMALL, backbone=tmp_path / "w.safetensors")
        state = resnet18().state_dict()
        del state["layer1.0.conv1.weight"]
        save_file(state, tmp_path / "w.safetensors")
        with pytest.raises(WeightsError, match=r"1 missing \(layer1\.0\.conv1\.weight\)"):
            create_model(SMALL, backbone=tmp_path / "w.safetensors")

    def test_frozen_weights_stay_frozen(self, tmp_path):
        frozen = create_model(SMALL, num_classes=3, norms="frozen")
        save_file(frozen.state_dict(), tmp_path / "w.safetensors")
        create_model(SMALL, num_classes=3, norms="frozen", weights=tmp_path / "w.safetensors")
        with pytest.raises(WeightsError, match=r"with frozen batch norms.*write the model as ifso:\S+,norms=frozen"):
            create_model(SMALL, num_classes=3, weights=tmp_path / "w.safetensors")

    def test_trained_norms_can_be_frozen(self, tmp_path):
        source = create_model(SMALL, num_classes=3)
        source.backbone.body.bn1.running_mean += 1
        save_file(source.state_dict(), tmp_path / "w.safetensors")
        model = create_model(SMALL, num_classes=3, norms="frozen", weights=tmp_path / "w.safetensors")
        assert torch.equal(model.backbone.body.bn1.running_mean, source.backbone.body.bn1.running_mean)


def test_inputs_are_always_the_same_images():
    model = create_model(SMALL, num_classes=3).eval()
    (first,), (again,) = default_inputs(SMALL, model), default_inputs(SMALL, model)
    assert first[0].shape == (3, 224, 224)
    assert torch.equal(first[0], again[0])
