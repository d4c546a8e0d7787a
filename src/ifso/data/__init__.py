"""Data sets by name: the digits that come with the package, CIFAR from files, and a user's own."""

from ifso.data.registry import open_data
from ifso.data.sets import Data

__all__ = ["Data", "open_data"]
