"""goose-strategy."""
