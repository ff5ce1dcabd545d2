"""Differentially private training: clipping per sample, noise, sampling, accounting."""
