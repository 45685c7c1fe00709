"""Environments: what a policy acts in, turn by turn."""
