"""Hostile safetensors, .npz, .pth, TOML and image files: lies in headers, bombs, pickles that would run code."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Mapping
from random import Random
from typing import Any

from mutating import DEEP, LONG, NUMBERS, TEXTS, mutated_bytes, mutated_document

LENGTHS = (0, 1, 7, 8, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
SHAPES = (
    "()", "(0,)", "(1,)", "(-1,)", "(2, 32, 32, 3)", "(10000000000,)", "(100000, 32, 32, 3)",
    "(4611686018427387904, 4)", f"({10**400},)", "(True,)", "(1.5,)", "2", "None", "[2]", "('2',)", "(2,) * 9",
    "(0, 10000000000000)", "(2, 3072)", "(1,) * 100", "(" * 100 + ")" * 100, "(" + "1, " * 70 + ")", "-" * 5000 + "1",
    "(" * 9000, "{[]: 1}",
)  # fmt: skip
DTYPES = (
    "'|u1'", "'<i8'", "'<f4'", "'|O'", "'|V8'", "'|S5'", "'<U9'", "'<M8[s]'", "[('a', '|O')]", "[('a', '<i8')]",
    "'|b1'",
    "'<c16'", "'>f8'", "'q' * 3", "''", "None", "'<U1000000000'", "'|V2147483647'", "('<i8', (10000, 10000))",
    "'object'",
    "{'names': ['a'], 'formats': ['O']}", "7",
)  # fmt: skip
METHODS = (*(zipfile.ZIP_STORED,) * 10, *(zipfile.ZIP_DEFLATED,) * 8, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
RIGHTS = (
    "inf", "-inf", "nan", "1979-05-27T07:32:00Z", "07:32:00", "[" * DEEP, "[" * 900 + "]" * 900, "{a = " * 900,
    "9" * 5000,
    "1" + "0" * 400, "0x" + "f" * 400, "-1", "0", "true", '""', "''", "[]", "{}", "[1, 'a']", "'''\na\nb'''",
    '"\\u0000"',
    '"\\ud800"', "'../../x'", "1e400", "1_000", f"'{'x' * LONG}'", "[[[]]]", "['ifso', 'ifso']", "2 ** 3", "[nan, nan]",
)  # fmt: skip


class Sentinel:
    """Unpickling it would call ``exec``, which creates the file ``place``."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({self.place!r}, 'w').close()",)


def mutated_safetensors(data: bytes, random: Random) -> bytes:
    """A safetensors file with a hostile header, a false length of it, or hurt bytes."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    choice = random.random()
    if choice < 0.6:
        text = json.dumps(mutated_document(header, random, most=2)).encode()
        text += b" " * random.choice((0, 0, -len(text) % 8))
        return struct.pack("<Q", len(text)) + text + body
    if choice < 0.75:
        lie = random.choice((*LENGTHS, length + 1, length - 1, len(data), length + len(body)))
        return struct.pack("<Q", lie) + data[8:]
    return mutated_bytes(data, random)


def mutated_npz(arrays: Mapping[str, tuple[str, str, bytes]], random: Random, sentinel: str) -> bytes:
    """An .npz; ``arrays`` are (dtype, shape, bytes) by name, the first two as they stand in the header."""
    chosen = {name: list(value) for name, value in arrays.items()}
    for _ in range(random.choice((0, 1, 1, 1, 1, 2, 3))):
        name = random.choice(list(chosen))
        _hurt_array(chosen, name, random, sentinel)
        if not chosen:
            break
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", random.choice(METHODS)) as file:
        for name, (dtype, shape, content) in chosen.items():
            file.writestr(_member(name, random), _npy(dtype, shape, content, random))
    data = target.getvalue()
    return mutated_bytes(data, random) if random.random() < 0.2 else data


def _hurt_array(chosen: dict[str, list[Any]], name: str, random: Random, sentinel: str) -> None:
    kind = random.randrange(7)
    if kind == 0:
        chosen[name][0] = random.choice(DTYPES)
    elif kind == 1:
        chosen[name][1] = random.choice(SHAPES)
    elif kind == 2:
        chosen[name][2] = mutated_bytes(chosen[name][2], random)
    elif kind == 3:
        chosen[name] = ["'|O'", "()", pickle.dumps(Sentinel(sentinel))]
    elif kind == 4:
        del chosen[name]
    elif kind == 5:
        chosen[random.choice(TEXTS)] = chosen.pop(name)
    else:
        chosen[name][2] = b"\0" * random.choice((0, 10, 2**20))


def _member(name: str, random: Random) -> str:
    ending = ".npy" if random.random() < 0.98 else random.choice(("", ".npz", ".npy.npy", "/"))
    return f"{name}{ending}".replace("\0", "?").encode("utf-8", "replace").decode() or "x"


def _npy(dtype: str, shape: str, content: bytes, random: Random) -> bytes:
    header = (
        f"{{'descr': {dtype}, 'fortran_order': {random.choice(('False',) * 20 + ('True', '2'))}, 'shape': {shape}, }}"
    )
    if random.random() < 0.02:
        header = random.choice(
            ("", "{}", "[1]", "-" * 5000 + "1", "(" * 5000, "{'a': " * 900, "__import__('os')", "\0")
        )
    if random.random() < 0.02:
        return pickle.dumps([header])
    encoded = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    version = random.choice((b"\x01\x00",) * 40 + (b"\x02\x00", b"\x03\x00", b"\x09\x09"))
    length = struct.pack("<H" if version[0] == 1 else "<I", len(encoded) % 2**16)
    if random.random() < 0.02:
        length = random.choice((b"\xff\xff", b"\x00\x00", b"\xff\xff\xff\x7f"))
    return b"\x93NUMPY" + version + length + encoded + content


def mutated_checkpoint(data: bytes, random: Random, sentinel: str) -> bytes:
    """A .pth: the zip that torch.save writes with a hostile pickle inside, hurt bytes, or a pickle of its own."""
    choice = random.random()
    if choice < 0.1:
        return pickle.dumps(random.choice((Sentinel(sentinel), {"model": Sentinel(sentinel)}, [1], {1: 2}, "x")), 2)
    if choice < 0.3:
        return mutated_bytes(data, random)
    source, target = io.BytesIO(data), io.BytesIO()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith("data.pkl"):
                content = _hurt_pickle(content, random, sentinel)
            elif random.random() < 0.1:
                content = mutated_bytes(content, random)
            new.writestr(entry.filename, content)
    return target.getvalue()


def _hurt_pickle(content: bytes, random: Random, sentinel: str) -> bytes:
    choice = random.random()
    if choice < 0.25:
        return pickle.dumps({"a.weight": Sentinel(sentinel)}, 2)
    if choice < 0.5:
        words = (
            b"a.weight",
            b"collections\nOrderedDict",
            b"torch\nFloatStorage",
            b"torch._utils\n_rebuild_tensor_v2",
            b"cpu",
        )
        new = (
            b"\x00weight",
            b"builtins\nexec",
            b"os\nsystem",
            b"builtins\nbytearray",
            b"torch\nload",
            b"torch\nSize",
            b"meta",
        )
        return content.replace(random.choice(words), random.choice(new))
    if choice < 0.75:
        number = random.choice([value for value in NUMBERS if isinstance(value, int) and 0 <= value < 2**31])
        place = random.choice([at for at, byte in enumerate(content) if byte in b"KMJ"] or [0])
        return content[:place] + b"J" + struct.pack("<i", number) + content[place + 2 :]
    return mutated_bytes(content, random)


def mutated_toml(text: str, random: Random) -> bytes:
    """A TOML file with other values, and with lines left out, doubled or out of order."""
    lines = text.splitlines()
    for _ in range(random.randint(1, 3)):
        place = random.randrange(len(lines))
        key, equals, _ = lines[place].partition("=")
        kind = random.randrange(6)
        if kind <= 2 and equals:
            lines[place] = f"{key}= {random.choice(RIGHTS)}"
        elif kind == 3:
            lines.insert(
                random.randint(0, len(lines)), random.choice((*lines, "[a]", "[[a]]", "a.b.c = 1", "[base]", "=", "\0"))
            )
        elif kind == 4 and len(lines) > 1:
            del lines[place]
        else:
            lines[place] = key + random.choice(TEXTS)
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return mutated_bytes(data, random) if random.random() < 0.15 else data
