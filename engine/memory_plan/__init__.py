"""The memory that an engine needs on each device, computed before anything starts. No torch."""
