"""The network inside what other libraries wrap around one."""

from __future__ import annotations

from torch import nn

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
