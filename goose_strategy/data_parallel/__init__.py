"""Sync the replicas: flat gradient buckets and their reduction."""
