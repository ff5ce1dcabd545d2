"""Tests of what is known about model families."""
