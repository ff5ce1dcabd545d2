"""Compiled optimizer ops live here; until they are built, the pure torch path is used."""
