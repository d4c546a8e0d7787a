"""A network as one file that others can run, checked before it takes its place."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ifso.common.files import delivering
from ifso.common.tensors import tensors_in
from ifso.common.torch_state import forget_caches, quiet_torch
from ifso.errors import ExportError, VerificationError
from ifso.exporting.formats import need_packages, program_of, run_onnx, run_program, said, write_onnx, write_program
from ifso.exporting.samples import Sample
from ifso.graph.execution import call_model, explain
from ifso.models.detectors import is_detector

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
RUNNERS = {"onnx": (run_onnx, "onnxruntime"), "torch": (run_program, "the program in a fresh process")}
OUTPUT = "output"
TOLERANCE = 1e-4

Outputs = Sequence[Sequence[Tensor]]
"""For each of several inputs the tensors that come out, in their order."""


@dataclass(frozen=True)
class Exported:
    """What was written. ``inputs`` and ``outputs`` are names with shapes, in which ``"batch"`` stands for any size.

    ``difference`` is the largest one between the file's results and the network's, as a share of the largest value,
    over batches of ``checked`` samples. ``notes`` are lines that a user of the file should see.
    """

    path: Path
    to: str
    bytes: int
    opset: int | None
    inputs: tuple[tuple[str, list[int | str]], ...]
    outputs: tuple[str, ...]
    checked: tuple[int, ...]
    difference: float
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        inputs = [{"name": name, "shape": shape} for name, shape in self.inputs]
        return {**asdict(self), "path": str(self.path), "inputs": inputs}


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any,
    *,
    to: str | None = None,
    opset: int | None = None,
    static: bool = False,
    tolerance: float = TOLERANCE,
) -> Exported:
    """Write ``model``, in eval mode, as an ONNX file (``"onnx"``, .onnx) or a torch.export program (``"torch"``, .pt2).

    The file is run before it takes its place, by onnxruntime or by a fresh process that knows nothing of the network's
    class, on batches of several sizes. An earlier file stays after a failure. ONNX needs ``pip install "ifso[onnx]"``.

    Args:
        model: left as it was.
        path: of the file.
        example_inputs: those of :func:`ifso.trace`. The first size of every input may vary (``"batch"``); all others
            are fixed.
        to: ``"onnx"`` or ``"torch"``; by default what the suffix says.
        opset: that of ONNX.
        static: fix the first sizes, too.
        tolerance: how far results of the file may differ, as a share of the largest value.

    Returns:
        What was written, and how it was checked.

    Raises:
        ExportError: a network or a place that cannot be exported, or a package that is missing.
        VerificationError: the results of the file differ.
    """
    place = Path(path)
    kind = kind_of(place, to)
    refuse_place(place)
    if kind == "onnx":
        need_packages()
    elif opset is not None:
        raise ExportError(f"opset={opset} is for ONNX files; leave it out with to={kind!r}")
    sample = Sample.of(example_inputs, static=static)
    network = copy.deepcopy(model).cpu().eval()
    if is_detector(network) and sample.batch != 1:
        raise ExportError(f"a detector is exported for one image at a time, not for {sample.batch}; give 1 image")
    checks = sample.checks()
    names, wanted = _outputs(network, sample, checks)
    with _written(place) as new:
        opset = _write(network, sample, new, kind, opset, names)
        run, runner = RUNNERS[kind]
        found = run(new, checks)
        if is_detector(network):
            found = [in_order_of(*pair) for pair in zip(found, wanted, strict=True)]
        difference = worst_difference(found, wanted)
        if not difference <= tolerance:
            raise VerificationError(
                f"{runner} does not compute what PyTorch does: results differ by {difference:.2g} of the largest "
                f"value, and {tolerance:g} is allowed; nothing was written"
            )
    return Exported(
        place, kind, place.stat().st_size, opset, tuple(sample.described(network)), tuple(names),
        tuple(check.batch for check in checks), difference, _notes(wanted),
    )  # fmt: skip


def bytes_of(model: nn.Module, example_inputs: Any, to: str, *, opset: int | None = None, static: bool = False) -> int:
    """How large a file :func:`export` would write; the file is made elsewhere, not checked, and removed."""
    sample = Sample.of(example_inputs, static=static)
    network = copy.deepcopy(model).cpu().eval()
    names, _ = _outputs(network, sample, [])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"network{SUFFIXES[to]}"
        _write(network, sample, path, to, opset, names)
        return path.stat().st_size


def _write(
    network: nn.Module, sample: Sample, path: Path, kind: str, opset: int | None, outputs: Sequence[str]
) -> int | None:
    """Write a network in eval mode on the CPU; the opset of an ONNX file is returned."""
    if kind == "onnx":
        return write_onnx(network, sample, path, opset, outputs)
    if is_detector(network):  # torch.export fails on every one of torchvision's, after minutes and in many lines
        raise ExportError(
            f"{type(network).__name__} cannot be a torch.export program: what it computes depends on how many boxes it "
            "finds; export it to ONNX (--to onnx)"
        )
    write_program(program_of(network, sample), path)
    return None


def kind_of(path: Path, to: str | None) -> str:
    """``"onnx"`` or ``"torch"``, as asked for or as the name of the file says.

    >>> kind_of(Path("small.onnx"), None), kind_of(Path("small.pt2"), "torch")
    ('onnx', 'torch')
    """
    if to is not None and to not in SUFFIXES:
        raise ExportError(f"networks are exported to {' or '.join(SUFFIXES)}, not to {to!r}")
    fitting = [kind for kind, suffix in SUFFIXES.items() if path.suffix == suffix and to in (None, kind)]
    if not fitting:
        wanted = SUFFIXES[to] if to else " or ".join(SUFFIXES.values())
        raise ExportError(f"the suffix of an exported network must be {wanted}, got {path.suffix or 'none'} ({path})")
    return fitting[0]


def refuse_place(path: Path) -> None:
    """ExportError where no file can be written."""
    if path.is_dir():
        raise ExportError(f"{path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ExportError(f"{path} cannot be written: there is no folder {path.parent}; make it, or give another file")


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """The name to write to; a file that cannot be written is told in one line."""
    try:
        with delivering(path) as new:
            yield new
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror or error}; give another file") from error


def _outputs(model: nn.Module, sample: Sample, checks: Sequence[Sample]) -> tuple[list[str], list[list[Tensor]]]:
    """Names of what the network gives, and what it gives for each of the checks."""
    try:
        names = list(_names(_called(model, sample)))
    except Exception as error:
        raise explain(error, model, (sample.args, sample.kwargs)) from error
    results = []
    for check in checks:
        try:
            results.append(tensors_in(_called(model, check)))
        except Exception as error:
            raise ExportError(
                f"{type(model).__name__} runs on a batch of {sample.batch} and not on one of {check.batch}: "
                f"{said(error)}; export it with a fixed batch (--static, static=True)"
            ) from error
    return names, results


def _called(model: nn.Module, sample: Sample) -> Any:
    forget_caches(model)
    with quiet_torch():
        return call_model(model, sample.kwargs or sample.args)


def _names(output: Any, prefix: str = "") -> Iterator[str]:
    """One for each tensor in the result of a network.

    >>> import torch
    >>> list(_names({"out": torch.zeros(1), "aux": [torch.zeros(1), torch.zeros(1)]}))
    ['out', 'aux_0', 'aux_1']
    >>> list(_names([{"boxes": torch.zeros(1, 4), "scores": torch.zeros(1)}]))
    ['boxes', 'scores']
    """
    if isinstance(output, Tensor):
        yield prefix or OUTPUT
    elif isinstance(output, dict):
        for key, value in output.items():
            yield from _names(value, f"{prefix}_{key}" if prefix else str(key))
    elif isinstance(output, (tuple, list)) and len(output) == 1:
        yield from _names(output[0], prefix)
    else:
        for number, tensor in enumerate(output if isinstance(output, (tuple, list)) else tensors_in(output)):
            yield from _names(tensor, f"{prefix or OUTPUT}_{number}")


def _notes(wanted: Sequence[Sequence[Tensor]]) -> tuple[str, ...]:
    """Where the check could hardly fail."""
    tensors = [tensor for each in wanted for tensor in each if tensor.numel()]
    if any(bool(tensor.any()) for tensor in tensors):
        return ()
    what = "nothing but zeros for" if tensors else "nothing, such as no boxes, for"
    return (f"The network gives {what} the inputs it was checked on, so the check tells little.",)


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference as a share of the largest value wanted: max |a − b| / max |b|; infinite for other shapes.

    Infinite and undefined values have to stand in the same places; they and equal tensors differ by nothing.

    >>> import torch
    >>> relative_difference(torch.tensor([1.0, 3.999]), torch.tensor([1.0, 4.0])) < 0.00026
    True
    >>> relative_difference(torch.zeros(2), torch.zeros(3))
    inf
    """
    if found.shape != wanted.shape:
        return float("inf")
    a, b = found.detach().double(), wanted.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    if not bool((a.isfinite() & b.isfinite() | same).all()):
        return float("inf")
    finite = b[b.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    difference = float((a - b)[~same].abs().max())
    return difference / largest if largest else float("inf")


def in_order_of(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
    """Detections of one image in the order of those wanted: rounding swaps boxes with nearly the same score.

    All tensors have a row for each box. Each row wanted takes the nearest one found that no other took.

    >>> import torch
    >>> boxes, scores = torch.tensor([[0.0, 1.0], [5.0, 6.0]]), torch.tensor([0.9, 0.9])
    >>> in_order_of([boxes.flip(0), scores], [boxes, scores])[0].tolist()
    [[0.0, 1.0], [5.0, 6.0]]
    """
    rows = {len(tensor) for tensor in (*found, *wanted)}
    if len(found) != len(wanted) or len(rows) != 1:
        return list(found)
    distance = sum(_row_distance(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert isinstance(distance, Tensor)
    order = []
    for row in distance:
        order.append(int(row.argmin()))
        distance[:, order[-1]] = float("inf")
    return [tensor[order] for tensor in found]


def _row_distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Of every row wanted to every row found, each column as a share of the largest value."""
    a, b = (tensor.double().flatten(1) if tensor.dim() > 1 else tensor.double()[:, None] for tensor in (found, wanted))
    largest = float(b.abs().max()) if b.numel() else 0.0
    return (b[:, None] - a[None]).abs().amax(2) / (largest or 1.0)


def worst_difference(found: Outputs, wanted: Outputs) -> float:
    """The largest relative difference over all inputs and outputs."""
    worst = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        if len(ours) != len(theirs):
            return float("inf")
        worst = max([worst, *map(relative_difference, ours, theirs)])
    return worst
