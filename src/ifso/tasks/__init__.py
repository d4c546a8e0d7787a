"""What a network can be trained for: the losses of classifiers and of detectors."""
