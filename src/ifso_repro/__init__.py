"""The tables and figures of the IFSO paper, run again: ``ifso repro``."""
