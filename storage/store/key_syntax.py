"""The characters and lengths of keys, which hold in every backend. storage.store.keys makes the keys."""

from __future__ import annotations

import re

from storage.errors import InvalidKey

MAX_KEY = 900  # S3 allows 1,024 bytes, including the prefix of the store
MAX_SEGMENT = 200  # file systems allow 255
_KEY = re.compile(r"[A-Za-z0-9._=@+\-]+(/[A-Za-z0-9._=@+\-]+)*", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9._=@+\-/]*", re.ASCII)


def is_key(key: str) -> bool:
    """Whether the text is a valid key: relative, with allowed characters, and not too long."""
    if not isinstance(key, str) or len(key) > MAX_KEY or _KEY.fullmatch(key) is None:
        return False
    return all(part not in (".", "..") and len(part) <= MAX_SEGMENT for part in key.split("/"))


def validate_key(key: str) -> str:
    """Returns the key. Raises InvalidKey unless is_key."""
    if not is_key(key):
        raise InvalidKey(
            f"{str(key)[:200]!r} is not a key; give relative segments of letters, digits and . _ = @ + - (at most "
            f"{MAX_SEGMENT} characters each, {MAX_KEY} in all), divided by single slashes, none of them . or .."
        )
    return key


def validate_prefix(prefix: str) -> str:
    """Returns the prefix. Raises InvalidKey unless it is empty or the beginning of a key."""
    if not _PREFIX.fullmatch(prefix) or prefix.startswith("/") or {".", ".."} & set(prefix.split("/")[:-1]):
        raise InvalidKey(f"{prefix[:200]!r} is not the beginning of a key; give relative segments, like 'runs/a/'")
    return prefix
