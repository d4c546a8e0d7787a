"""Are the GPU kernels there, and do they take these tensors?"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ifso.curvature.joining import is_dense


def quick(*tensors: Tensor) -> bool:
    """Can :mod:`ifso.curvature.kernels` take these: on the current GPU, [N, C, …] in one dense layout, no float64?"""
    first = tensors[0]
    return (
        first.is_cuda
        and first.device.index == torch.cuda.current_device()  # where Triton would put them
        and first.dim() in (3, 4, 5)
        and is_dense(first)
        and all(
            tensor.dtype != torch.float64 and tensor.stride() == first.stride() and tensor.shape == first.shape
            for tensor in tensors
        )
        and _has_triton()
    )


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def kernels() -> Any:
    """The module with the kernels; only where :func:`quick` said yes."""
    return import_module("ifso.curvature.kernels")
