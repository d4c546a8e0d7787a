"""Criteria: which units matter, by every rule from magnitude to second-order influence."""
