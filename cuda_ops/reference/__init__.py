"""The step in pure torch: what the compiled code is compared with, and the default."""
