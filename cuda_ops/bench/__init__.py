"""Measurements of the compiled ops: instructions, a card, a CPU."""
