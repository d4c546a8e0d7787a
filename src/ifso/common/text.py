"""Words in messages and tables: one line, amounts, shares, durations."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

LONGEST = 500
"""Characters that are repeated of what an error says; a hostile file may put anything there."""


def one_line(error: BaseException | str, longest: int = LONGEST) -> str:
    r"""What an error says, without line breaks and characters that cannot be printed.

    >>> one_line("a\nb \x1b[1m")
    'a b \\x1b[1m'
    """
    words = " ".join(str(error).split())[: longest + 1]
    words = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in words)
    return words if len(words) <= longest else f"{words[: longest - 1]}…"


def amount(number: float) -> str:
    """A count as people read it.

    >>> amount(69_124_736), amount(464_432), amount(12)
    ('69.12 M', '464.43 k', '12')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {letter}"
    return f"{number:g}"


def describe_error(error: BaseException) -> str:
    """An error's kind and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def shown(value: object, most: int = 80) -> str:
    """A value as Python writes it, cut off where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def few(words: Sequence[str], most: int = 6, joint: str = ", ") -> str:
    """The first ones, and how many more there are.

    >>> few(["a", "b", "c"], 2), few(["a", "b"], 2, joint="; ")
    ('a, b and 1 more', 'a; b')
    """
    return joint.join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds.

    >>> duration(3725.4), duration(None)
    ('1:02:05', '-:--:--')
    """
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def roughly(seconds: float) -> str:
    """A time as one would say it: seconds below two minutes, minutes below two hours, then hours too.

    >>> roughly(0.2), roughly(45.3), roughly(754), roughly(9250)
    ('1 s', '45 s', '13 min', '2 h 34 min')
    """
    if round(seconds) < 120:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def loss_words(loss: float) -> str:
    """A loss with four digits; ``–`` where none was computed.

    >>> loss_words(0.0213456), loss_words(float("nan"))
    ('0.02135', '–')
    """
    return "–" if math.isnan(loss) else f"{loss:.4g}"


def standard_error(percent: float, samples: int) -> float:
    """That of a share of samples, such as an accuracy: √(p (1 − p) / n), in percent.

    >>> standard_error(90.0, 900)
    1.0
    """
    return math.sqrt(max(percent * (100 - percent), 0.0) / samples)


def with_error(percent: float, samples: int | None = None) -> str:
    """A share of so many ``samples`` in percent, such as an accuracy, with its standard error if that is known.

    >>> with_error(90.0, 900), with_error(90.0), with_error(90.0, 0)
    ('90.00 ± 1.00', '90.00', '90.00')
    """
    return f"{percent:.2f} ± {standard_error(percent, samples):.2f}" if samples else f"{percent:.2f}"


def joined_error(words: str) -> str:
    """The same without blanks, for lines of ``key=value``.

    >>> joined_error("90.00 ± 1.00")
    '90.00±1.00'
    """
    return words.replace(" ± ", "±")


def measured(name: str, value: float, samples: int | None = None) -> str:
    """A measure with four digits; an ``accuracy`` in percent of so many ``samples`` with its standard error.

    >>> measured("accuracy", 90.0, 900), measured("accuracy", 90.0), measured("test_loss", 0.12345, 900)
    ('90.00 ± 1.00', '90', '0.1235')
    """
    if name != "accuracy" or not samples or not 0 <= value <= 100:
        return f"{value:.4g}"
    return with_error(value, samples)


CONSTANTS = {"true": True, "false": False, "none": None}


def literal(text: str) -> Any:
    """A number, true, false or none, anything that Python writes as a literal, or else the text itself.

    >>> literal("2"), literal("1e-3"), literal("true"), literal("neumann")
    (2, 0.001, True, 'neumann')
    """
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
