"""What loading a .pth would take, told from the opcodes of its pickles before any of them is obeyed.

``torch.load(weights_only=True)`` runs no code of a file, but a few bytes can still ask for an array of bytes of any
length, or for the hash of a tuple that holds another twice, which holds another twice, and so on.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

ZIP = b"PK\x03\x04"
PICKLES = 5
"""That stand one after the other in a file from before torch wrote zip files."""

MOST_BYTES = 2**28
"""Of the names and shapes in a file."""

MOST_ITEMS = 10**6
"""Of a tuple, those in tuples in it included, each as often as it is met."""

TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE")


def refuse_costly(path: Path) -> None:
    """ValueError, in words that go on a sentence, if loading it could take far more than the file is large."""
    with path.open("rb") as file:
        if file.read(len(ZIP)) == ZIP:
            _refuse_in_zip(path)
            return
        file.seek(0)
        for _ in range(PICKLES):
            _refuse(file)


def _refuse_in_zip(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith(".pkl"):
                if entry.file_size > MOST_BYTES:
                    raise ValueError(f"it says more of its tensors than {MOST_BYTES} bytes")
                _refuse(archive.read(entry))


def _refuse(pickled: bytes | IO[bytes]) -> None:
    """A pickle that names ``bytearray``, or makes too large a tuple."""
    stack, marks, memo = [0], list[int](), dict[Any, int]()
    for opcode, argument, _ in pickletools.genops(pickled):
        if "bytearray" in str(argument)[:200]:
            raise ValueError("it makes arrays of bytes, of any length")
        if opcode.name == "MARK":
            marks.append(len(stack))
        elif "PUT" in opcode.name or opcode.name == "MEMOIZE":
            memo[len(memo) if argument is None else int(argument)] = stack[-1]
        elif "GET" in opcode.name:
            stack.append(memo.get(int(argument or 0), 1))
        else:
            stack += _made(opcode, stack, marks)


def _made(opcode: Any, stack: list[int], marks: list[int]) -> Iterator[int]:
    """Takes what an opcode needs from the stack; the items of what it puts there: 1 for all but tuples."""
    plain = [kind for kind in opcode.stack_before if kind not in (pickletools.markobject, pickletools.stackslice)]
    least = max(len(stack) - len(plain), 1)
    if len(plain) < len(opcode.stack_before):
        start = marks.pop() if marks else 1
        least = max(start - len(plain), 1)
    taken = stack[least:]
    del stack[least:]
    items = 1 + sum(taken) if opcode.name in TUPLES else 1
    if items > MOST_ITEMS:
        raise ValueError("it makes a tuple that holds itself too often")
    return iter(taken * 2 if opcode.name == "DUP" else [items] * len(opcode.stack_after))
