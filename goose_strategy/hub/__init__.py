"""Read and write the checkpoints of the Hugging Face hub."""
