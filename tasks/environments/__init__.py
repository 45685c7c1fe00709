"""Environments, which react to a policy turn by turn and grade it."""
