"""A network and data for commands under ``torchrun``: ``shared_task.py:plain`` and ``shared_task.py:joint`` and others.

``FAULT=kill:1:9`` in the environment lets rank 1 be killed when it asks for its 9th training batch; ``stop`` and
``raise`` are other ends, ``nan`` spoils that batch. ``FAULT_AT`` names a file for the time when that happened.
``FAULT=lines:1:2`` lets rank 1 be killed once the file ``LINES`` has two lines, wherever the rank is then.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

CLASSES, SIZE, BATCHES = 5, 8, 12
Batch = tuple[Tensor, Tensor]


def plain() -> nn.Module:
    """Without norms, whose statistics would be those of a part of a batch."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, CLASSES)
    )


class Spare(nn.Sequential):
    """With a parameter that has no part in the loss."""

    def __init__(self) -> None:
        super().__init__(plain())
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, images: Tensor) -> Tensor:
        return self[0](images)


def for_digits() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 10)
    )


def made(count: int, size: int = SIZE) -> list[Batch]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 1, 6, 6, generator=random), torch.randint(CLASSES, (size,), generator=random))
        for _ in range(count)
    ]


class Faulty:
    """The same batches each time; at one of them happens what ``FAULT`` says."""

    def __init__(self, batches: list[Batch], rank: int) -> None:
        self._batches, self._asked = batches, 0
        kind, who, number = os.environ.get("FAULT", "none:0:0").split(":")
        self._kind, self._number = kind if int(who) == rank else "none", int(number)
        self._pause = float(os.environ.get("PAUSE", "0"))

        if self._kind == "lines":
            threading.Thread(target=self._killed_at, args=(Path(os.environ["LINES"]),), daemon=True).start()

    def _killed_at(self, lines: Path) -> None:
        while not lines.exists() or lines.read_bytes().count(b"\n") < self._number:
            time.sleep(0.001)
        Path(os.environ["FAULT_AT"]).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def __iter__(self) -> Iterator[Batch]:
        for images, labels in self._batches:
            self._asked += 1
            time.sleep(self._pause)
            yield (self._faulty(images) if self._asked == self._number else images), labels

    def _faulty(self, images: Tensor) -> Tensor:
        if self._kind != "none" and "FAULT_AT" in os.environ:
            Path(os.environ["FAULT_AT"]).write_text(str(time.time()))
        if self._kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self._kind == "kill" else signal.SIGSTOP)
        if self._kind == "raise":
            raise ValueError("the disk is broken")
        return images * float("nan") if self._kind == "nan" else images


class Counted(Faulty):
    def __len__(self) -> int:
        return len(self._batches)


class Task:
    num_classes, input_shape = CLASSES, (1, 6, 6)

    def __init__(self, train: Faulty, test: list[Batch]) -> None:
        self.train_batches, self.test_batches = train, test


def joint(rank: int = 0, ranks: int = 1) -> Task:
    """Each rank has its part of every batch, so that all together see what one process would."""
    parts = [tuple(tensor.chunk(ranks)[rank] for tensor in batch) for batch in made(BATCHES)]
    return Task(Counted(parts, rank), made(3)[rank::ranks])


def dealt(rank: int = 0, ranks: int = 1) -> Task:
    """The batches are dealt out like cards."""
    return Task(Counted(made(BATCHES)[rank::ranks], rank), made(3)[rank::ranks])


def uneven(rank: int = 0, ranks: int = 1) -> Task:
    """Eleven batches, of which the last rank has fewer."""
    return Task(Counted(made(11)[rank::ranks], rank), made(3)[rank::ranks])


def uncounted(rank: int = 0, ranks: int = 1) -> Task:
    """As ``joint``, of no known length."""
    task = joint(rank, ranks)
    return Task(Faulty(task.train_batches._batches, rank), task.test_batches)


def uneven_uncounted(rank: int = 0, ranks: int = 1) -> Task:
    return Task(Faulty(made(11)[rank::ranks], rank), made(3)[rank::ranks])


def empty_share(rank: int = 0, ranks: int = 1) -> Task:
    """The last rank has nothing to train on."""
    return Task(Counted([] if ranks > 1 and rank == ranks - 1 else made(4), rank), made(3)[rank::ranks])
