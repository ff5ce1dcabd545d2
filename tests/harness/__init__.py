"""Worlds of ranks, tiny models and comparisons for the tests."""
