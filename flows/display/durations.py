"""Durations in words. This module imports nothing, so that commands can use it without importing Prefect."""


def format_duration(seconds: float) -> str:
    """Formats a duration: 42s, 3m05s, 2h07m, 3d04h."""
    whole = max(0, round(seconds))
    for unit, size, lower, lower_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // lower_size:02d}{lower}"
    return f"{whole}s"
