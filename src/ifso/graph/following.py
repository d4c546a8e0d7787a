"""The walk along the tape: every call's rule in turn, then what the user and the model's outputs hold fast."""

from __future__ import annotations

from collections.abc import Collection

from ifso.graph import rules
from ifso.graph.labels import Labels
from ifso.graph.tape import Ref, Tape


def follow_channels(tape: Tape, ignore: Collection[str] = ()) -> Labels:
    """Propagate channel ids through a recorded run."""
    labels = Labels(tape)
    for call in tape.calls:
        rules.find(call)(call, labels)
    labels.freeze_all(tape.outputs, "is an output of the model")
    for place, value in enumerate(tape.values):
        if value.kind in ("parameter", "buffer") and is_under(value.name, ignore):
            labels.freeze_all([Ref(place)], "ignored on request")
    return labels


def is_under(name: str, modules: Collection[str]) -> bool:
    """Does a parameter belong to one of these modules (or is it one of these names)?

    >>> is_under("layer1.0.conv1.weight", ["layer1"]), is_under("layer10.weight", ["layer1"])
    (True, False)
    """
    return any(name == module or name.startswith(module + ".") for module in modules)
