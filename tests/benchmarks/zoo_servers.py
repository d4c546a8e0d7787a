"""Stand-ins for what a process of ``python -m benchmarks zoo`` does; they import nothing heavy."""

import os
import time


def hang(pipe, setup):
    """Tell of a stage, and then nothing more."""
    pipe.recv()
    pipe.send({"ready": True})
    pipe.send({"stage": "score", "units": 7})
    time.sleep(60)


def die(pipe, setup):
    """As a segmentation fault would: the first network is told of, the second takes the process down."""
    pipe.recv()
    pipe.send({"stage": "trace", "units": 7})
    pipe.send(None)
    pipe.recv()
    os._exit(3)
