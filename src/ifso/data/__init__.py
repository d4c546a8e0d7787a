"""Data: the digits that come with the package."""
