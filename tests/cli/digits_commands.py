"""Commands on the digits, as a line, and the networks that they leave."""

from __future__ import annotations

import shlex
from pathlib import Path

from torch import nn

import ifso
from ifso.cli.main import main

TASK = "--model ifso:resnet8-digits --data digits"
QUICK = "--criterion magnitude --schedule one-shot --recalibrate 0 --batch 64"


def ifso_(line: str) -> int:
    return main(shlex.split(line))


def loaded(folder: str | Path, name: str = "ifso:resnet8-digits") -> nn.Module:
    return ifso.load(folder, ifso.create_model(name)).eval()
