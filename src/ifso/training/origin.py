"""What a training began with, told by its checkpoint: one of other weights or other data is not taken for the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ifso.errors import RunError

START, TEACHER, DATA = "start", "teacher", "data"
WORDS = {START: "another network", TEACHER: "another teacher", DATA: "other data"}


@dataclass(frozen=True)
class Origin:
    """``digests`` of the network at its :data:`START`, of its :data:`TEACHER` and of the :data:`DATA`, where known.

    ``advice`` is what to do with a checkpoint that is of something else, if that is not the usual.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    advice: str | None = None

    def facts(self) -> dict[str, dict[str, str]]:
        """What is stored of it: nothing where nothing is known."""
        return {"origin": dict(self.digests)} if self.digests else {}

    def refuse_other(self, before: Mapping[str, str], where: Path) -> None:
        """RunError that names what differs; what an older checkpoint does not tell is taken to be the same.

        >>> Origin({"start": "a", "data": "b"}).refuse_other({"data": "b"}, Path("runs/x"))
        >>> Origin({"start": "a", "data": "b"}, "remove it").refuse_other({"start": "c", "data": "b"}, Path("runs/x"))
        Traceback (most recent call last):
        ifso.errors.RunError: the training in runs/x began with another network; remove it
        """
        other = [WORDS[name] for name, digest in self.digests.items() if before.get(name, digest) != digest]
        if other:
            advice = self.advice or "train in another folder"
            raise RunError(f"the training in {where} began with {' and '.join(other)}; {advice}")
