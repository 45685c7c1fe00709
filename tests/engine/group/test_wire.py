"""Who may join a group: the handshake of head and nodes."""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from engine.backends.group.group import Group
from engine.backends.group.head import JOINED, LOST, Head
from engine.backends.group.wire import STRANGER_BYTES, Link, Refused, introduce, proof
from engine.errors import BadSpec

TOKEN = "a token of more than sixteen characters"


class Heard:
    """What a head's listener heard."""

    def __init__(self, head: Head) -> None:
        self._events: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        head.listener = lambda node, message: self._events.put((node, message))

    def next(self) -> tuple[int, str]:
        node, message = self._events.get(timeout=30)
        return node, message["say"]


@pytest.fixture
def head() -> Iterator[Head]:
    head = Head("127.0.0.1", 0, TOKEN, nodes=3, silence_seconds=30.0)
    yield head
    head.close()


def link_to(head: Head) -> Link:
    return Link(socket.create_connection(head.address), silence_seconds=30.0)


def test_a_node_with_the_token_joins_is_heard_and_is_missed(head: Head) -> None:
    heard, link = Heard(head), link_to(head)
    introduce(link, TOKEN, 2)
    assert heard.next() == (2, JOINED)
    assert head.joined() == {2}
    link.send({"say": "hello"})
    assert heard.next() == (2, "hello")
    head.send(2, {"do": "this"})
    assert link.receive() == {"do": "this"}
    link.close()
    assert heard.next() == (2, LOST)
    assert head.joined() == set()


@pytest.mark.parametrize(
    ("token", "node", "why"), [("", 1, "wrong token"), (TOKEN + "x", 1, "wrong token"), (TOKEN, 3, "not in 1..2")]
)
def test_others_are_refused_with_the_reason(head: Head, token: str, node: int, why: str) -> None:
    with pytest.raises(Refused, match=why):
        introduce(link_to(head), token, node)
    assert head.joined() == set()


def test_a_second_node_of_the_same_rank_is_sent_away(head: Head) -> None:
    heard, first, second = Heard(head), link_to(head), link_to(head)
    introduce(first, TOKEN, 1)
    assert heard.next() == (1, JOINED)
    introduce(second, TOKEN, 1)
    assert second.receive() == {"do": "leave", "reason": "node 1 has joined already"}
    assert head.joined() == {1}


def test_a_head_without_the_token_is_not_believed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        link = Link(listener.accept()[0], silence_seconds=30.0)
        link.send({"nonce": "00", "silence_seconds": 30.0})
        answer = link.receive()
        link.send({"proof": answer["proof"]})  # all it can do: hand the node's own proof back

    thread = threading.Thread(target=impostor, daemon=True)
    thread.start()
    link = Link(socket.create_connection(listener.getsockname()), silence_seconds=30.0)
    with pytest.raises(Refused, match="does not have the token"):
        introduce(link, TOKEN, 1)
    thread.join()


def test_a_proof_holds_for_one_handshake_one_side_and_one_node() -> None:
    one = proof(TOKEN, "node", "a", "b", 1)
    assert one == proof(TOKEN, "node", "a", "b", 1)
    others = [
        proof(TOKEN, "head", "a", "b", 1),
        proof(TOKEN, "node", "c", "b", 1),
        proof(TOKEN, "node", "a", "c", 1),
        proof(TOKEN, "node", "a", "b", 2),
        proof(TOKEN + "x", "node", "a", "b", 1),
    ]
    assert one not in others and len(set(others)) == len(others)


@pytest.mark.parametrize("data", [struct.pack("!I", STRANGER_BYTES + 1), struct.pack("!I", 4) + b"null", b"\0\0\0\2{x"])
def test_a_stranger_that_talks_too_much_or_nonsense_is_cut_off(head: Head, data: bytes) -> None:
    with socket.create_connection(head.address, timeout=30.0) as stranger:
        stranger.sendall(data)
        hello = stranger.recv(4)
        assert json.loads(stranger.recv(struct.unpack("!I", hello)[0]))["nonce"]
        with suppress(ConnectionResetError):  # another way to be cut off, with bytes of ours unread
            assert stranger.recv(1) == b""
    assert head.joined() == set()


def test_an_address_that_others_reach_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("", "short"):
        monkeypatch.setenv("OSTINATO_GROUP_TOKEN", token)
        with pytest.raises(BadSpec, match="OSTINATO_GROUP_TOKEN"):
            Group("a:B", {}, ranks=1, nodes=2, listen="0.0.0.0:0", start_seconds=1, hang_seconds=1)


def test_an_address_that_is_none_is_named() -> None:
    for listen in ("127.0.0.1", ":0", "127.0.0.1:port", "127.0.0.1:65536"):
        with pytest.raises(BadSpec, match="HOST:PORT"):
            Group("a:B", {}, ranks=1, listen=listen, start_seconds=1, hang_seconds=1)
