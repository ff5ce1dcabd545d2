"""Who am I in the device mesh, and who are my peers."""
