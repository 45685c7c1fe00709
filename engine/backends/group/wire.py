"""How the head of a group and the nodes that join it talk: JSON over TCP, after each has proved that it has the token.

Neither sends the token: each answers the other's fresh nonce with an HMAC. What follows is neither encrypted nor
signed, as little as what Gloo and NCCL send: the nodes need a network of their own.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("!I")
STRANGER_BYTES = 4096
"""Largest message of a peer that has not proved itself."""
PEER_BYTES = 256 << 20
HANDSHAKE_SECONDS = 10.0


class Refused(Exception):
    """The other side does not take this peer; the message says why."""


class Silent(OSError):
    """The other side has said nothing for too long: it hangs, or the network is cut."""


class Link:
    """A connection; `send` from any thread, `receive` from one. Their OSError means that the other side is gone."""

    def __init__(self, connection: socket.socket, *, silence_seconds: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._lock = threading.Lock()
        self.limit = STRANGER_BYTES
        self.set_silence(silence_seconds)

    def set_silence(self, seconds: float) -> None:
        """The other side must say something this often, and take what it is sent."""
        self.silence_seconds = seconds
        self._socket.settimeout(seconds)

    @property
    def own_address(self) -> str:
        """This side's, as the other one reaches it."""
        return str(self._socket.getsockname()[0])

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> dict[str, Any]:
        """Raises ValueError for what is no message."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > self.limit:
            raise ValueError(f"a message of {length} bytes; at most {self.limit} are taken here")
        message = json.loads(self._exactly(length))
        if not isinstance(message, dict):
            raise ValueError("a message that is no object")
        return message

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(min(size - len(parts), 1 << 20))
            except TimeoutError:
                raise Silent(f"it said nothing for {self.silence_seconds:g} s") from None
            if not part:
                raise ConnectionResetError("it closed the connection")
            parts += part
        return bytes(parts)


def admit(link: Link, token: str, *, nodes: int, silence_seconds: float) -> int:
    """The head's side: the rank of a node that has the token. Raises Refused, OSError or ValueError."""
    ours = secrets.token_hex(32)
    link.send({"nonce": ours, "silence_seconds": silence_seconds})
    answer = link.receive()
    node, theirs = answer.get("node"), str(answer.get("nonce"))
    if not hmac.compare_digest(str(answer.get("proof")).encode(), proof(token, "node", ours, theirs, node)):
        raise refuse(link, "wrong token: give the one of the head's OSTINATO_GROUP_TOKEN")
    if not isinstance(node, int) or not 1 <= node < nodes:
        raise refuse(link, f"node rank {node} is not in 1..{nodes - 1}: the head is 0, and trainer.nodes is {nodes}")
    link.send({"proof": proof(token, "head", ours, theirs, node).decode()})
    link.limit = PEER_BYTES
    link.set_silence(silence_seconds)
    return node


def introduce(link: Link, token: str, node: int) -> None:
    """A node's side. Raises Refused, also when the head does not have the token; OSError; ValueError."""
    hello = link.receive()
    theirs, ours = str(hello.get("nonce")), secrets.token_hex(32)
    link.send({"node": node, "nonce": ours, "proof": proof(token, "node", theirs, ours, node).decode()})
    answer = link.receive()
    if "refused" in answer:
        raise Refused(str(answer["refused"])[:500])
    if not hmac.compare_digest(str(answer.get("proof")).encode(), proof(token, "head", theirs, ours, node)):
        raise Refused("what answers there does not have the token: it is not this group's head")
    link.limit = PEER_BYTES
    link.set_silence(float(hello["silence_seconds"]))


def proof(token: str, side: str, head_nonce: str, node_nonce: str, node: Any) -> bytes:
    """`side` keeps one side's answer from being the other's."""
    text = "\0".join(("ostinato-group-1", side, head_nonce, node_nonce, str(node)))
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest().encode()


def refuse(link: Link, reason: str) -> Refused:
    with suppress(OSError):
        link.send({"refused": reason})
    return Refused(reason)
