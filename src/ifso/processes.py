"""Is this process alone?"""

from __future__ import annotations

import torch.distributed as dist


def several() -> bool:
    """Is this one of several processes of ``torch.distributed``?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
