"""How much accuracy methods leave without training, ours beside Torch-Pruning's: ``ifso bench choose``."""
