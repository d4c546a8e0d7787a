"""Every ATen operator that takes a number, called with one that depends on how many channels there are.

Operators and their arguments are enumerated from PyTorch's schemas. Each call that runs on features as they are, and
whose result depends on the number, stands in a network: its channels are held fast, or compacted equals masked, or the
removal is refused. What differs in silence fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import difference, outputs
from test_numbers import EXACT, Net
from torch import Tensor

import ifso
from ifso.errors import CompactionError

LEFT_OUT = (
    "as_strided", "bernoulli", "binomial", "cauchy_", "chunk_cat", "ctc", "cuda", "cudnn", "data", "dim", "dropout",
    "embedding_bag", "empty", "exponential_", "fake_quant", "fbgemm", "from_file", "fused_", "geometric_", "gru",
    "histogram", "int_repr", "is_", "log_normal_", "lstm", "miopen", "mkldnn", "multinomial", "nested", "normal_",
    "numel", "pin_memory", "poisson", "q_", "qscheme", "quantize", "rand", "record_stream", "requires_grad", "resize",
    "retain", "rnn", "rrelu", "segment_reduce", "set_", "size", "sparse", "stft", "storage", "stride", "sym_", "to_",
    "uniform_", "_backward", "_version", "grid_sampler_2d_", "random_",
)  # fmt: skip
"""Parts of names: chance, other layouts, kernels of other libraries, and memory that is read as it is."""

Between = Callable[[Tensor, int], Tensor]
NUMBERS = {"number", "float", "int", "SymInt"}
KINDS = ("dtype", "layout", "memory_format", "device")
"""Arguments that are numbers in schemas alone; a wrong one ends the process."""
REAL: tuple[Callable[[int], Any], ...] = (lambda c: c / 8, lambda c: 1 / c)
WHOLE: tuple[Callable[[int], Any], ...] = (lambda c: c - 7, lambda c: c % 3, lambda c: c)
LISTED: tuple[Callable[[int], Any], ...] = (lambda c: [c - 7], lambda c: [c % 3])


def arguments() -> Iterator[tuple[Any, int, Any]]:
    """(operator, place, argument) of every number that an operator of a tensor takes."""
    for name in sorted(dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        if name.startswith("_") or any(part in name for part in LEFT_OUT) or not hasattr(packet, "overloads"):
            continue
        for overload in packet.overloads():
            func = getattr(packet, overload)
            listed = func._schema.arguments
            chance = torch.Tag.nondeterministic_seeded in func.tags
            if "out" in overload or chance or not listed or str(listed[0].type) != "Tensor":
                continue
            for place, argument in enumerate(listed):
                if _kind(argument) in NUMBERS and argument.name not in KINDS:
                    yield func, place, argument


def _kind(argument: Any) -> str:
    return str(argument.type).replace("Optional[", "").replace("List[", "").rstrip("]")


def _choices(argument: Any) -> tuple[Callable[[int], Any], ...]:
    if "List" in str(argument.type):
        return LISTED if "int" in _kind(argument).lower() else (lambda c: [c / 8],)
    return WHOLE if "int" in _kind(argument).lower() else REAL


def _filled(argument: Any, h: Tensor) -> Any:
    """Anything that may stand for an argument that is not looked at."""
    kind = str(argument.type)
    if argument.has_default_value():
        return argument.default_value
    if kind.startswith("Optional"):
        return None
    whole = [1] if "List" in kind else 1
    plain = {"Tensor": h, "List[Tensor]": [h, h], "number": 0.5, "float": 0.5, "bool": False, "str": "none"}
    return plain.get(kind, whole)


def between_of(func: Any, place: int, choice: Callable[[int], Any]) -> Between:
    """The call between two layers; a result of another shape or kind becomes a factor."""

    def between(h: Tensor, c: int) -> Tensor:
        listed = func._schema.arguments
        given = [_filled(argument, h) for argument in listed]
        given[0] = h.clone() if func._schema.is_mutable else h
        given[place] = choice(c)
        positional = [value for value, argument in zip(given, listed, strict=True) if not argument.kwarg_only]
        named = {
            argument.name: value
            for value, argument in zip(given, listed, strict=True)
            if argument.kwarg_only and value is not None
        }
        result = func(*positional, **named)
        result = result[0] if isinstance(result, (tuple, list)) else result
        return result if result.shape == h.shape and result.dtype == h.dtype else h * result.to(h.dtype).mean()

    return between


def telling(func: Any, place: int, argument: Any) -> Between | None:
    """The first choice of numbers that the call runs with, and that its result depends on."""
    h = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for choice in _choices(argument):
        between = between_of(func, place, choice)
        try:
            with torch.no_grad():
                one, other = between(h.clone(), 8), between(h.clone(), 5)
        except Exception:
            continue
        whole = one.shape == other.shape == h.shape
        if whole and one.isfinite().all() and other.isfinite().all() and not torch.equal(one, other):
            return between
    return None


def outcome(between: Between) -> str:
    """``frozen``, ``exact`` or ``refused``."""
    torch.manual_seed(0)
    model, x = Net(between).double(), torch.randn(4, 6, dtype=torch.float64)
    graph = ifso.trace(model, x)
    if not graph.groups:
        return "frozen"
    keep = {"a": torch.arange(8) >= 3}
    with ifso.masked(model, graph, keep):
        soft = outputs(model, x)
    try:
        ifso.compact_(model, graph, keep, verify=False)
    except CompactionError:
        return "refused"
    return "exact" if difference(soft, outputs(model, x)) <= EXACT else "different"


@pytest.mark.slow
def test_numbers_of_every_operator() -> None:
    found: dict[str, list[str]] = {}
    for func, place, argument in arguments():
        between = telling(func, place, argument)
        if between is not None:
            found.setdefault(outcome(between), []).append(f"{func} {argument.name}")
    assert found.keys() <= {"frozen", "exact", "refused"}, found["different"]
    assert sum(map(len, found.values())) > 200
    assert len(found.get("refused", ())) <= 5, found["refused"]
