"""Tests of authentication, of refused names, and of the log lines of a request."""

from __future__ import annotations

import logging
from uuid import uuid4

import pytest

from engine.errors import BadSpec
from engine.http import wire
from engine.http.lifecycle import Binding
from engine.http.service import ServerOptions
from engine.protocol import GenerateRequest, LogprobsRequest, RowsRequest, TokenSequence, TopRowsRequest
from storage.store.objects import ObjectStore
from tests.fixtures.servers.app_clients import POLICY, PROVENANCE_JSON, TOKEN, Serve, bearer
from tests.fixtures.servers.scripted_engine import ScriptedEngine

PATHS = ["../x", "a/../../b", "/etc/passwd", "..", ".", "", "a\\b", "a\0b", "C:/x", "a/b/c", "~", "%2e%2e", "a\nb", "ä"]


ROUTES = [
    ("GET", "/v1/info"),
    ("GET", "/v1/server"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nope"),
    ("GET", f"/v1/calls/{'0' * 32}"),
    ("DELETE", f"/v1/calls/{'0' * 32}"),
    ("GET", "/v1/models"),
    *(
        ("POST", f"/v1/{verb}")
        for verb in (
            "import_model", "create_policy", "generate", "logprobs", "values", "measure", "take_gradient_step",
            "stage_policy", "save_checkpoint", "begin_checkpoint", "export_model", "release", "chat/completions",
            "completions", "logprobs_of_rows", "top_logprobs_of_rows", "values_of_rows", "scale_samplers",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_but_the_probes_wants_the_token(serve: Serve, method: str, path: str) -> None:
    client = serve(token=TOKEN)
    for headers in ({}, bearer(""), bearer(TOKEN[:-1]), bearer(TOKEN + "x"), {"Authorization": f"Basic {TOKEN}"}):
        answer = await client.request(method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"] == "NotAuthenticated"
        # the message says where the token is
        assert "OSTINATO_ENGINE_TOKEN" in answer.json()["message"] and TOKEN not in answer.text
    assert (await client.request(method, path, headers=bearer(TOKEN))).status_code != 401


async def test_the_probes_want_no_token(serve: Serve) -> None:
    client = serve(token=TOKEN)
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).json()["message"] == "the engine is starting"


async def test_a_token_that_is_not_ascii_is_refused(serve: Serve) -> None:
    answer = await serve(token=TOKEN).get("/v1/server", headers={b"Authorization": "Bearer ä".encode()})
    assert answer.status_code == 401


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "192.168.0.7:8777", "", "localhost.io", "[::1]evil", "[::1"],
)
async def test_without_a_token_other_host_names_are_refused(serve: Serve, host: str) -> None:
    client = serve()
    answer = await client.get("/v1/server", headers={"Host": host})
    assert answer.status_code == 403
    assert (await serve(token=TOKEN).get("/v1/server", headers={"Host": host} | bearer(TOKEN))).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8777", "localhost", "LOCALHOST:1", "[::1]:8777", "127.8.9.1"])
async def test_without_a_token_loopback_names_are_served(serve: Serve, host: str) -> None:
    assert (await serve().get("/v1/server", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_without_a_token_other_addresses_are_not_bound(host: str) -> None:
    with pytest.raises(BadSpec, match="OSTINATO_ENGINE_TOKEN"):
        Binding(host, 0).open()


async def test_a_page_of_another_site_cannot_post(serve: Serve, engine: ScriptedEngine) -> None:
    """Without our content type or our headers a browser would ask no permission first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = await serve().post("/v1/release", content=b'{"run": "r"}', headers={"Content-Type": kind})
        assert answer.status_code == 422
        answer = await serve().post("/v1/generate", content=b"", headers={"Content-Type": kind})
        assert answer.status_code == 422
    assert not engine.begun


# -- names ------------------------------------------------------------------------------------------------------


def bodies_with(name: str) -> list[tuple[str, dict]]:
    """Every place where a name may stand, with this one in it."""
    # Valid parts, of which each body below replaces one name.
    policy, artifact = POLICY.model_dump(), {"kind": "k", "sha256": "0", "bytes": 1, "rows": None, "parents": []}
    step = {"batch": artifact | {"key": "k"}, "loss": {"kind": "cross_entropy"}, "optimizer": {"lr": 1.0}}
    measure = {"policy": policy, "batch": artifact | {"key": "k"}, "loss": {"kind": "cross_entropy"}}
    root = {"base_digest": "d", "base": artifact | {"key": "k"}}
    spec = {"run": "r", "stage": "s", "model": "m", "root": root}
    bodies: list[tuple[str, dict]] = [
        ("import_model", {"source": name, "provenance": PROVENANCE_JSON}),
        ("import_model", {"source": f"m@{name}", "provenance": PROVENANCE_JSON}),
        ("import_model", {"source": name, "upload": "0" * 64, "provenance": PROVENANCE_JSON}),
        ("import_model", {"source": "m", "upload": name, "provenance": PROVENANCE_JSON}),
        ("create_policy", {"spec": spec | {"root": root | {"base": artifact | {"key": name}}}}),
        ("take_gradient_step", {"request": step | {"parent": policy, "batch": artifact | {"key": name}}}),
        ("measure", {"request": measure | {"batch": artifact | {"key": name}}}),
        ("export_model", {"policy": policy, "model_name": name, "provenance": PROVENANCE_JSON}),
        ("save_checkpoint", {"policy": policy, "name": name, "provenance": PROVENANCE_JSON}),
        ("begin_checkpoint", {"policy": policy, "name": name, "provenance": PROVENANCE_JSON}),
        ("release", {"run": name}),
    ]
    # Each part of the name of a policy.
    for field in ("run", "stage", "model"):
        wrong = policy | {field: name}
        bodies += [
            ("create_policy", {"spec": spec | {field: name}}),
            ("create_policy", {"spec": spec | {"root": {"base_digest": "", "start": wrong}}}),
            ("take_gradient_step", {"request": step | {"parent": wrong}}),
            ("take_gradient_step", {"request": step | {"parent": policy, "reference": wrong}}),
            ("measure", {"request": measure | {"policy": wrong}}),
            ("save_checkpoint", {"policy": wrong, "provenance": PROVENANCE_JSON}),
            ("stage_policy", {"policy": wrong}),
            ("begin_checkpoint", {"policy": wrong, "provenance": PROVENANCE_JSON}),
            ("export_model", {"policy": wrong, "model_name": "m", "provenance": PROVENANCE_JSON}),
        ]
    return bodies


@pytest.mark.parametrize("name", PATHS)
async def test_path_like_names_are_refused_and_nothing_is_touched(
    serve: Serve, engine: ScriptedEngine, store: ObjectStore, name: str
) -> None:
    client = serve()
    before = [info.key for info in store.list()]
    for verb, body in bodies_with(name):
        if name == "a/b/c" and body.get("request", {}).get("batch", {}).get("key") == name:
            continue  # a key of an artifact may have slashes
        if name == "a/b/c" and (body.get("spec", {}).get("root", {}).get("base") or {}).get("key") == name:
            continue
        answer = await client.post(f"/v1/{verb}", json=body)
        assert answer.status_code == 422, (verb, body, answer.text)
    for field in ("run", "stage", "model"):
        policy = POLICY.model_copy(update={field: name})
        for verb, data in (
            ("generate", wire.encode_generate(GenerateRequest(policy, [[1]], [1]), epoch=0)),
            ("logprobs", wire.encode_logprobs_request(LogprobsRequest(policy, [TokenSequence([1], [0.0])]), epoch=0)),
            ("values", wire.encode_logprobs_request(LogprobsRequest(policy, [TokenSequence([1], [0.0])]), epoch=0)),
            ("logprobs_of_rows", wire.encode_rows_request(RowsRequest(policy, []), epoch=0)),
            ("top_logprobs_of_rows", wire.encode_rows_request(TopRowsRequest(policy, [], top=2), epoch=0)),
            ("values_of_rows", wire.encode_rows_request(RowsRequest(policy, []), epoch=0)),
        ):
            answer = await client.post(f"/v1/{verb}", content=data, headers={"Content-Type": wire.MEDIA_TYPE})
            assert answer.status_code == 422
    assert not engine.begun
    assert [info.key for info in store.list()] == before


# -- the log ----------------------------------------------------------------------------------------------------


async def test_log_lines_name_the_call_and_carry_no_payload_and_no_token(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    client, id = serve(token=TOKEN), uuid4().hex
    secret = {"provenance": PROVENANCE_JSON | {"config_digest": "PAYLOAD"}, "source": "PAYLOAD-name"}
    headers = bearer(TOKEN) | {"X-Request-Id": id}
    await client.post("/v1/import_model", json=secret, headers=headers)
    await client.post("/v1/import_model", json={"PAYLOAD": "PAYLOAD"}, headers=bearer(TOKEN))
    await client.post("/v1/release", json={"run": "the-run"}, headers=bearer(TOKEN))
    await client.post("/v1/release", json={"run": "PAYLOAD"}, headers=bearer("WRONG" + TOKEN))
    await client.get("/v1/x%0d%0aforged line?PAYLOAD=1", headers=bearer(TOKEN))
    lines = [r.getMessage() for r in caplog.records if r.name == "ostinato.engine.http"]
    assert [line.split(" ")[:3] for line in lines] == [
        ["POST", "/v1/import_model", "422"],
        ["POST", "/v1/import_model", "422"],
        ["POST", "/v1/release", "200"],
        ["POST", "/v1/release", "401"],
        ["GET", "/v1/x%0d%0aforged%20line", "404"],
    ]
    assert f"id={id}" in lines[0]
    assert lines[2].endswith("run=the-run")
    ours = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith(("httpx", "httpcore")))
    assert TOKEN not in ours
    assert "PAYLOAD" not in ours


def test_options_and_bindings_do_not_show_the_token() -> None:
    assert TOKEN not in repr(ServerOptions(token=TOKEN)) + repr(Binding(token=TOKEN))
