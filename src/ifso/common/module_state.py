"""Where parameters, buffers and Python numbers are kept in a model, and the network inside what wraps it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers, persistent or not, by name; a tied one only under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def tensor_slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, key) of every place that holds a parameter or buffer; tied ones appear once per place.

    ``name`` is the first name of the tensor, as in ``named_parameters``.
    """
    first: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    name = first.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                    yield name, module, key


def set_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put other tensors in the places of the named ones: new Parameter objects, one for those that are tied."""
    made: dict[str, nn.Parameter] = {}
    for name, module, key in list(tensor_slots(model)):
        if name not in tensors:
            continue
        if key in module._parameters:
            old = module._parameters[key]
            assert old is not None
            made.setdefault(name, nn.Parameter(tensors[name], old.requires_grad))
            module._parameters[key] = made[name]
        else:
            module._buffers[key] = tensors[name]


@torch.no_grad()
def refresh_hooked_weights_(model: nn.Module) -> None:
    """Make now what the hook of ``torch.nn.utils.weight_norm`` makes before each run: weights of the present size."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                setattr(module, hook.name, hook.compute_weight(module))


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model whose weights a hook made with a gradient, which PyTorch refuses to copy."""
    refresh_hooked_weights_(model)
    return copy.deepcopy(model)


def read_attribute(module: nn.Module, name: str, position: int | None) -> int | None:
    """The number in an int attribute, or in an entry of a tuple or list attribute; None if there is none."""
    attribute = getattr(module, name, None)
    if position is not None and isinstance(attribute, (tuple, list)):
        attribute = attribute[position] if position < len(attribute) else None
    return attribute if isinstance(attribute, int) and not isinstance(attribute, bool) else None


def set_attribute(module: nn.Module, name: str, position: int | None, value: int) -> None:
    """Set an int attribute, or an entry of a tuple or list attribute, keeping its type."""
    setattr(module, name, replaced(getattr(module, name), position, value))


def replaced(attribute: Any, position: int | None, value: int) -> Any:
    """``attribute`` with ``value`` in it.

    >>> import torch
    >>> replaced((8, 4), 1, 3), replaced(7, None, 5), replaced(torch.Size([64]), 0, 48)
    ((8, 3), 5, torch.Size([48]))
    """
    if position is None or isinstance(attribute, int):
        return value
    items = list(attribute)
    items[position] = value
    make = getattr(attribute, "_make", type(attribute))
    return make(items)


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer of a model; the CPU if it has none."""
    return next(iter(named_tensors(model).values()), torch.zeros(0, device="cpu")).device


INNER = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "timm.utils.model_ema.ModelEma": "ema",
    "timm.utils.model_ema.ModelEmaV2": "module",
    "timm.utils.model_ema.ModelEmaV3": "module",
}
"""Classes that hold one network and take its place in training, and the attribute that holds it."""


def inner_name(model: object) -> str | None:
    """The attribute in which a wrapper holds its network; None if ``model`` is no wrapper that is known.

    >>> inner_name(nn.DataParallel(nn.Linear(2, 2))), inner_name(nn.Linear(2, 2))
    ('module', None)
    """
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__)
    return next((INNER[kind] for kind in kinds if kind in INNER), None)


def unwrapped(model: nn.Module) -> nn.Module:
    """The network itself: out of moving averages, ``DataParallel``, DDP and ``torch.compile``, one around the other.

    >>> import torch
    >>> unwrapped(torch.optim.swa_utils.AveragedModel(nn.DataParallel(nn.Linear(2, 3))))
    Linear(in_features=2, out_features=3, bias=True)
    """
    while (name := inner_name(model)) is not None:
        model = getattr(model, name)
    return model
