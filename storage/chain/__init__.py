"""The chain of a run: its records, rebases, forks, leases and checkpoints."""
