"""Computes the memory that an engine needs on each device, before anything starts. Without torch."""
