"""Commands under ``torchrun``: every process joins in, the first one speaks; if one fails, all stop and say why."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from ifso.errors import IfsoError, RankError

if TYPE_CHECKING:
    from ifso.cli.roll_call import RollCall


MOST = 400
"""Characters of what another rank failed with."""


@dataclass(frozen=True)
class Place:
    """The number of this process out of ``ranks``, and where it computes."""

    rank: int
    device: str
    ranks: int = 1

    @property
    def speaks(self) -> bool:
        """Is it the one that shows progress and prints?"""
        return self.rank == 0


@contextmanager
def joined(device: str) -> Iterator[Place]:
    """Alone, or with the other processes that ``torchrun`` started; each has a GPU of its own if ``device`` is cuda.

    Whatever is raised because another rank failed becomes a RankError that says which one, and why. A process that is
    in a group already stays in it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        _make_current(device)
        yield Place(0, device)
        return
    import torch
    import torch.distributed as dist

    from ifso.cli.roll_call import RollCall, meeting_point

    if dist.is_initialized():
        yield Place(dist.get_rank(), device, dist.get_world_size())
        return
    on_gpus = device.partition(":")[0] == "cuda"
    if on_gpus:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    place = Place(dist.get_rank(), device, dist.get_world_size())
    roll_call = RollCall(place.rank, place.ranks, meeting_point())
    _interrupt_when_terminated()
    try:
        dist.barrier()
        roll_call.start()
        yield place
        dist.barrier()  # nobody leaves while another still needs the group
    except BaseException as error:
        _stop(roll_call, place, error)
    roll_call.leave()


def _make_current(device: str) -> None:
    """CUDA graphs and kernels go to the current GPU. One that cannot be had is refused in its place, with a line."""
    if device.startswith("cuda:"):
        import torch

        with suppress(RuntimeError, AssertionError, ValueError):
            torch.cuda.set_device(device)


def leave(status: int) -> int:
    """``status``; under ``torchrun`` the process ends here: threads of gloo may abort it while Python shuts down."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _stop(roll_call: RollCall, place: Place, error: BaseException) -> NoReturn:
    """Tell the others, or find out which of them is to blame."""
    from ifso.cli.roll_call import AGAIN
    from ifso.criteria.ranks import of_another_rank

    _ignore_signals()
    interrupted = isinstance(error, KeyboardInterrupt)
    if not interrupted and not of_another_rank(error):
        roll_call.fail(_words(error))
        raise error
    if interrupted:
        roll_call.leave()
    word = roll_call.blame()
    roll_call.leave()
    if word is None and interrupted:
        raise error
    word = word or "another rank cannot be reached any more"
    raise RankError(f"rank {place.rank} stopped, because {word}; {AGAIN}") from error


def _words(error: BaseException) -> str:
    """In one line, and short enough for the line of another rank."""
    kind = "" if isinstance(error, IfsoError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())[:MOST]}"


def _interrupt_when_terminated() -> None:
    """``torchrun`` terminates the ranks that are left when one has failed: they stop as after Ctrl-C."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt_once)


def _interrupt_once(*_: object) -> None:
    """Not in the middle of what is done because another rank is gone: that is the same end, and keeps what there is."""
    from ifso.criteria.ranks import of_another_rank

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stopping = sys.exc_info()[1]
    if stopping is None or not of_another_rank(stopping):
        raise KeyboardInterrupt


def _ignore_signals() -> None:
    """This process stops anyway, and has still something to say."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
