"""Every way in for a file that a stranger may hand to us."""

from __future__ import annotations

from pathlib import Path

import PIL.Image
import torchvision.transforms.v2.functional  # noqa: F401 what is imported only now is not taken for code in a file
from contract import Reader
from data_readers import data_readers
from run_readers import run_readers


def readers(root: Path) -> dict[str, Reader]:
    """All readers by name, their seeds written into the folder ``root``."""
    PIL.Image.init()
    return {reader.name: reader for reader in (*run_readers(root), *data_readers(root))}
