"""What developers of ifso measure, from a checkout: ``python -m benchmarks``."""
