"""Every collective and every message between ranks."""
