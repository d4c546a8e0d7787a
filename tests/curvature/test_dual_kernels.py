"""The GPU kernels of dual numbers, which Triton's interpreter runs on a CPU, against autograd in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

INTERPRETED = """
import json
import torch
import torch.nn.functional as F
from ifso.curvature import kernels

torch.set_num_threads(1)
torch.manual_seed(0)

def off(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())

def along(function, point, direction):
    return torch.func.jvp(function, point, direction)

results = {}
functions = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
for name, function in functions.items():
    for layout in ("contiguous", "channels last"):
        x, x_dot, lam, lam_dot = (3 * torch.randn(2, 5, 7, 19) for _ in range(4))
        if layout == "channels last":
            x, x_dot, lam, lam_dot = (t.to(memory_format=torch.channels_last) for t in (x, x_dot, lam, lam_dot))
        wide = [t.double() for t in (x, x_dot, lam, lam_dot)]
        y, y_dot = along(function, (wide[0],), (wide[1],))
        pull = lambda x, lam: torch.func.vjp(function, x)[1](lam)[0]
        back, moved = along(pull, (wide[0], wide[2]), (wide[1], wide[3]))
        still = along(lambda x: pull(x, wide[2]), (wide[0],), (wide[1],))[1]
        found = kernels.activation_forward(name, x, x_dot)
        pulled = kernels.activation_backward(name, lam, lam_dot, x, x_dot)
        alone = kernels.activation_backward(name, lam, None, x, x_dot)
        pairs = zip((*found, *pulled, *alone), (y, y_dot, back, moved, back, still), strict=True)
        results[f"{name}, {layout}"] = [off(*pair) for pair in pairs]
    far = torch.tensor([-200.0, -30.0, 30.0, 200.0])
    whole = [*kernels.activation_forward(name, far, far), *kernels.activation_backward(name, far, far, far, far)]
    results[f"{name}, far out"] = [0.0 if all(bool(t.isfinite().all()) for t in whole) else 1.0]
print(json.dumps(results))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
def test_kernels_of_activations_give_what_float64_gives():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == 9
    assert max(max(each) for each in errors.values()) < 1e-5, errors
