"""Networks as files that run without their classes and without ifso: ONNX and ``torch.export`` programs."""
