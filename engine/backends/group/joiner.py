"""`ostinato engine join`: the ranks of one more node, started and killed as the head says, for as long as it runs."""

from __future__ import annotations

import base64
import logging
import pickle
import socket
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from engine.backends.group.local_ranks import Died, Event, LocalRanks, NotSpawned, Said
from engine.backends.group.messages import Launch, MasterAt, Ready, StartFailed
from engine.backends.group.wire import HANDSHAKE_SECONDS, Link, introduce

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
ANY_ADDRESS = ("0.0.0.0", "::")


class Joiner:
    """Node `node` of the group whose head listens at `host`:`port`."""

    def __init__(self, host: str, port: int, node: int, token: str) -> None:
        self._host, self._port, self._node, self._token = host, port, node, token
        self._ranks: LocalRanks | None = None
        self._generation = 0

    def run(self) -> None:
        """Until an exception ends it, such as a signal's; no rank is left then. Raises Refused."""
        waiting = False
        while True:
            try:
                with self._connected() as link:
                    waiting = False
                    logger.info("joined %s:%s as node %s", self._host, self._port, self._node)
                    self._follow(link)
            except (OSError, ValueError) as error:
                if not waiting:
                    logger.warning("no head at %s:%s: %s; trying again", self._host, self._port, error)
                waiting = True
            finally:
                self._end()
            threading.Event().wait(RETRY_SECONDS)

    def _connected(self) -> _Connected:
        connection = socket.create_connection((self._host, self._port), timeout=HANDSHAKE_SECONDS)
        link = Link(connection, silence_seconds=HANDSHAKE_SECONDS)
        try:
            introduce(link, self._token, self._node)
        except BaseException:
            link.close()
            raise
        return _Connected(link)

    def _follow(self, link: Link) -> None:
        while True:
            message = link.receive()
            match message["do"]:
                case "launch":
                    self._launch(link, message)
                case "master" if message["generation"] == self._generation and self._ranks is not None:
                    self._announce(self._ranks, message)
                case "close" if message["generation"] == self._generation and self._ranks is not None:
                    self._ranks.expect_end()
                case "end" if message["generation"] == self._generation and self._ranks is not None:
                    if message["stacks"]:
                        self._ranks.dump_stacks()
                    self._end()
                case "leave":
                    raise ConnectionResetError(message["reason"])

    def _launch(self, link: Link, message: dict[str, Any]) -> None:
        self._end()
        launches: list[Launch] = pickle.loads(base64.b64decode(message["launches"]))
        generation = self._generation = message["generation"]
        self._ranks = LocalRanks(
            launches,
            message["env"],
            lambda event: report(link, generation, event),
            tick_seconds=message["tick_seconds"],
            address=link.own_address,
        )
        self._ranks.start()

    def _announce(self, ranks: LocalRanks, message: dict[str, Any]) -> None:
        host = self._host if message["host"] in ANY_ADDRESS else message["host"]
        ranks.announce(MasterAt(host, message["port"]))

    def _end(self) -> None:
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks = None


class _Connected:
    """Says something to the head often enough, for as long as the block runs."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._over = threading.Event()

    def __enter__(self) -> Link:
        threading.Thread(target=self._beat, name="group-beat", daemon=True).start()
        return self._link

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._link.close()

    def _beat(self) -> None:
        while not self._over.wait(self._link.silence_seconds / 4):
            with suppress(OSError):
                self._link.send({"say": "beat"})


def report(link: Link, generation: int, event: Event) -> None:
    """Tells the head; without effect when it is gone, which ends this node's ranks anyway."""
    with suppress(OSError):
        message = as_message(event)
        if message is not None:
            link.send({**message, "generation": generation})


def as_message(event: Event) -> dict[str, Any] | None:
    """None: not for the head."""
    if isinstance(event, NotSpawned):
        return {"say": "not_spawned", "reason": event.reason}
    if isinstance(event, Died):
        return {"say": "died", "deaths": [asdict(death) for death in event.deaths]}
    if not isinstance(event, Said):
        return {"say": "tick", "activities": [asdict(activity) for activity in event.activities]}
    match event.message:
        case Ready():
            return {"say": "ready", "rank": event.rank}
        case StartFailed(error=error, on_purpose=on_purpose):
            kind = type(error).__name__ if on_purpose else None
            return {"say": "failed", "rank": event.rank, "kind": kind, "error": str(error)}
    return None


def join(host: str, port: int, node: int, token: str) -> None:
    """What the command runs. Raises Refused."""
    Joiner(host, port, node, token).run()
