"""ONNX files in tests: run where onnxruntime is installed, left out with the reason where it is not."""

import pytest

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def need_onnx():
    """Skip the test unless ``ifso[onnx]`` is installed, as it is with ``ifso[test]``."""
    for name in PACKAGES:
        pytest.importorskip(name, reason=f"ONNX files are not tested: {name} of ifso[onnx] is not installed")


def session_of(path):
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
