"""Imports a verl configuration: the table of its keys, and the conversions of their values."""
