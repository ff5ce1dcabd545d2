"""Measurements that a user can repeat: `goose3d bench`."""
