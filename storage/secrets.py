"""Refuses addresses with a user name or a password, which would be stored and shown with the config and in errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from storage.errors import PermanentStorageError

_SECRET = re.compile(
    r"(?:openai://[^@\s]*@)?"  # openai://NAME@URL names the address of the model
    r"(?:s3a?://[^/@\s]*:[^@\s]*@"  # AWS' secrets may contain slashes
    r"|hf://[^/?#@\s]*:[^/?#\s]*@"  # hf://NAME@REVISION is a repository without owner
    r"|(?!openai:|hf:)[a-z][a-z0-9+.-]*://[^/?#\s]*@)",
    re.IGNORECASE,
)
_CREDENTIALS = re.compile(r"(?<=://)[^/?#@\s]+@")
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "hf": "HF_TOKEN",
    "http": "HF_TOKEN for a hub, OPENAI_API_KEY for an endpoint, OSTINATO_ENGINE_TOKEN for an engine, or the one that "
    "token_variable of a reward server names",
}
"""The environment variables to use, by the beginning of the scheme."""


class SecretInURL(PermanentStorageError, ValueError):
    """Raised for an address with a user name or password. The message does not show it."""


def refuse_secrets(value: Any, where: str = "") -> None:
    """Raises SecretInURL if a text in `value`, a text or a structure of lists and mappings, is an address with a user
    name or password. `where` is its dotted name in a config."""
    # a stack instead of recursion: arguments of a recipe may be nested deeper than Python recurses
    pending = [(where, value)]
    while pending:
        place, item = pending.pop()
        if isinstance(item, Mapping):
            pending += [(f"{place}.{name}" if place else str(name), child) for name, child in item.items()]
        elif isinstance(item, list | tuple):
            pending += [(f"{place}.{index}" if place else str(index), child) for index, child in enumerate(item)]
        elif isinstance(item, str) and "@" in item and len(item.split()) == 1 and _SECRET.match(item.strip()):
            raise SecretInURL(_refusal(item, place))


def without_secrets(text: str) -> str:
    """The text of another library with its user names and passwords of addresses left out."""
    return _CREDENTIALS.sub("…@", text)


def _refusal(address: str, where: str) -> str:
    """The message about an address with a user name or password, which it does not show."""
    scheme = re.findall(r"([A-Za-z][A-Za-z0-9+.-]*)://", address)[-1].lower()
    known = [variables for start, variables in _VARIABLES.items() if scheme.startswith(start)]
    variables = known[0] if known else "the environment variable of its library"
    return (
        f"{f'{where}: ' if where else ''}given an address {scheme}://…@… with a user name or password, which is stored "
        f"and shown with the config; give the address without it, and set {variables}"
    )
