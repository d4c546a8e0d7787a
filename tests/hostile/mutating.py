"""Hostile variants of valid documents, texts and bytes, all drawn from one seeded generator.

An input is known by (seed, reader, number), see :func:`generator`, so that any of a million can be made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

DEEP = 100_000
"""Brackets that are opened one inside the other."""

LONG = 20_000
"""Characters of a very long text."""

TEXTS = (
    "", " ", "\n", "a\nb\r\nc", "\0", "a\0b", "\x1b[31mred\x1b[0m", "../../x", "../../../../etc/passwd", "/etc/passwd",
    "/dev/zero", "/dev/stdin", "/proc/self/mem", "C:\\x", "\\\\host\\x", "~/.ssh/id_rsa", "file:///etc/passwd", ".",
    "..",
    "a/../../b", "x" * 300, "x" * LONG, "\ud800", "\udcff", "\u202e", "é" * 50, "<script>alert(1)</script>",
    "%s%n{0}{x}",
    "__class__", "__reduce__", "_parameters", "evil.py:make", "1", "1e3", "NaN", "true", "null", "$(touch x)", "'; --",
    "weight", "bias", "ifso-recipe", "ifso-run", "float32", "F32",
)  # fmt: skip

NUMBERS = (
    0, 1, -1, 2, 3, 7, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**18, 10**30, 10**400, -(10**400), 10**4000, 0.5, -0.0, 1e-320, 1e30, 1e308, -1e308, 0.1, 1.5,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, False, [], {}, [[]], [{}], {"": None}, [None], [0], [1, 2], [1, 2, 3, 4], ["a"], {"a": 1}, [[1, 2]],
    {"name": "x"}, [True], [-1], [0.5], [10**400], ["\n"], {"\n": 1}, {"__class__": 1}, [0] * 1000,
    {"a": {"b": {"c": []}}},
    *TEXTS, *NUMBERS,
)  # fmt: skip

LITERALS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "0" + "1" * 30, "1" + "0" * 400, "[" * DEEP,
    '{"a":' * DEEP, "[" * 900 + "]" * 900, '"\\ud800"', '"\\u0000"', '"\x01"', "undefined", "'x'", "{,}", "[1,]", "01",
    '"' + "x" * LONG + '"', "\ufeff", "/* */ 1", "1 2", '{"a":1,"a":2}', "-", "+1", ".5", "1.", "1e", "tru", '"\\x"',
    '"',
)  # fmt: skip
"""Put into the text of a document, where no tree of values leads."""

BYTES = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\n",
    b"{",
    b"}",
    b"[",
    b'"',
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xed\xa0\x80",
)

Slot = tuple[Any, Any]
"""A list or dict, and a place in it."""


def generator(seed: int, reader: str, number: int) -> Random:
    """The generator of one input."""
    return Random(f"{seed}/{reader}/{number}")


def copied(value: Any) -> Any:
    """A copy of a tree of JSON values."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def mutated_document(document: Any, random: Random, most: int = 3) -> Any:
    """A copy of a tree of JSON values with one to ``most`` changes of its structure or values."""
    root = [copied(document)]
    for _ in range(random.randint(1, most)):
        slots = _slots(root)
        holder, key = slots[0] if random.random() < 0.01 or len(slots) == 1 else random.choice(slots[1:])
        random.choice(CHANGES)(holder, key, root, random)
    return root[0]


def _slots(root: list[Any]) -> list[Slot]:
    """Every place of a value, the whole tree first."""
    found: list[Slot] = [(root, 0)]
    for holder, key in found:
        value = holder[key]
        if isinstance(value, dict):
            found += [(value, name) for name in value]
        elif isinstance(value, list):
            found += [(value, place) for place in range(min(len(value), 50))]
    return found


def _replace(holder: Any, key: Any, root: list[Any], random: Random) -> None:
    holder[key] = copied(random.choice(VALUES))


def _adjust(holder: Any, key: Any, root: list[Any], random: Random) -> None:
    """Another value of the same type, or the same value as another type."""
    value = holder[key]
    if isinstance(value, bool) or value is None:
        holder[key] = random.choice((not value, int(bool(value)), str(value)))
    elif isinstance(value, (int, float)):
        half = value + 0.5 if abs(value) < 1e300 else 0.5
        holder[key] = random.choice(
            (value + 1, value - 1, -value, value * 2, half, repr(value)[:300], _larger(value), [value])
        )
    elif isinstance(value, str):
        place = random.randint(0, len(value))
        holder[key] = random.choice(
            (value[:place], value[:place] + random.choice(TEXTS) + value[place:], value * 2, [value])
        )
    else:
        _replace(holder, key, root, random)


def _larger(value: float) -> float:
    return value * 2**40 if isinstance(value, float) or abs(value) < 10**4000 else value


def _remove(holder: Any, key: Any, root: list[Any], random: Random) -> None:
    if holder is root:
        root[0] = {}
    else:
        del holder[key]


def _add(holder: Any, key: Any, root: list[Any], random: Random) -> None:
    value = copied(random.choice(VALUES))
    if isinstance(holder, dict):
        holder[random.choice(TEXTS)] = value
    elif holder is not root:
        holder.insert(random.randint(0, len(holder)), value)


def _repeat(holder: Any, key: Any, root: list[Any], random: Random) -> None:
    if isinstance(holder, dict):
        holder[f"{key}{random.choice(('', ' ', '2', '.'))}"] = copied(holder[key])
    elif holder is not root:
        holder[key:key] = [copied(holder[key]) for _ in range(random.choice((1, 2, 100)))]


def _swap(holder: Any, key: Any, root: list[Any], random: Random) -> None:
    other, place = random.choice(_slots(root))
    holder[key] = copied(other[place])


def _rename(holder: Any, key: Any, root: list[Any], random: Random) -> None:
    if isinstance(holder, dict):
        holder[random.choice((*TEXTS, *map(str, holder)))] = holder.pop(key)


def _nest(holder: Any, key: Any, root: list[Any], random: Random) -> None:
    for _ in range(random.choice((1, 2, 20, 200))):
        holder[key] = [holder[key]] if random.random() < 0.5 else {"a": holder[key]}


Change = Callable[[Any, Any, list[Any], Random], None]
CHANGES: tuple[Change, ...] = (
    _replace,
    _replace,
    _replace,
    _adjust,
    _adjust,
    _remove,
    _add,
    _repeat,
    _swap,
    _rename,
    _nest,
)


def mutated_json(document: Any, random: Random) -> bytes:
    """The bytes of a JSON file: mostly well formed with hostile values, else hurt as text or as bytes."""
    choice = random.random()
    value = document if choice > 0.97 else mutated_document(document, random)
    data = json.dumps(value, ensure_ascii=random.random() < 0.9, indent=random.choice((None, None, 1)))
    encoded = data.encode("utf-8", "surrogatepass")
    if choice < 0.7:
        return encoded
    return mutated_literals(data, random) if choice < 0.85 else mutated_bytes(encoded, random)


def mutated_literals(text: str, random: Random) -> bytes:
    """JSON with a strange literal in the place of a value, or a key that occurs twice."""
    places = [place for place, letter in enumerate(text) if letter in ":[,{"]
    if places:
        place = random.choice(places) + 1
        key = f'"{random.choice(("format", "name", "id", "settings"))}": {random.choice(LITERALS)},'
        new = key if text[place - 1] == "{" else random.choice(LITERALS) + random.choice(("", ","))
        text = text[:place] + new + text[place + random.choice((0, 0, 1, 5)) :]
    return text.encode("utf-8", "surrogatepass")


def mutated_lines(lines: Sequence[Any], random: Random) -> bytes:
    """A file of JSON lines: some of them hostile, cut short, doubled, left out or out of order."""
    chosen = [json.dumps(line).encode() for line in lines]
    for _ in range(random.randint(1, 3)):
        place = random.randrange(len(chosen))
        chosen[place] = mutated_json(lines[place], random)
    if random.random() < 0.3:
        random.shuffle(chosen)
    data = random.choice((b"\n", b"\n", b"\n", b"\r\n", b"", b"\0")).join(chosen)
    return mutated_bytes(data, random) if random.random() < 0.1 else data


def mutated_bytes(data: bytes, random: Random) -> bytes:
    """Flips, cuts, splices and repetitions, one to three of them."""
    for _ in range(random.randint(1, 3)):
        start, end = sorted((random.randint(0, len(data)), random.randint(0, len(data))))
        kind = random.randrange(7)
        if kind == 0 and data:
            flipped = bytearray(data)
            flipped[min(start, len(data) - 1)] ^= 1 << random.randrange(8)
            data = bytes(flipped)
        elif kind == 1:
            data = data[:start]
        elif kind == 2:
            data = data[:start] + data[end:]
        elif kind == 3:
            data = data[:start] + random.choice(BYTES) * random.choice((1, 1, 8, 1000)) + data[start:]
        elif kind == 4:
            data = data[:end] + data[start:end] * random.choice((1, 1, 3)) + data[end:]
        elif kind == 5:
            data = data[:start] + random.randbytes(min(end - start, 64)) + data[end:]
        else:
            data = data[end:] + data[:start]
    return data
