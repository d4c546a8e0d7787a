"""Narrow convolutions and batch norms: kernels against float64 in Triton's interpreter, and when they are taken."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ifso.training.precision import autocast
from ifso.training.triton_layers import TritonLayers, _Norm, _suits, available, triton_layers

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

CASES = (
    # samples, channels, height, width, out channels, side, stride, padding
    (2, 5, 7, 6, 9, 3, 1, 1),
    (3, 16, 8, 8, 16, 3, 1, 1),
    (2, 3, 9, 10, 17, 3, 2, 1),
    (2, 6, 7, 7, 5, 3, 1, 0),
    (2, 6, 7, 8, 5, 3, 3, 2),
    (1, 1, 19, 17, 1, 3, 1, 1),
    (2, 33, 5, 4, 7, 1, 1, 0),
    (2, 12, 6, 7, 20, 1, 2, 0),
    (2, 3, 4, 5, 4, 1, 1, 1),
    (1, 4, 11, 10, 6, 5, 1, 2),
    (2, 4, 9, 8, 6, 5, 2, 0),
    (2, 5, 6, 6, 7, 2, 1, 1),
    (1, 64, 13, 12, 64, 3, 1, 1),
    (2, 47, 6, 9, 31, 3, 2, 1),
)

NORMS = (
    # samples, channels, height, width
    (2, 5, 7, 6),
    (3, 16, 8, 8),
    (2, 70, 9, 9),
    (1, 64, 33, 31),
    (3, 130, 1, 1),
    (5, 1, 3, 3),
)

INTERPRETED = """
import json, sys
import torch
import torch.nn.functional as F
from ifso.training.kernels import convolution, input_gradient
from ifso.training.triton_layers import _BatchNorm, _Convolution

torch.set_num_threads(1)

def off(found, wanted):
    assert found.shape == wanted.shape and found.dtype == torch.float32
    return float((found.double() - wanted).norm() / wanted.norm())

convolutions, norms = json.loads(sys.argv[1])
results = []
for samples, channels, height, width, outs, side, stride, padding in convolutions:
    torch.manual_seed(0)
    x = torch.randn(samples, channels, height, width).to(memory_format=torch.channels_last)
    plain = torch.randn(outs, channels, side, side)
    truth = x.double().requires_grad_(), plain.double().requires_grad_()
    y = F.conv2d(*truth, None, stride, padding)
    dy = torch.randn(y.shape).to(memory_format=torch.channels_last)
    dx, dw = torch.autograd.grad(y, truth, dy.double())
    leaves = x.clone(memory_format=torch.contiguous_format).requires_grad_(), plain.requires_grad_()
    found = _Convolution.apply(*leaves, stride, padding)
    gradients = torch.autograd.grad(found, leaves, dy.contiguous())
    errors = {"y": off(found, y), "dx": off(gradients[0], dx), "dw": off(gradients[1], dw)}
    weight = plain.detach().contiguous(memory_format=torch.channels_last)
    errors["y, channels last"] = off(convolution(x, weight, stride, padding), y)
    if stride == 1:
        errors["dx, channels last"] = off(input_gradient(dy, weight, padding), dx)
    results.append(errors)
for shape in norms:
    torch.manual_seed(0)
    x = (3 * torch.randn(shape) + 50).to(memory_format=torch.channels_last)
    leaves = [x, *torch.randn(2, shape[1])]
    running = torch.randn(shape[1]), torch.rand(shape[1])
    truth, wanted = [leaf.double().requires_grad_() for leaf in leaves], [each.double() for each in running]
    y = F.batch_norm(truth[0], *wanted, *truth[1:], training=True, momentum=0.3)
    dy = torch.randn(shape).to(memory_format=torch.channels_last)
    gradients = torch.autograd.grad(y, truth, dy.double())
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    found = _BatchNorm.apply(*leaves, *running, 0.3, 1e-5)
    named = dict(zip(("dx", "dgain", "dbias"), zip(torch.autograd.grad(found, leaves, dy), gradients)))
    named |= {"y": (found, y), "mean": (running[0], wanted[0]), "variance": (running[1], wanted[1])}
    results.append({name: off(*pair) for name, pair in named.items()})
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def interpreted():
    """Relative errors of every case, by what was computed. Float32 throughout: the interpreter has no bfloat16."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, json.dumps([CASES, NORMS])],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this Triton cannot run a loop with so new a NumPy")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_give_what_float64_gives(interpreted, case):
    errors = interpreted[CASES.index(case)]
    assert len(errors) == (5 if case[6] == 1 else 4)
    assert max(errors.values()) < 2e-6, errors


@needs_triton
@pytest.mark.parametrize("case", NORMS, ids=str)
def test_batch_norms_give_what_float64_gives(interpreted, case):
    errors = interpreted[len(CASES) + NORMS.index(case)]
    assert len(errors) == 6
    assert max(errors.values()) < 5e-5, errors


@needs_triton
class TestWhenTheyAreTaken:
    @pytest.fixture(autouse=True)
    def _bfloat16_on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)

    def layer(self, **changes):
        x = {"is_cuda": True, "shape": (8, 16, 32, 32), "dtype": torch.float32, "dim": lambda: 4}
        weight = {"shape": (16, 16, 3, 3), "dtype": torch.float32, "requires_grad": True}
        for name, value in changes.items():
            kind, _, key = name.partition("_")
            if kind in {"x", "weight"}:
                (x if kind == "x" else weight)[key] = value
        geometry = [changes.get(name, (1, 1)) for name in ("stride", "padding", "dilation")]
        return _suits(SimpleNamespace(**x), SimpleNamespace(**weight), *geometry, changes.get("groups", 1))

    def test_for_small_square_layers(self):
        assert self.layer()
        assert self.layer(stride=(2, 2), padding=(0, 0), weight_shape=(64, 64, 1, 1))
        assert self.layer(x_dtype=torch.bfloat16)

    @pytest.mark.parametrize(
        "change",
        [
            {"x_is_cuda": False},
            {"groups": 16},
            {"dilation": (2, 2)},
            {"stride": (2, 1)},
            {"padding": (1, 0)},
            {"padding": "same"},
            {"weight_shape": (16, 16, 3, 1)},
            {"weight_shape": (65, 16, 3, 3)},
            {"weight_shape": (16, 65, 3, 3)},
            {"weight_requires_grad": False},
            {"x_dtype": torch.float64},
            {"weight_dtype": torch.float64},
            {"x_dim": lambda: 3},
            {"x_shape": (0, 16, 32, 32)},
            {"x_shape": (2**15, 16, 32, 32)},
        ],
        ids=", ".join,
    )
    def test_for_no_others(self, change):
        assert not self.layer(**change)

    def norm(self, **changes):
        def tensor(**values):
            usual = {"is_cuda": True, "dtype": torch.float32, "is_contiguous": lambda memory_format: True}
            return SimpleNamespace(**{**usual, **values})

        of_x = {name[2:]: value for name, value in changes.items() if name.startswith("x_")}
        x = tensor(**{"shape": (8, 16, 32, 32), "dtype": torch.bfloat16, "dim": lambda: 4, **of_x})
        x.numel = lambda: math.prod(x.shape)
        given = {"mean": tensor(), "var": tensor(), "weight": tensor(), "bias": tensor(), "training": True}
        own = {key: value for key, value in changes.items() if key in (*given, "momentum")}
        return _Norm(x, **{**given, **own}).suits()

    @pytest.mark.parametrize(
        ("change", "taken"),
        [
            ({}, True),
            ({"x_shape": (8, 512, 1, 1)}, True),
            ({"x_is_cuda": False}, False),
            ({"x_dtype": torch.float32}, False),
            ({"x_dim": lambda: 2}, False),
            ({"x_is_contiguous": lambda memory_format: False}, False),
            ({"x_shape": (1, 512, 1, 1)}, False),
            ({"x_shape": (2**14, 128, 32, 32)}, False),
            ({"training": False}, False),
            ({"momentum": None}, False),
            ({"weight": None}, False),
            ({"mean": None, "var": None}, False),
            ({"bias": SimpleNamespace(dtype=torch.float64)}, False),
        ],
        ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
    )
    def test_for_norms_in_training(self, change, taken):
        assert self.norm(**change) is taken

    def test_not_without_bfloat16(self, monkeypatch):
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float16)
        assert not self.layer()
        monkeypatch.undo()
        assert not self.layer()


def layers():
    return {
        "square": nn.Conv2d(8, 12, 3, padding=1),
        "groups": nn.Conv2d(8, 8, 3, groups=4),
        "dilation": nn.Conv2d(8, 8, 3, dilation=2),
        "same": nn.Conv2d(8, 8, 3, padding="same"),
        "mirrored": nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
    }


@needs_triton
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_on_a_cpu_everything_is_left_alone(precision):
    torch.manual_seed(0)
    for layer in layers().values():
        x, found = torch.randn(2, 8, 9, 9), []
        for within in (False, True):
            with autocast(precision, "cpu"), TritonLayers() if within else autocast(precision, "cpu"):
                y = layer(x)
            (gradient,) = torch.autograd.grad(y.float().square().sum(), layer.weight)
            assert type(y.grad_fn).__name__ != "_ConvolutionBackward"
            found.append((y, gradient))
        assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_where_they_can_be_had():
    assert available() == (importlib.util.find_spec("triton") is not None)
    for precision, device, fits in (
        ("bf16", "cuda", available()), ("bf16", "cpu", False), ("fp16", "cuda", False), ("float32", "cuda", False)
    ):  # fmt: skip
        found = triton_layers(precision, torch.device(device))
        assert isinstance(found, TritonLayers) is fits, (precision, device)


# ----------------------------------------------------------------------------------------------------- on a GPU


def off(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@gpu
@needs_triton
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_bfloat16_they_are_as_good_as_the_plain_layers(case, bias):
    """Errors against float64 of the layer and of all its gradients, next to those of torch's own layer."""
    samples, channels, height, width, outs, side, stride, padding = case
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, outs, side, stride, padding, bias=bias).cuda()
    x = torch.randn(samples, channels, height, width, device="cuda", requires_grad=True)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, *layer.parameters())]
    y = F.conv2d(exact[0], exact[1], exact[2] if bias else None, stride, padding)
    dy = torch.randn(y.shape, device="cuda")
    wanted = [y, *torch.autograd.grad(y, exact, dy.double())]
    errors = []
    for narrow in (True, False):
        with autocast("bf16", "cuda"), TritonLayers() if narrow else autocast("bf16", "cuda"):
            y = layer(x)
        assert y.dtype == torch.bfloat16
        if not bias:
            assert (type(y.grad_fn).__name__ == "_ConvolutionBackward") is narrow
        found = [y, *torch.autograd.grad(y, (x, *layer.parameters()), dy.bfloat16())]
        assert all(tensor.dtype == torch.float32 for tensor in found[1:])
        errors.append([off(one, two) for one, two in zip(found, wanted, strict=True)])
    for ours, plain in zip(*errors, strict=True):
        assert ours < 1.5 * plain + 1e-3
        assert ours < 2e-2


@gpu
@needs_triton
@pytest.mark.parametrize("case", [*NORMS, (128, 16, 32, 32), (64, 512, 4, 4)], ids=str)
def test_batch_norms_in_bfloat16_are_as_good_as_torchs(case):
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(case[1]).cuda() for _ in range(2)]
    x = (2 * torch.randn(case, device="cuda") + 3).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
    dy = torch.randn(case, device="cuda").bfloat16()
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, norms[0].weight, norms[0].bias)]
    y = F.batch_norm(exact[0], None, None, *exact[1:], training=True)
    wanted, errors = [y, *torch.autograd.grad(y, exact, dy.double())], []
    for norm, ours in zip(norms, (True, False), strict=True):
        with autocast("bf16", "cuda"), TritonLayers() if ours else autocast("bf16", "cuda"):
            y = norm(x)
        assert (type(y.grad_fn).__name__ == "_BatchNormBackward") is ours
        assert y.dtype == torch.bfloat16
        assert y.is_contiguous(memory_format=torch.channels_last)
        found = [y, *torch.autograd.grad(y, (x, norm.weight, norm.bias), dy)]
        errors.append([off(one, two) for one, two in zip(found, wanted, strict=True)])
    for ours, plain in zip(*errors, strict=True):
        assert ours < 1.5 * plain + 1e-3
    for name, buffer in norms[0].named_buffers():
        torch.testing.assert_close(buffer, dict(norms[1].named_buffers())[name], rtol=1e-4, atol=1e-5)


@gpu
@needs_triton
def test_on_a_gpu_other_layers_are_left_alone():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 9, 9, device="cuda")
    for name, layer in layers().items():
        layer.cuda()
        for precision, taken in (("bf16", name in {"square", "mirrored"}), ("fp16", False), ("float32", False)):
            names = []
            with autocast(precision, "cuda"), TritonLayers():
                node = layer(x).grad_fn
            while node is not None:
                names.append(type(node).__name__)
                # torch 2.11 does not tell what comes before a function of ours, where the search may end
                before = () if names[-1] == "_ConvolutionBackward" else node.next_functions
                node = before[0][0] if before else None
            assert ("_ConvolutionBackward" in names) is taken, (name, precision)


@gpu
@needs_triton
def test_results_repeat_bit_for_bit():
    from ifso.training.kernels import convolution, input_gradient, weight_gradient

    torch.manual_seed(0)
    x = torch.randn(64, 16, 32, 32, device="cuda").bfloat16().to(memory_format=torch.channels_last)
    weight = torch.randn(16, 16, 3, 3, device="cuda")
    found = [
        (convolution(x, weight, 1, 1), input_gradient(x, weight, 1), weight_gradient(x, x, 3, 1, 1)) for _ in range(3)
    ]
    assert all(torch.equal(one, two) for other in found[1:] for one, two in zip(found[0], other, strict=True))
