"""Bytes: objects, artifacts, checkpoints, the model registry, leases and the chain. Imports nothing of ours."""
