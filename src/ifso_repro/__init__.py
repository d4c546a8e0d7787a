"""The tables and figures of the IFSO paper, run again, and methods compared: ``ifso repro``, ``ifso bench choose``."""
