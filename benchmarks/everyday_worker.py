"""One measurement of ``everyday``, in its own process: ``python -m benchmarks.everyday_worker MODEL SIZE BATCH``.

Peaks of memory are those of tensors that are alive at once, but for tracing, where it is the growth of the process:
tracing runs on fake tensors, and what it takes are Python objects.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from ifso.bench import trace_worker


def measure(name: str, size: int, batch: int) -> dict[str, Any]:
    """Trace, forward pass, gradient and score of a batch of square images: CPU seconds, and bytes at their peak.

    The trace is that of one image of the network's usual size.
    """
    import torch

    from ifso.bench.score import ScoreBench, ScoreSetup
    from ifso.common.timing import peak_bytes

    traced = trace_worker.measure(name)
    growth = traced["peak_growth_bytes"]
    torch.manual_seed(0)
    bench = ScoreBench(ScoreSetup(name, batch=batch, size=size, eval_mode=True))
    images = bench.batch[0]
    functions = {key: function for key, function in bench.methods().items() if key in ("gradient", "ifso")}

    def forward() -> Any:
        with torch.no_grad():
            return bench.model(images)

    peaks = {key: peak_bytes(function, bench.device) for key, function in {"forward": forward, **functions}.items()}
    gradient, score = _seconds(functions["gradient"]), _seconds(functions["ifso"])
    return {
        "model": name,
        "size": size,
        "batch": batch,
        "units": traced["units"],
        "model_bytes": traced["model_bytes"],
        "trace_cpu_s": traced["cpu_s_again"],
        "trace_growth_bytes": growth,
        "forward_bytes": peaks["forward"],
        "trace_in_forwards": growth / peaks["forward"],
        "gradient_bytes": peaks["gradient"],
        "score_bytes": peaks["ifso"],
        "score_in_gradients": peaks["ifso"] / peaks["gradient"],
        "gradient_cpu_s": gradient,
        "score_cpu_s": score,
        "score_cpu_in_gradients": score / gradient,
    }


def _seconds(function: Callable[[], Any]) -> float:
    """CPU time of this process in a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


if __name__ == "__main__":
    trace_worker.answer(lambda: measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
