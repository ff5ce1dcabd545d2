"""Step a shard: ZeRO-1, clipping, optimizer state by parameter name."""
