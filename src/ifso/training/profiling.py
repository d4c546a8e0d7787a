"""The quality and the costs of a network: counted operations, measured time, memory of a training step."""

from __future__ import annotations

import copy
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ifso.common.batches import of_batch, size_of
from ifso.common.devices import free_memory, refuse_too_large
from ifso.common.loss_fn import LossFn, WatchedLoss
from ifso.common.module_state import device_of, named_tensors
from ifso.common.tensors import map_tensors
from ifso.common.timing import middle, peak_bytes
from ifso.common.torch_state import same_modes
from ifso.costs.cost import Cost, cost
from ifso.costs.latency import WARM_UP, Latency, measure_latency
from ifso.errors import IfsoError
from ifso.graph.tracing import trace
from ifso.training.evaluation import Evaluation, clear_errors
from ifso.training.precision import autocast, tensor_cores

REPEATS = 15
ROUNDS = 3
SECONDS = 30.0
"""No further round of timing begins after so long a time with one size of batch."""

BLOW_UP = 1000
"""No module reads and writes so many times the numbers of an input."""

MOMENTUM = 0.9
GPU_PEAK = "weights, momentum, batch, and what torch's allocator handed out for the rest"
CPU_PEAK = "weights, momentum, batch, and all other tensors alive at once, without workspaces of kernels"
HALF = ("bf16", "fp16")
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Timing:
    """Forward passes on a batch of so many images."""

    batch: int
    latency: Latency

    @property
    def throughput(self) -> float:
        """Images a second."""
        return self.batch / self.latency.median


@dataclass(frozen=True)
class Profile:
    """All measurements of a network; bytes are of the activations of one image, and of a training step at its peak."""

    quality: Evaluation
    cost: Cost
    activation_bytes: int
    timings: tuple[Timing, ...]
    training_peak: int

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        timings = [
            {
                "batch": timing.batch,
                "seconds": timing.latency.median,
                "spread": timing.latency.spread,
                "runs": len(timing.latency.samples),
                "images_per_second": timing.throughput,
                "samples": list(timing.latency.samples),
            }
            for timing in self.timings
        ]
        return {
            **self.quality.as_dict(), **self.cost.as_dict(), "activation_bytes": self.activation_bytes,
            "latency": timings, "training_peak_bytes": self.training_peak,
        }  # fmt: skip


def costs_of(model: nn.Module, example_inputs: Any, precision: str) -> tuple[Cost, int]:
    """Costs of one image, and the bytes of its activations: what convolutions and matrix products write.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))
    >>> costs_of(net, torch.zeros(1, 3, 8, 8), "bf16")[1] == 2 * (8 * 36 + 2)
    True
    """
    inputs = of_batch(example_inputs, 1)
    with same_modes(model):
        found = cost(model, trace(model.eval(), inputs))
    return found, found.activations * (2 if precision in HALF else 4)


def in_memory_format(values: Any, *, channels_last: bool) -> Any:
    """The values with images [N, C, H, W] in channels-last memory layout, if that is asked for."""

    def last(tensor: Tensor) -> Tensor:
        return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    return map_tensors(values, last) if channels_last else values


def time_forward(
    models: Mapping[str, nn.Module],
    example_inputs: Any,
    batch: int,
    precision: str,
    *,
    repeats: int = REPEATS,
    seconds: float = SECONDS,
) -> dict[str, Timing]:
    """The times of forward passes of all networks in eval mode, without gradients, and warm.

    They take turns in a few rounds, so that what disturbs the machine disturbs them all. After ``seconds`` the rest of
    the repeats is left out.
    """
    if batch < 1 or repeats < 1:
        raise IfsoError(f"repeats and batch must be 1 or more, got {repeats} and {batch}")
    with clear_errors(f"a batch of {batch}"):
        _refuse_too_large(models, example_inputs, batch)
        inputs = of_batch(example_inputs, batch)
    begun = time.perf_counter()
    rounds = min(ROUNDS, repeats)
    samples: dict[str, tuple[float, ...]] = dict.fromkeys(models, ())
    for number in range(rounds):
        if number and time.perf_counter() - begun > seconds:
            break
        share = repeats * (number + 1) // rounds - repeats * number // rounds
        for name, model in models.items():
            with tensor_cores(precision), autocast(precision, device_of(model)), clear_errors(f"a batch of {batch}"):
                warm_up = 1 if number else WARM_UP
                samples[name] += measure_latency(model, inputs, repeats=share, warm_up=warm_up).samples
    return {name: Timing(batch, Latency(*middle(found), found)) for name, found in samples.items()}


def training_peak(model: nn.Module, batch: Any, loss_fn: LossFn, precision: str) -> int:
    """The bytes that a step of training takes at its peak: forward, backward, and SGD with momentum.

    Weights, buffers, momentum and the batch are counted, and what a second step adds to them. On a GPU that is what
    the allocator of torch hands out; on the CPU every tensor that is alive, without the workspaces of kernels.
    The work is done by a copy.
    """
    device, model, size = device_of(model), copy.deepcopy(model).train(), size_of(batch)
    watched = WatchedLoss(loss_fn)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise IfsoError("no parameter of the network is to be trained; set requires_grad of some")
    sgd = torch.optim.SGD(parameters, lr=0.0, momentum=MOMENTUM)

    def step() -> None:
        sgd.zero_grad(set_to_none=True)
        with autocast(precision, device):
            loss = watched(model, batch)
        loss.backward()
        sgd.step()
        sgd.zero_grad(set_to_none=True)

    gpus = [device] if device.type == "cuda" else []
    on_device = torch.cuda.device(device) if gpus else nullcontext()
    doing = clear_errors(f"training on a batch of {size}")
    with tensor_cores(precision), torch.random.fork_rng(gpus), on_device, doing:
        step()
        added = peak_bytes(step, device)
    momentum = [value for state in sgd.state.values() for value in state.values()]
    return added + _bytes([*named_tensors(model).values(), *momentum, batch])


def hardware(device: torch.device | str) -> dict[str, Any]:
    """The device, processor and threads that numbers were measured on."""
    device = torch.device(device)
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = next(iter(names), "") or platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "cpu": cpu,
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _refuse_too_large(models: Mapping[str, nn.Module], example_inputs: Any, batch: int) -> None:
    """Raise for a batch that would fill main memory, where the system would kill the process without a word.

    A network holds at least its inputs, and what the largest of its modules reads and writes. It is run on one input
    to measure that, unless the batch is far from filling the memory.
    """
    one, free = of_batch(example_inputs, 1), free_memory()
    if free is None or batch * _numbers(one) * 4 * BLOW_UP < free:
        return
    for model in models.values():
        if device_of(model).type == "cpu":
            widest: list[int] = [0]
            hooks = [
                module.register_forward_hook(lambda *args, widest=widest: widest.append(_numbers(args[1:])))
                for module in model.modules()
            ]
            try:
                measure_latency(model, one, repeats=1, warm_up=0)
            finally:
                for hook in hooks:
                    hook.remove()
            refuse_too_large(batch * (_numbers(one) + max(widest)), f"a batch of {batch}")


def _numbers(values: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _bytes(values: Sequence[Any]) -> int:
    """The bytes of all storages of the tensors among the values, each counted once."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
