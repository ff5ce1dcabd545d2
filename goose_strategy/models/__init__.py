"""What is known about each model family, as data."""
