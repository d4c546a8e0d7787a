"""Which of several processes are still there, so that none waits for another that is gone.

Each has a thread that says so twice a second, in the store at which the processes met. Whoever fails leaves a word
there; of one that was killed the others see that it no longer answers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ifso.cli.output import complain

PERIOD = 0.5
SILENT = 3.0
"""Seconds without an answer after which a rank is gone, once something has gone wrong …"""
HUNG = 180.0
"""… and while nothing has: a rank may be busy with something that lets no other thread run."""
PATIENCE = 10.0
"""Seconds to find out which rank is gone."""
GRACE = 10.0
"""Seconds that a rank has to stop by itself after another has failed."""
STATUS = 2
LEFT = b"left"
FAILED = "failed"
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
        number, failed_at = 0, 0.0
        with suppress(RuntimeError):
            while not self._over.wait(PERIOD):
                number += 1
                self._store.set(_key(self._rank), str(number))
                word, now = self._look(), time.monotonic()
                failed_at = failed_at or (now if word else 0.0)
                if word and now - failed_at >= GRACE and not self._over.is_set():
                    _leave_at_once(f"rank {self._rank} stopped, because {word}; {AGAIN}")

    def _look(self) -> str | None:
        following = (self._rank + 1) % self._ranks
        if self._silent([following], HUNG):
            self._tell(f"rank {following} has not answered for {HUNG:.0f} seconds")
        return self._word()


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
    os._exit(STATUS)
