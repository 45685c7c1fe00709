"""Registered models, their aliases, and the decisions about champions."""
