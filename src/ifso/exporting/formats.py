"""The formats of exported networks, ``torch.export`` programs and ONNX files: how each is written, and run again."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ifso.common.files import storable
from ifso.common.module_state import named_tensors
from ifso.common.text import one_line
from ifso.common.torch_state import forget_caches, quiet_torch
from ifso.errors import ExportError, required
from ifso.exporting.samples import BATCH, Sample
from ifso.models.detectors import is_detector

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

LONGEST = 300
"""Characters of what PyTorch says that are passed on."""


def program_of(model: nn.Module, sample: Sample) -> torch.export.ExportedProgram:
    """The network, which is in eval mode, as a program, without the example and the lines of source it comes from."""
    inputs = sample.for_tracing()
    forget_caches(model)
    with hushed("torch.export", model, static=sample.static), quiet_torch():
        program = torch.export.export(
            model, inputs.args, inputs.kwargs, dynamic_shapes=sample.dynamic_shapes(), strict=False
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    program.example_inputs = None
    return program


def write_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """As .pt2; put together in memory, because PyTorch ends the process if it cannot write what it is packing."""
    packed = io.BytesIO()
    torch.export.save(program, packed)
    with path.open("wb") as file:
        file.write(packed.getbuffer())


def run_program(path: Path, samples: Sequence[Sample]) -> list[list[Tensor]]:
    """What a program in a file gives for each of the samples, computed by a fresh process without ifso."""
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = Path(folder) / "inputs.safetensors", Path(folder) / "outputs.safetensors"
        flat = {f"{s}.{t}": tensor for s, sample in enumerate(samples) for t, tensor in enumerate(sample.tensors)}
        save_file(storable(flat), inputs)
        worker = f"{inspect.getsource(_run_stored)}\n_run_stored(*__import__('sys').argv[1:])"
        command = [sys.executable, "-P", "-c", worker, str(path), str(inputs), str(outputs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise ExportError(
                f"a fresh process cannot run the program: {one_line(said[-1], LONGEST)}; nothing was written"
            )
        found = load_file(outputs)
    counts = [sum(name.startswith(f"{number}.") for name in found) for number in range(len(samples))]
    return [[found[f"{number}.{place}"] for place in range(count)] for number, count in enumerate(counts)]


def _run_stored(program: str, inputs: str, outputs: str) -> None:
    """All that a fresh process knows: runs a program on stored inputs, without ifso.

    Inputs and outputs are named by sample and place: ``2.0`` is the first tensor of the third sample.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from torch.utils._pytree import tree_leaves, tree_unflatten

    with open(program, "rb") as file:  # noqa: PTH123
        loaded = torch.export.load(file)
    module, spec = loaded.module(), loaded.call_spec.in_spec
    stored = load_file(inputs)
    results = {}
    for sample in sorted({name.partition(".")[0] for name in stored}):
        count = sum(name.startswith(f"{sample}.") for name in stored)
        args, kwargs = tree_unflatten([stored[f"{sample}.{place}"] for place in range(count)], spec)
        with torch.no_grad():
            leaves = tree_leaves(module(*args, **kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        results.update({f"{sample}.{place}": tensor.clone().contiguous() for place, tensor in enumerate(tensors)})
    save_file(results, outputs)


@contextlib.contextmanager
def hushed(what: str, model: nn.Module, *, static: bool) -> Iterator[None]:
    """No warnings, log lines and printed graphs from within PyTorch; what it fails with as one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    except ExportError:
        raise
    except Exception as error:
        fixed = "" if static else "; if its batch cannot vary, export it with a fixed one (--static, static=True)"
        raise ExportError(f"{type(model).__name__} cannot be exported by {what}: {said(error)}{fixed}") from error
    finally:
        logging.disable(before)


def said(error: BaseException) -> str:
    """The root of an error, as one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    first = next((line for line in lines if not line.startswith("Constraints violated")), "no message")
    return f"{type(error).__name__}: {one_line(first, LONGEST)}"


PACKAGES = ("onnx", "onnxscript", "onnxruntime")
MOST_BYTES = 2**31 - 2**20
"""An ONNX file is one message, which holds less than 2 GiB; weights in further files are not written."""

OF_DETECTORS = 17
"""The opset of PyTorch's older exporter, which detectors need, unless told otherwise."""


def need_packages() -> None:
    """ExportError unless all that is needed for ONNX can be imported."""
    for name in PACKAGES:
        required(name, f"ONNX files need {name}", "onnx", ExportError)


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
