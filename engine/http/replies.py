"""Reads the JSON replies of servers that are not ours, such as judges and reward servers, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

MAX_REPLY_BYTES = 8 * 2**20
"""Largest reply that is read. An answer of 100,000 tokens has about 0.5 MB."""


class UnusableReply(ValueError):
    """Raised for a reply that is too large, compressed or not JSON. The message does not name the server."""


@dataclass(frozen=True)
class Reply:
    """A reply that was read whole."""

    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def text(self) -> str:
        """The first characters of the body, for messages. The server's charset is not used: it may name any codec."""
        return self.body[:1200].decode("utf-8", "replace")[:300]

    def json(self) -> Any:
        """The parsed body. Raises UnusableReply."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise UnusableReply(f"did not answer with JSON: {self.text[:200]!r}") from error


async def post_json(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Reply:
    """Posts `body` as JSON. Raises UnusableReply for a reply that is too large, and the errors of httpx."""
    # a compressed reply could be any number of times larger than what is transferred
    asked = {"Accept-Encoding": "identity", **(headers or {})}
    async with client.stream("POST", url, json=dict(body), headers=asked) as response:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise UnusableReply(f"answered in the encoding {encoding[:20]!r}, which was not asked for")
        received = bytearray()
        async for block in response.aiter_bytes():
            received += block
            if len(received) > MAX_REPLY_BYTES:
                raise UnusableReply(f"answered with more than {MAX_REPLY_BYTES >> 20} MiB; expected a short answer")
        return Reply(response.status_code, response.headers, bytes(received))
