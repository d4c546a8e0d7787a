"""The state of a run between two steps: enough to go on from there, in memory or in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ifso.common.module_state import named_tensors
from ifso.errors import RunError
from ifso.pruning.shrinking_network import ShrinkingNetwork

MODEL, OPTIMIZER = "model.", "optimizer."


def tensors_of(network: ShrinkingNetwork, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything that changes, by name: not copied. ``present`` are the units whose slices are still there."""
    found = {f"{MODEL}{name}": tensor.detach() for name, tensor in named_tensors(network.model).items()}
    for number, values in optimizer.state_dict()["state"].items():
        found |= {f"{OPTIMIZER}{number}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
    return {**found, "kept": network.kept, "present": network.present}


def plain_state_of(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer remembers that is no tensor."""
    state = optimizer.state_dict()
    numbers = {
        str(number): {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for number, values in state["state"].items()
    }
    return {"state": numbers, "groups": [{**group, "params": list(group["params"])} for group in state["param_groups"]]}


def shrink_to_(network: ShrinkingNetwork, tensors: Mapping[str, Tensor]) -> None:
    """Bring a fresh network to the shape it had: before the optimizer is made."""
    for name in ("kept", "present"):
        units = network.original.num_units + (name == "kept")
        if name not in tensors or tensors[name].dtype != torch.bool or tensors[name].shape != (units,):
            raise RunError(f"the checkpoint does not fit this network of {network.original.num_units} units")
    network.kept = torch.cat([tensors["present"], torch.ones(1, dtype=torch.bool, device="cpu")])
    network.compact_()
    network.kept = tensors["kept"].clone()


@torch.no_grad()
def fill_(network: ShrinkingNetwork, optimizer: Optimizer, tensors: Mapping[str, Tensor], plain: Any) -> None:
    """Put stored numbers into a network of that shape and its optimizer."""
    for name, tensor in named_tensors(network.model).items():
        stored = tensors.get(f"{MODEL}{name}")
        if stored is None or stored.shape != tensor.shape:
            shape = "none" if stored is None else tuple(stored.shape)
            raise RunError(f"the checkpoint does not fit: {name} has shape {tuple(tensor.shape)}, stored is {shape}")
        tensor.copy_(stored)
    state: dict[int, dict[str, Any]] = {int(number): dict(values) for number, values in plain["state"].items()}
    for name, stored in tensors.items():
        if name.startswith(OPTIMIZER):
            number, _, key = name.removeprefix(OPTIMIZER).partition(".")
            state.setdefault(int(number), {})[key] = stored.clone()
    optimizer.load_state_dict({"state": state, "param_groups": plain["groups"]})


class Snapshot:
    """A copy in memory of tensors that change in place, to return to. ``live`` gives them by name."""

    def __init__(self, live: Callable[[], dict[str, Tensor]]) -> None:
        self._live = live
        self.copies: dict[str, Tensor] = {}
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Copy again; memory is only taken where shapes have changed."""
        live = self._live()
        shapes = [[(name, tensor.shape) for name, tensor in side.items()] for side in (live, self.copies)]
        if shapes[0] != shapes[1]:
            self.copies = {name: tensor.clone() for name, tensor in live.items()}
            return
        torch._foreach_copy_(list(self.copies.values()), list(live.values()))

    @torch.no_grad()
    def restore_(self) -> None:
        """Back to the copy."""
        for name, tensor in self._live().items():
            if name in self.copies:
                tensor.copy_(self.copies[name])
