"""Survive a crash: sharded checkpoints."""
