"""Networks in wrappings that distributed training and others put around them, and what ifso says of each."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from shared_task import made, plain
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

import ifso


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def sharded() -> nn.Module:
    model = plain()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model


def inside(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = plain()
    model[0] = wrap(model[0])
    return model


def compiled_in_place() -> nn.Module:
    model = plain()
    model.compile(backend="eager")
    return model


class LowRank(nn.Module):
    """W + AB, as adapters have it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = nn.Parameter(0.1 * torch.randn(len(weight), 2))
        self.b = nn.Parameter(0.1 * torch.randn(2, weight[0].numel()))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (self.a @ self.b).view_as(weight)


def low_rank() -> nn.Module:
    model = plain()
    register_parametrization(model[2], "weight", LowRank(model[2].weight))
    return model


def normed() -> nn.Module:
    model = plain()
    weight_norm(model[2])
    return model


RANKED: dict[str, Callable[[], nn.Module]] = {
    "DDP": lambda: nn.parallel.DistributedDataParallel(plain()),
    "DDP inside": lambda: inside(nn.parallel.DistributedDataParallel),
    "FSDP": lambda: FullyShardedDataParallel(plain(), device_id=torch.device("cpu")),
    "FSDP2": sharded,
}
"""Those that need a process group."""

LONE: dict[str, Callable[[], nn.Module]] = {
    "DataParallel": lambda: nn.DataParallel(plain()),
    "compiled": lambda: torch.compile(plain()),
    "compiled inside": lambda: inside(torch.compile),
    "compiled in place": compiled_in_place,
    "LoRA": low_rank,
    "weight norm": normed,
}


def words(work: Callable[[], object]) -> str:
    """The words of the error, or nothing."""
    try:
        work()
    except ifso.IfsoError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def all_words(make: Callable[[], nn.Module]) -> list[str]:
    """What ``trace``, ``score`` and ``prune`` say of a network."""
    batches = made(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make()
    return [
        words(lambda: ifso.trace(model, batches[0][0])),
        words(lambda: score(model, batches)),
        words(lambda: pruned(model, batches)),
    ]


def score(model, batches):
    """With the graph of the network within, where the wrapping is not traced itself."""
    inner = plain() if words(lambda: ifso.trace(model, batches[0][0])) else model
    ifso.score(model, ifso.trace(inner, batches[0][0]), loss_fn, batches, "taylor")


def pruned(model, batches):
    example, budget = batches[0][0][:1], ifso.Budget(macs=0.8)
    ifso.prune(model, batches, loss_fn, budget=budget, example_inputs=example, accumulate=1, units_per_step=8)
