"""Folders of runs: what they hold, and how they are written, read and opened again."""
