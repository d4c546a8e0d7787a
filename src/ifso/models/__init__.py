"""Networks by name: the paper's own, torchvision's, timm's, and a user's file."""

from ifso.models.registry import create_model, default_inputs
from ifso.models.weights import load_weights

__all__ = ["create_model", "default_inputs", "load_weights"]
