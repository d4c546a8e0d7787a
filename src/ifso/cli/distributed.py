"""Commands under ``torchrun``: every process joins in, the first one speaks; if one fails, all stop and say why."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from ifso.cli.console import complain
from ifso.errors import IfsoError, RankError

MOST = 400
"""Characters of what another rank failed with."""


@dataclass(frozen=True)
class World:
    """The rank of this process out of ``ranks``, and the device it computes on."""

    rank: int
    device: str
    ranks: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that shows progress and prints."""
        return self.rank == 0


AUTO = "auto"
"""The device that is taken if none is named: a GPU, where PyTorch has one that it can use."""


def device_of(name: str | None, said: list[str]) -> str:
    """The device of that name; of ``auto`` or None what there is, of which a line is added to what is ``said``."""
    if name not in (None, AUTO):
        return str(name)
    import torch

    has_gpu = torch.cuda.is_available()
    said.append(f"device: cuda ({torch.cuda.get_device_name()}), unless --device cpu" if has_gpu else "device: cpu")
    return "cuda" if has_gpu else "cpu"


@contextmanager
def joined(device: str) -> Iterator[World]:
    """Alone, or with the other processes that ``torchrun`` started; each has a GPU of its own if ``device`` is cuda.

    Whatever is raised because another rank failed becomes a RankError that says which one, and why. A process that is
    in a group already stays in it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if device.startswith("cuda:"):  # CUDA graphs and kernels go to the current GPU
            import torch

            with suppress(RuntimeError, AssertionError, ValueError):  # refused in its place, with a line
                torch.cuda.set_device(device)
        yield World(0, device)
        return
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield World(dist.get_rank(), device, dist.get_world_size())
        return
    on_gpus = device.partition(":")[0] == "cuda"
    if on_gpus:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    world = World(dist.get_rank(), device, dist.get_world_size())
    roll_call = RollCall(world.rank, world.ranks, meeting_point())
    _interrupt_when_terminated()
    try:
        dist.barrier()
        roll_call.start()
        yield world
        dist.barrier()  # nobody leaves while another still needs the group
    except BaseException as error:
        _stop(roll_call, world, error)
    roll_call.leave()


def leave(status: int) -> int:
    """``status``; under ``torchrun`` the process ends here: threads of gloo may abort it while Python shuts down."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _stop(roll_call: RollCall, world: World, error: BaseException) -> NoReturn:
    """Tell the others, or find out which of them is to blame."""
    from ifso.common.distributed import of_another_rank

    if threading.current_thread() is threading.main_thread():  # it stops anyway, and has still something to say
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    interrupted = isinstance(error, KeyboardInterrupt)
    if not interrupted and not of_another_rank(error):
        kind = "" if isinstance(error, IfsoError) else f"{type(error).__name__}: "
        roll_call.fail(f"{kind}{' '.join(str(error).split())[:MOST]}")
        raise error
    if interrupted:
        roll_call.leave()
    word = roll_call.blame()
    roll_call.leave()
    if word is None and interrupted:
        raise error
    word = word or "another rank cannot be reached any more"
    raise RankError(f"rank {world.rank} stopped, because {word}; {AGAIN}") from error


def _interrupt_when_terminated() -> None:
    """``torchrun`` terminates the ranks that are left when one has failed: they stop as after Ctrl-C."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt_once)


def _interrupt_once(*_: object) -> None:
    """Not in the middle of what is done because another rank is gone: that is the same end, and keeps what there is."""
    from ifso.common.distributed import of_another_rank

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stopping = sys.exc_info()[1]
    if stopping is None or not of_another_rank(stopping):
        raise KeyboardInterrupt


PERIOD = 0.5
SILENT = 3.0
"""Seconds without an answer after which a rank is gone, once something has gone wrong …"""
HUNG = 180.0
"""… and while nothing has: a rank may be busy with something that lets no other thread run."""
PATIENCE = 10.0
"""Seconds to find out which rank is gone."""
GRACE = 10.0
"""Seconds that a rank has to stop by itself after another has failed."""
LEFT, FAILED = b"left", "failed"
AGAIN = "start all ranks again, in any number; --resume goes on with a run"
KILLED = "is gone without a word: it was killed, or its machine ran out of memory"


class RollCall:
    """Answers for rank ``rank`` of ``ranks`` from :meth:`start` until :meth:`leave` or :meth:`fail`."""

    def __init__(self, rank: int, ranks: int, store: Any) -> None:
        self._rank, self._ranks, self._store = rank, ranks, store
        self._over = threading.Event()
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._store.set(_key(rank), "0")

    def start(self) -> None:
        """To be called when all ranks have one."""
        threading.Thread(target=self._answer, name="ifso roll call", daemon=True).start()

    def leave(self) -> None:
        """This rank goes, and nothing is wrong with it."""
        self._end(lambda: self._store.set(_key(self._rank), LEFT))

    def fail(self, words: str) -> None:
        """This rank goes, because of something of its own."""
        self._end(lambda: self._tell(f"rank {self._rank} failed: {words}"))

    def blame(self) -> str | None:
        """Which other rank failed, or is gone, and why; None if that cannot be said. It may take some seconds."""
        with suppress(RuntimeError):
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                word = self._word()
                if word is not None:
                    return word
                gone = self._silent(range(self._ranks), SILENT)
                if gone:
                    self._tell(f"rank {gone[0]} {KILLED}")
                if all(beat == LEFT for beat, _ in self._heard.values()):
                    return None
                time.sleep(PERIOD / 5)
        return None

    def _end(self, say: Callable[[], None]) -> None:
        self._over.set()
        with suppress(RuntimeError):
            say()

    def _tell(self, words: str) -> None:
        """The first word counts."""
        self._store.compare_set(FAILED, "", words)

    def _word(self) -> str | None:
        return self._store.get(FAILED).decode(errors="replace") if self._store.check([FAILED]) else None

    def _silent(self, ranks: Iterable[int], seconds: float) -> list[int]:
        """Those others of ``ranks`` that have not answered for so long, and have not left."""
        others = [rank for rank in ranks if rank != self._rank]
        beats, now = self._store.multi_get([_key(rank) for rank in others]), time.monotonic()
        for rank, beat in zip(others, beats, strict=True):
            if rank not in self._heard or self._heard[rank][0] != beat:
                self._heard[rank] = (beat, now)
        return [rank for rank in others if self._heard[rank][0] != LEFT and now - self._heard[rank][1] >= seconds]

    def _answer(self) -> None:
        """Say that this rank is there, look after the next one, and stop if another has failed."""
        number, failed_at, following = 0, 0.0, (self._rank + 1) % self._ranks
        with suppress(RuntimeError):
            while not self._over.wait(PERIOD):
                number += 1
                self._store.set(_key(self._rank), str(number))
                if self._silent([following], HUNG):
                    self._tell(f"rank {following} has not answered for {HUNG:.0f} seconds")
                word, now = self._word(), time.monotonic()
                failed_at = failed_at or (now if word else 0.0)
                if word and now - failed_at >= GRACE and not self._over.is_set():
                    _leave_at_once(f"rank {self._rank} stopped, because {word}; {AGAIN}")


def meeting_point() -> Any:
    """A connection of its own to the store that ``torchrun`` keeps for the processes of one start."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = timedelta(seconds=30)
    store = TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False)
    start = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return PrefixStore(f"ifso/{start}", store)


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _leave_at_once(line: str) -> None:
    """The main thread waits for another rank, and nothing can wake it."""
    complain(f"error: {line}")
    os._exit(IfsoError.exit_status)
