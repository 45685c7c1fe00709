"""Reads a whole store: audit, garbage collection, lineage, listings of runs."""
