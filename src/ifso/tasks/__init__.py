"""What a network can be trained for: the losses of classifiers and detectors, and the defaults of pruning for each."""

PRUNING_BATCH = {"classification": 128, "detection": 2}
"""Samples in a batch of pruning, by the task of the data."""

PRUNING_RATE = {"classification": 0.01, "detection": 0.001}
"""The learning rate between removals, by the task of the data: small for small batches with boxes, as in the paper."""
