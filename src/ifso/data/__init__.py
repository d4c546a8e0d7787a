"""Data sets by name: the digits that come with the package, CIFAR from files, and a user's own."""

from ifso.data.base import Data
from ifso.data.registry import open_data

__all__ = ["Data", "open_data"]
