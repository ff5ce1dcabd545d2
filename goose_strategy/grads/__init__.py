"""Gradients between the schedule and the optimizer."""
