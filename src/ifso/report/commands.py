"""The command lines that repeat a run or go on with it, and the Python that loads what it left."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ifso.runs.record import RunRecord, Tuning
from ifso.runs.values import at, mapping, text

REPEATED = ("criterion_option",)
"""Options that are given once for each value."""

RENAMED = {"decay_all": "decay_norms"}
"""Options that are stored under another name."""

JOINED = ("input",)
"""Options whose values stand behind commas."""


def prune_command(run: RunRecord) -> str | None:
    """The command that repeats a pruning; None if Python began it."""
    told = text(at(run.config, "about", "command"))
    if told is not None or not run.arguments:
        return told
    return shlex.join(["ifso", "prune", *options(run.arguments), "--out", str(run.folder)])


def resume_command(run: RunRecord) -> str | None:
    """The command that goes on with an unfinished pruning; None if only Python can."""
    return shlex.join(["ifso", "prune", "--resume", "--out", str(run.folder)]) if run.arguments else None


def finetune_command(run: RunRecord, tuning: Tuning) -> str | None:
    """The command that repeats a fine-tuning; None if Python began it."""
    told = text(at(tuning.config, "about", "command"))
    given = mapping(at(tuning.config, "about", "arguments"))
    if told is not None or not given:
        return told
    out = [] if tuning.folder == run.folder / "finetune" else ["--out", str(tuning.folder)]
    return shlex.join(["ifso", "finetune", str(run.folder), *options(given, negatable=True), *out])


def load_command(run: RunRecord) -> str | None:
    """The Python that loads the network that was made last; None if there is none yet."""
    tuned = run.tuning is not None and run.tuning.weights_bytes is not None and run.tuning.summary is not None
    if not tuned and run.weights_bytes is None:
        return None
    folder = run.tuning.folder if tuned and run.tuning is not None else run.folder
    name = text(run.arguments.get("model")) or text(at(run.config, "about", "model"))
    if name is None:
        name = f"{run.model}(...)" if run.model.isidentifier() else "build_it()"
        return f"import ifso\n\nmodel = ifso.load({str(folder)!r}, {name})  # with the original, unpruned"
    outputs = [layer.channels for layer in run.structure.layers if not layer.groups]
    known = name.startswith(("ifso:", "timm:", "torchvision:")) and "num_classes" not in name and len(outputs) == 1
    original = f"ifso.create_model({name!r}{f', num_classes={outputs[0]}' if known else ''})"
    return f"import ifso\n\nmodel = ifso.load({str(folder)!r}, {original})"


def options(arguments: Mapping[str, Any], *, negatable: bool = False) -> list[str]:
    """Stored arguments as they are typed; with ``negatable`` a switch that is off is said so.

    >>> options({"model": "ifso:resnet32", "macs": 0.5, "channels_last": True, "criterion_option": ["a=1", "b=2"]})
    ['--model', 'ifso:resnet32', '--macs', '0.5', '--channels-last', '--criterion-option', 'a=1',
    '--criterion-option', 'b=2']
    >>> options({"input": [1, 3, 32, 32], "ignore": ["fc", "stem"], "compile": False}, negatable=True)
    ['--input', '1,3,32,32', '--ignore', 'fc', 'stem', '--no-compile']
    """
    found: list[str] = []
    for name, value in arguments.items():
        word = RENAMED.get(name, name).replace("_", "-")
        option = f"--{word}"
        if isinstance(value, bool):
            found += [option] if value else [f"--no-{word}"] if negatable else []
        elif isinstance(value, list) and name in REPEATED:
            found += [part for each in value for part in (option, str(each))]
        elif isinstance(value, list):
            words = list(map(str, value))
            found += [option, *([",".join(words)] if name in JOINED else words)]
        elif value is not None:
            found += [option, str(value)]
    return found
