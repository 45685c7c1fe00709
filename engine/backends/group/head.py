"""The head's side of several nodes: who has joined, and one connection to each."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from engine.backends.group.wire import HANDSHAKE_SECONDS, Link, Refused, admit

logger = logging.getLogger(__name__)

JOINED = "joined"
LOST = "lost"
"""What the listener hears of the connection itself; other messages are the node's own."""

Listener = Callable[[int, dict[str, Any]], None]


class Head:
    """Listens for nodes 1 … nodes-1. The listener hears (node, message) in the threads of the connections."""

    def __init__(self, host: str, port: int, token: str, *, nodes: int, silence_seconds: float) -> None:
        """Raises OSError when the address cannot be had."""
        self._token, self._nodes, self._silence = token, nodes, silence_seconds
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.listener: Listener = lambda node, message: None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        for target in (self._accept, self._beat):
            threading.Thread(target=target, name=f"group-head{target.__name__}", daemon=True).start()

    def joined(self) -> set[int]:
        with self._lock:
            return set(self._links)

    def send(self, node: int, message: dict[str, Any]) -> None:
        """Without effect for a node that is not there: the listener hears of its loss."""
        with self._lock:
            link = self._links.get(node)
        if link is not None:
            with suppress(OSError):
                link.send(message)

    def send_all(self, message: dict[str, Any]) -> None:
        for node in self.joined():
            self.send(node, message)

    def close(self) -> None:
        """The nodes kill their ranks, and look for a new head."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.close()

    def _beat(self) -> None:
        while not self._closed.wait(self._silence / 4):
            self.send_all({"do": "beat"})

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except OSError:
                if self._closed.is_set():
                    return
                self._closed.wait(0.5)  # out of file descriptors, perhaps not for long
                continue
            threading.Thread(target=self._serve, args=(connection, peer), name="group-node", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: Any) -> None:
        link = Link(connection, silence_seconds=HANDSHAKE_SECONDS)
        try:
            node = admit(link, self._token, nodes=self._nodes, silence_seconds=self._silence)
        except (Refused, OSError, ValueError) as error:
            logger.warning("%s is no node of the group: %s", peer, error)
            link.close()
            return
        with self._lock:
            taken = node in self._links
            if not taken and not self._closed.is_set():
                self._links[node] = link
        if taken or self._closed.is_set():
            with suppress(OSError):
                link.send({"do": "leave", "reason": f"node {node} has joined already"})
            link.close()
            return
        logger.info("node %s has joined from %s", node, peer)
        self._listen(node, link)

    def _listen(self, node: int, link: Link) -> None:
        self.listener(node, {"say": JOINED})
        reason = "its connection was closed"
        try:
            while True:
                self.listener(node, link.receive())
        except (OSError, ValueError) as error:
            reason = str(error)
        finally:
            with self._lock:
                self._links.pop(node, None)
            link.close()
            if not self._closed.is_set():
                logger.warning("node %s is gone: %s", node, reason)
            self.listener(node, {"say": LOST, "reason": reason})
