"""The study behind the paper's Fig. 1: estimates against losses after retraining, on small networks."""
