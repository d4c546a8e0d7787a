"""Soft and physical removal, and the recipe that repeats it."""
