"""One measurement of ``ifso bench trace``, in its own process: ``python -m ifso.bench.trace_worker MODEL``."""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from ifso.errors import IfsoError


def measure(name: str) -> dict[str, Any]:
    """CPU seconds and peak memory growth of tracing the model called ``name``."""
    import torch

    from ifso.graph.tracing import trace
    from ifso.models import create_model, default_inputs

    torch.set_num_threads(1)
    model = create_model(name).eval()
    inputs = default_inputs(name, model)

    start = time.process_time()
    growth, graph = peak_growth(lambda: trace(model, inputs))
    first = time.process_time() - start

    start = time.process_time()
    trace(model, inputs)
    again = time.process_time() - start
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return {
        "model": name,
        "torch": torch.__version__,
        "units": graph.num_units,
        "cpu_s_first": first,
        "cpu_s_again": again,
        "model_bytes": sum(tensors.values()),
        "peak_growth_bytes": growth,
    }


def peak_growth(function: Callable[[], Any]) -> tuple[int, Any]:
    """By how many bytes the peak of the resident size grew during a call, and what the call gave."""
    gc.collect()
    with suppress(OSError):  # the peak starts from the present size on Linux; elsewhere it is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    result = function()
    return _peak_bytes() - before, result


def _peak_bytes() -> int:
    """Peak resident size in bytes."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def answer(function: Callable[[], dict[str, Any]]) -> None:
    """Print what ``function`` finds, or the error it ends with, for the process that asked."""
    try:
        with redirect_stdout(sys.stderr):
            result = function()
    except IfsoError as error:
        result = {"error": str(error)}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    answer(lambda: measure(sys.argv[1]))
