"""The grid: every layout against one process."""
