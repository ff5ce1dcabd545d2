"""Private APIs of torch and transformers, one file each."""
