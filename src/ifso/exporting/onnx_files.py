"""ONNX files: written by PyTorch's exporter, run by onnxruntime."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ifso.common.module_state import named_tensors
from ifso.common.text import one_line
from ifso.common.torch_state import forget_caches, quiet_torch
from ifso.errors import ExportError
from ifso.exporting.samples import BATCH, Sample
from ifso.exporting.torch_programs import hushed, program_of
from ifso.models.detectors import is_detector

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
MOST_BYTES = 2**31 - 2**20
"""An ONNX file is one message, which holds less than 2 GiB; weights in further files are not written."""

OF_DETECTORS = 17
"""The opset of PyTorch's older exporter, which detectors need, unless told otherwise."""


def need_packages() -> None:
    """ExportError unless all that is needed for ONNX can be imported."""
    for name in PACKAGES:
        try:
            import_module(name)
        except ImportError as error:
            raise ExportError(
                f'ONNX files need {name}, which cannot be imported ({one_line(error)}); pip install "ifso[onnx]"'
            ) from error


def write_onnx(model: nn.Module, sample: Sample, path: Path, opset: int | None, outputs: Sequence[str]) -> int:
    """Write the network, which is in eval mode; ``outputs`` are names. The opset of the file is returned."""
    _refuse_large(model)
    if is_detector(model):
        return _write_detector(model, sample, path, opset or OF_DETECTORS, outputs)
    program = program_of(model, sample)
    inputs = [name for name, _ in sample.described(model)]
    with hushed("torch.onnx", model, static=sample.static), quiet_torch():
        exported = torch.onnx.export(
            program, dynamo=True, verbose=False, opset_version=opset, input_names=inputs, output_names=list(outputs)
        )
    assert exported is not None
    found = exported.model.opset_imports[""]
    if opset not in (None, found):
        raise ExportError(f"PyTorch cannot write opset {opset} and made {found}; give another --opset, or none")
    _tidy(exported.model)
    exported.save(str(path), external_data=False)
    return found


def open_onnx(path: Path) -> InferenceSession:
    """Ready to run on the CPU with as many threads as torch takes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"onnxruntime cannot open the file that was made: {one_line(error)}") from error


def run_onnx(path: Path, samples: Sequence[Sample]) -> list[list[Tensor]]:
    """What a file gives for each of the samples."""
    session = open_onnx(path)
    names = [entry.name for entry in session.get_inputs()]
    results = []
    for sample in samples:
        feed = {name: tensor.numpy() for name, tensor in zip(names, sample.tensors, strict=True)}
        try:
            results.append([torch.as_tensor(result) for result in session.run(None, feed)])
        except Exception as error:
            raise ExportError(
                f"onnxruntime fails on a batch of {sample.batch}: {one_line(error)}; nothing was written"
            ) from error
    return results


def _refuse_large(model: nn.Module) -> None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in named_tensors(model).values())
    if size > MOST_BYTES:
        raise ExportError(
            f"{type(model).__name__} has {size / 2**30:.1f} GiB of weights, and an ONNX file holds less than 2; "
            "export it as a torch.export program (--to torch)"
        )


def _write_detector(model: nn.Module, sample: Sample, path: Path, opset: int, outputs: Sequence[str]) -> int:
    """By PyTorch's older exporter: torchvision's detectors have ways of their own for it, and none for torch.export."""
    forget_caches(model)
    inputs = [name for name, _ in sample.described(model)]
    with hushed("torch.onnx", model, static=True), quiet_torch():
        torch.onnx.export(
            model, sample.args, str(path), dynamo=False, opset_version=opset, input_names=inputs,
            output_names=list(outputs),
        )  # fmt: skip
    return opset


def _tidy(model: Any) -> None:
    """Call the batch by its name, and leave out notes on the source that each node came from."""
    symbols = {dim.value for entry in model.graph.inputs for dim in entry.shape[:1] if not isinstance(dim, int)}
    for value in (*model.graph.inputs, *(output for node in model.graph for output in node.outputs)):
        value.metadata_props.clear()
        for place, dim in enumerate(value.shape or ()):
            for symbol in () if isinstance(dim, int) else symbols:
                value.shape[place] = re.sub(rf"\b{symbol}\b", BATCH, str(value.shape[place]))
    for node in model.graph:
        node.metadata_props.clear()
