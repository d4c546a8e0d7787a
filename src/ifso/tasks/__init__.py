"""What a network is for: the losses of classifiers and detectors."""
