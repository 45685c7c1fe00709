"""Valid and damaged requests for the fuzz campaign against the server's routes, as the bytes that a client sends.

A case depends only on (world, seed, number).
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.http import wire
from engine.protocol import GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from storage.chain.records import PolicyRef
from tests.fixtures.servers.unchecked import unchecked
from tests.fuzz.mutations import MUTATIONS

NUMBERS = ["0", "-1", "1", "2", "3", "1e308", "-1e308", "1e-320", "1e-9", "0.5", "NaN", "Infinity", "-0.0", "1e999"]
NUMBERS += ["2147483648", "4294967296", "9223372036854775807", "9223372036854775808", "1" + "0" * 400, "9" * 5000]
STRINGS = ["", "r", "x" * 3000, "\u0000", "\ud800", "../x", "a/b", "tiny", "tiny@1", "run:é", "\u202e", "💥" * 50]
STRINGS += ["cross_entropy", "grpo", "full", "lora", "policy", "0-s", "0" * 64, "f" * 32, "{{ 1/0 }}", "\r\nX: y"]
VERBS = ["import_model", "create_policy", "take_gradient_step", "begin_checkpoint", "save_checkpoint", "export_model"]
VERBS += ["stage_policy", "release", "scale_samplers"]


@dataclass(frozen=True)
class Number:
    """A number as text in JSON. Python's numbers may not be able to represent it."""

    text: str


@dataclass(frozen=True)
class World:
    """Token, run, policies and artifacts that exist on the server."""

    token: str
    run: str
    policy: dict[str, Any]
    scalar: dict[str, Any]
    """A policy with a scalar head."""
    base: dict[str, Any]
    batch: dict[str, Any]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One connection: the bytes to send, the number of pieces, and how much of the response is read."""

    route: str
    data: bytes
    pieces: int = 1
    pause: float = 0.0
    """Seconds between the pieces."""
    read: int | None = None
    """Bytes after which the caller goes away; None: it reads the whole answer."""


def case(world: World, seed: int, number: int) -> Case:
    """The request of this number."""
    draw = random.Random(f"{seed}/{number}")
    return draw.choices(list(KINDS), weights=list(KINDS.values()))[0](world, draw)


# -- JSON ------------------------------------------------------------------------------------------------------


def valid_body(verb: str, world: World, draw: random.Random) -> dict[str, Any]:
    common = {"policy": world.policy, "provenance": world.provenance, "epoch": 0}
    step = {
        "parent": world.policy,
        "batch": world.batch,
        "loss": draw.choice([{"kind": "cross_entropy"}, {"kind": "grpo"}, {"kind": "dpo"}, {"kind": "ppo"}]),
        "optimizer": {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0},
        "minibatches": {"size": None, "epochs": 1, "shuffle_seed": 0},
        "temperature": 1.0, "controllers_in": {}, "cursor_in": {}, "cursor_out": {}, "nan_policy": "fail",
    }  # fmt: skip
    root = {"base": world.base, "base_digest": world.base["sha256"], "trainable": {"kind": "full"}, "init_seed": 0}
    name = f"c{draw.randrange(3)}"
    return {
        "import_model": {"source": "tiny", "provenance": world.provenance},
        "create_policy": {"spec": {"run": world.run, "stage": name, "model": "policy", "root": root}},
        "take_gradient_step": {"request": step, "epoch": 0},
        "begin_checkpoint": {**common, "name": name},
        "stage_policy": {"policy": common["policy"], "epoch": 0},
        "save_checkpoint": {**common, "name": name},
        "export_model": {**common, "model_name": name},
        "release": {"run": world.run, "epoch": 0},
        "scale_samplers": {"samplers": 2},
    }[verb]


def openai_body(path: str, world: World, draw: random.Random) -> dict[str, Any]:
    options = {
        "model": draw.choice([world.run, f"{world.run}/0-s/policy", f"{world.run}@0", "tiny"]),
        "max_tokens": draw.choice([1, 4, 16]),
        "stream": draw.random() < 0.5,
    }
    extra = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_tokens": 1, "n": 2, "seed": 7, "stop": ["a", "€"],
        "logprobs": True if "chat" in path else 0, "user": "u", "presence_penalty": 0.0, "echo": False,
    }  # fmt: skip
    options |= {name: extra[name] for name in draw.sample(list(extra), draw.randrange(5))}
    if "chat" in path:
        roles = draw.choices(["system", "user", "assistant"], k=draw.randrange(1, 4))
        return {"messages": [{"role": role, "content": "What is 2+3? é"} for role in roles], **options}
    return {"prompt": draw.choice(["ab", [10, 11], ["a", "b"], [[1], [2]]]), **options}


def damaged(value: Any, draw: random.Random) -> Any:
    """The value with one part of it replaced, removed, repeated or wrapped."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name = draw.choice(list(value))
        action = draw.random()
        if action < 0.1:
            return {key: part for key, part in value.items() if key != name}
        if action < 0.15:
            return value | {draw.choice(STRINGS): anything(draw)}
        return value | {name: damaged(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        return [*value[:place], damaged(value[place], draw), *value[place + 1 :]]
    repeated = [value] * (20 if isinstance(value, dict | list) else draw.choice([2, 50, 5000]))
    return draw.choice([anything(draw), anything(draw), [value], repeated, {"kind": value}])


def anything(draw: random.Random) -> Any:
    if draw.random() < 0.15:
        return [anything(draw) for _ in range(draw.randrange(4))]
    if draw.random() < 0.1:
        return {draw.choice(STRINGS): anything(draw)}
    return draw.choice([None, True, False, Number(draw.choice(NUMBERS)), draw.choice(STRINGS)])


def dumped(value: Any) -> str:
    """JSON of the value, numbers as they are written."""
    if isinstance(value, Number):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{dumped(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(dumped, value)) + "]"
    return json.dumps(value)


def damaged_text(text: str, draw: random.Random) -> bytes:
    """The text as bytes; seldom no JSON any more."""
    data = text.encode("utf-8", "surrogatepass")
    return draw.choices(
        [
            data,
            data[: draw.randrange(len(data) + 1)],
            data + draw.choice([b"x", b"\x00", b"}" * 9, b" " * 100_000]),
            data.replace(b":", b":" + b"[" * draw.choice([1, 2000, 200_000]), 1),
            b"\xef\xbb\xbf" + data,
            data.decode("utf-8", "replace").encode("utf-16"),
            data.replace(b'"', b'"\xff', 1),
            data.replace(b"{", b'{"epoch":0,"epoch":1,"policy":null,', 1),
        ],
        weights=[90, 2, 2, 2, 1, 1, 1, 1],
    )[0]


def json_case(world: World, draw: random.Random) -> Case:
    verb = draw.choices(VERBS, weights=[2, 4, 8, 1, 1, 1, 2])[0]
    body = valid_body(verb, world, draw)
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        body = damaged(body, draw)
    return posted(f"/v1/{verb}", damaged_text(dumped(body), draw), "application/json", world, draw)


def openai_case(world: World, draw: random.Random) -> Case:
    path = draw.choice(["/v1/chat/completions", "/v1/completions"])
    body = openai_body(path, world, draw)
    for _ in range(draw.choice([0, 0, 1, 1, 2])):
        body = damaged(body, draw)
    return posted(path, damaged_text(dumped(body), draw), "application/json", world, draw)


# -- Arrow -----------------------------------------------------------------------------------------------------


def arrow_case(world: World, draw: random.Random) -> Case:
    verb = draw.choice(["generate", "generate", "logprobs", "values"])
    policy = PolicyRef(**(world.scalar if (verb == "values") != (draw.random() < 0.1) else world.policy))
    rows = draw.choice([0, 1, 2, 5, 40])
    # Mostly valid tokens and lengths, so that many requests pass the first checks.
    known = range(250) if draw.random() < 0.6 else [0, 1, 10, 250, 258, 300, -1, 2**31 - 1]
    lengths = draw.choices([0, 1, 2, 9, 60, 700], [1, 2, 2, 9, 2, 1], k=rows)
    ids = [draw.choices(known, k=length) for length in lengths]
    if verb == "generate":
        most = draw.choice([1, 2, 8, 8, 100, 2**31, 2**63])
        sampling = SamplingParams.model_construct(
            temperature=draw.choice([1.0, 1.0, 0.0, 1e-320, 1e-9, 1e308]), top_p=draw.choice([1.0, 0.5, 1e-300]),
            top_k=draw.choice([0, 1, 10**9]), max_new_tokens=most, min_new_tokens=draw.choice([0, 0, 1, most, 2**40]),
            stop_token_ids=draw.choice([(), (5,), (10**9,), (-1,), tuple(range(300))]),
            stop=draw.choice([(), (), ("a",), ("é", "</answer>"), ("",), ("\ufffd",), ("a",) * 20, ("a" * 2000,)]),
        )  # fmt: skip
        seeds = [draw.choice([0, -1, 2**63 - 1]) for _ in range(rows)]
        data = wire.encode_generate(GenerateRequest(policy, ids, seeds, sampling), epoch=0)
    else:
        masks = [[draw.choice([False, True, True]) for _ in row] for row in ids]
        if draw.random() < 0.6:
            masks = [[False, *[True] * (len(row) - 1)][: len(row)] for row in ids]
        if draw.random() < 0.1:
            masks = [[*row, True] for row in masks]
        sequences = []
        for row, mask in zip(ids, masks, strict=True):
            arrays = {"token_ids": np.array(row, np.int32), "loss_mask": np.array(mask, bool)}
            sequences.append(unchecked(TokenSequence, **arrays, group=draw.choice(["", "g"])))
        temperature = draw.choice([1.0, 1.0, 0.0, -1.0, 1e-320, 1e308])
        request = unchecked(LogprobsRequest, policy=policy, sequences=sequences, temperature=temperature)
        data = wire.encode_logprobs_request(request, epoch=0)
    # Damage some of the encoded bodies.
    if draw.random() < 0.4:
        kind = "generate" if verb == "generate" else "logprobs request"
        with contextlib.suppress(struct.error, IndexError):  # an earlier mutation broke what this one needs
            for _ in range(draw.choice([1, 1, 2])):
                data = bytes(draw.choice(MUTATIONS)(bytearray(data), kind, draw))
    return posted(f"/v1/{verb}", data, wire.MEDIA_TYPE, world, draw)


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4])):
        action = draw.randrange(4)
        place = draw.randrange(len(changed) + 1)
        if action == 0 and changed:
            changed[place - 1] ^= 1 << draw.randrange(8)
        elif action == 1:
            del changed[place:]
        elif action == 2 and len(changed) >= 4:
            place = draw.randrange(len(changed) - 3) // 4 * 4
            struct.pack_into("<I", changed, place, draw.choice([0, 1, 8, 0x7FFFFFFF, 0xFFFFFFFF, draw.getrandbits(32)]))
        else:
            changed[place:place] = draw.randbytes(draw.choice([1, 8, 64]))
    return bytes(changed)


# -- pages, connections ----------------------------------------------------------------------------------------


def page_case(world: World, draw: random.Random) -> Case:
    odd = draw.choice(["nan", "-1", "1e308", "31", "0", "1", "", "%00", "9" * 5000, "inf"])
    id = draw.choice(["0" * 32, "x", "%ff", "F" * 32, f"{draw.getrandbits(128):032x}"])
    paths = ["/health", "/ready", "/metrics", "/openapi.json", "/v1/server", f"/v1/info?wait={odd}", "/v1/models"]
    paths += [f"/v1/calls/{id}?wait={odd}", f"/v1/models/{draw.choice(['r', 'tiny', '%2e%2e', 'r@9', 'é'])}"]
    paths += [f"/v1/release?wait={odd}", "/reports/x", "/docs", "//", "/%00", "/" + "a" * 9000]
    path = draw.choice(paths)
    methods = ["GET", "HEAD", "DELETE", "OPTIONS", "PUT", "POST", f"M{draw.getrandbits(30)}"]
    method = draw.choices(methods, [9] + [1] * 6)
    head = f"{method[0]} {path} HTTP/1.1\r\n{_headers(world, draw)}\r\n"
    page = "/".join(path.partition("?")[0].split("/")[:3])
    return Case(f"page {page if page.isascii() and len(page) < 16 else 'other'}", head.encode())


def raw_case(world: World, draw: random.Random) -> Case:
    """Bytes that are no request, or only a part of one, or more than one."""
    whole = posted("/v1/release", b'{"run": "r"}', "application/json", world, draw).data
    bad = [
        draw.randbytes(draw.choice([1, 100, 70_000])),
        whole[: draw.randrange(len(whole))],
        damaged_bytes(whole, draw),
        whole * draw.choice([2, 40]),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * draw.choice([10, 5000]),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"POST /v1/release HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n" + b"x" * 99,
        b"POST /v1/release HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\nContent-Length: 7\r\n\r\n",
        b"POST /v1/release HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n" * 1000,
    ]
    return Case("raw", draw.choice(bad), draw.choice([1, 1, 3]), 0.05, read=draw.choices([0, None], [9, 1])[0])


def posted(path: str, body: bytes, kind: str, world: World, draw: random.Random) -> Case:
    """A request with this body: most are sent at once and waited for, some are slow, chunked, cut, or given up."""
    length = len(body) if draw.random() < 0.99 else draw.choice([len(body) + 5, max(0, len(body) - 3), 1 << 40])
    framing = f"Content-Length: {length}"
    if draw.random() < 0.1:
        framing = "Transfer-Encoding: chunked"
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:]) if part) + b"0\r\n\r\n"
    if draw.random() < 0.03:
        kind = draw.choice(["text/plain", "application/json; charset=utf-16", wire.MEDIA_TYPE, "", "application/json"])
    line = f"POST {path}?wait={draw.choice([0, 1, 5, 5])} HTTP/1.1"
    head = f"{line}\r\n{_headers(world, draw)}Content-Type: {kind}\r\n{framing}\r\n\r\n"
    data = head.encode() + body
    if draw.random() < 0.9:
        return Case(f"POST {path}", data)
    return Case(f"POST {path}", data, draw.choice([1, 4]), 0.2, draw.choice([0, 20, 300, 1000, None]))


def _headers(world: World, draw: random.Random) -> str:
    lines = ["Host: 127.0.0.1", "Connection: close"]
    if draw.random() < 0.98:
        lines.append(f"Authorization: Bearer {world.token}")
    if draw.random() < 0.1:
        lines.append(f"X-Request-Id: {draw.choice(['0' * 32, 'x', f'{draw.randrange(9):032x}'])}")
    if draw.random() < 0.03:
        lines.append(draw.choice(["X-Ostinato-Version: 99", "X-Ostinato-Store: é", f"X-Ostinato-Store: {'9' * 5000}"]))
    return "".join(f"{line}\r\n" for line in lines)


KINDS: dict[Callable[[World, random.Random], Case], int] = {
    json_case: 30,
    openai_case: 25,
    arrow_case: 25,
    page_case: 10,
    raw_case: 10,
}
"""Kinds of cases and how often each is drawn."""
