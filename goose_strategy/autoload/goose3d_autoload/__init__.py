"""The entry point by which torch makes ``strategy="goose3d"`` known without an import."""
