"""The base of the page: host, sessions, tokens of forms, headers, errors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from flows.page.app import create_app
from flows.page.security import (
    CSRF_HEADER,
    MAX_FIELDS,
    MAX_FORM_BYTES,
    MAX_OPEN_FORM_BYTES,
    SESSION_SECONDS,
    Sessions,
    parse_form,
)
from flows.page.shared import PageSettings

TOKEN = "t" * 20


def client(tmp_path: Path, token: str | None = None, host: str = "127.0.0.1:4202") -> TestClient:
    settings = PageSettings(storage=str(tmp_path), server="http://127.0.0.1:1/api", token=token)
    return TestClient(create_app(settings), base_url=f"http://{host}", follow_redirects=False)


def test_every_page_has_the_policy_without_inline_scripts(tmp_path: Path) -> None:
    answer = client(tmp_path).get("/start")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert " style=" not in answer.text and "<style" not in answer.text and " onclick=" not in answer.text
    assert client(tmp_path).get("/static/htmx.min.js").headers["content-security-policy"] == policy


def test_without_a_token_only_loopback_names_are_answered(tmp_path: Path) -> None:
    assert client(tmp_path, host="localhost:4202").get("/start").status_code == 200
    refused = client(tmp_path, host="evil.example").get("/start")
    assert refused.status_code == 403 and "loopback" in refused.text
    assert client(tmp_path, TOKEN, host="train.example").get("/health").status_code == 200


def test_the_session_cookie_is_strict_and_not_readable(tmp_path: Path) -> None:
    cookie = client(tmp_path).get("/start").headers["set-cookie"]
    assert cookie.startswith("ostinato_page_4202=") and "HttpOnly" in cookie and "SameSite=Strict" in cookie


def test_a_page_with_a_token_asks_for_it_and_goes_back_to_the_wanted_page(tmp_path: Path) -> None:
    page = client(tmp_path, TOKEN)
    refused = page.get("/start")
    assert refused.status_code == 401 and 'value="/start"' in refused.text and "set-cookie" not in refused.headers
    assert page.post("/login", data={"token": "wrong", "next": "/start"}).status_code == 401
    accepted = page.post("/login", data={"token": TOKEN, "next": "/start"})
    assert (accepted.status_code, accepted.headers["location"]) == (303, "/start")
    assert page.get("/start").status_code == 200
    elsewhere = page.post("/login", data={"token": TOKEN, "next": "//evil.example"})
    assert elsewhere.headers["location"] == "/"


def test_an_expired_session_loads_the_page_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = client(tmp_path, TOKEN)
    page.post("/login", data={"token": TOKEN})
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + SESSION_SECONDS + 1)
    expired = page.get("/start", headers={"HX-Request": "true"})
    assert expired.status_code == 401 and expired.headers["hx-refresh"] == "true"


def test_a_session_is_signed_and_survives_a_restart_with_the_same_token() -> None:
    cookie = Sessions(TOKEN).begin()
    assert Sessions(TOKEN).seconds_left(cookie) > 0
    assert Sessions("another token of a page").seconds_left(cookie) == 0
    expires, _, signature = cookie.partition(".")
    assert Sessions(TOKEN).seconds_left(f"{int(expires) + 1}.{signature}") == 0
    assert Sessions(TOKEN).seconds_left("") == 0


def test_no_form_token_is_a_session() -> None:
    csrf = Sessions(TOKEN).csrf
    for purpose in ("", "csrf", "form", "form:", "session"):
        assert Sessions(TOKEN).seconds_left(f"{purpose}.{csrf}") == 0


def test_a_page_without_a_session_contains_no_form_token(tmp_path: Path) -> None:
    page = client(tmp_path, TOKEN)
    csrf = Sessions(TOKEN).csrf
    for answer in (page.get("/start"), page.post("/login", data={"token": "wrong"}), page.get("/static/none")):
        assert answer.status_code in (401, 404) and csrf not in answer.text
    page.post("/login", data={"token": TOKEN})
    assert csrf in page.get("/start").text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:4202"}, 404),
        ({"Sec-Fetch-Site": "none"}, 404),
        ({"Origin": "http://127.0.0.1:4202"}, 404),
        ({}, 404),  # not a browser
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:4202"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://127.0.0.1:8000"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_a_form_of_a_page_of_another_address_is_refused(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    page = client(tmp_path)
    csrf = page.app.state.page.sessions.csrf  # type: ignore[attr-defined]
    assert page.post("/nowhere", data={"csrf": csrf}, headers=headers).status_code == status
    # the login has no form token, but the same check
    login = client(tmp_path, TOKEN).post("/login", data={"token": TOKEN}, headers=headers)
    assert login.status_code == (303 if status == 404 else 403)


def test_a_post_without_the_forms_token_is_refused(tmp_path: Path) -> None:
    page = client(tmp_path)
    for headers in ({}, {CSRF_HEADER: "wrong"}):
        refused = page.post("/start", data={"a": "b"}, headers=headers)
        assert refused.status_code == 403 and "Nothing was changed" in refused.text
    csrf = page.app.state.page.sessions.csrf  # type: ignore[attr-defined]
    # passes the guard: this path has no such method or finds no training
    assert page.post("/nowhere", headers={CSRF_HEADER: csrf}).status_code == 404
    assert page.post("/nowhere", data={"csrf": csrf}).status_code == 404


def test_a_form_that_is_too_large_is_refused(tmp_path: Path) -> None:
    page = client(tmp_path)
    page.get("/health")  # begins a session
    refused = page.post("/start", content=b"a" * (MAX_FORM_BYTES + 1))
    assert refused.status_code == 413 and "larger than 64.0 MiB" in refused.text
    # it is read, and has no form token
    assert page.post("/start", content=b"a" * (MAX_OPEN_FORM_BYTES + 1)).status_code == 403


def test_without_a_session_and_at_the_login_forms_are_small(tmp_path: Path) -> None:
    refused = client(tmp_path).post("/start", content=b"a" * (MAX_OPEN_FORM_BYTES + 1))
    assert refused.status_code == 413 and "larger than 64.0 KiB" in refused.text
    page = client(tmp_path, TOKEN)
    assert page.post("/login", data={"token": TOKEN}).status_code == 303
    assert page.post("/login", content=b"a" * (MAX_OPEN_FORM_BYTES + 1)).status_code == 413
    assert page.post("/login", content=b"a" * MAX_OPEN_FORM_BYTES).status_code == 401


def test_an_error_says_what_to_do_as_a_page_or_as_a_part(tmp_path: Path) -> None:
    page = client(tmp_path)
    whole = page.get("/<script>").text
    assert "<!doctype html>" in whole and "no such page" in whole and "Status 404" in whole
    part = page.get("/nowhere", headers={"HX-Request": "true"})
    assert part.text.startswith('<div class="error" role="alert">')


def test_forms_are_parsed_with_their_files() -> None:
    body = (
        b'--X\r\nContent-Disposition: form-data; name="name"\r\n\r\nsums\r\nand more\r\n'
        b'--X\r\nContent-Disposition: form-data; name="file"; filename="x/rows.jsonl"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n{}\n\x00\xff\r\n\n\r\n--X--\r\n"
    )
    form = parse_form("multipart/form-data; boundary=X", body)
    assert form.get("name") == "sums\nand more"
    assert (form.files["file"].name, form.files["file"].data) == ("rows.jsonl", b"{}\n\x00\xff\r\n\n")
    assert parse_form("application/x-www-form-urlencoded", b"a=1&a=%3Cb%3E&c=").get("a") == "<b>"


def test_a_form_of_line_ends_is_parsed_in_linear_time() -> None:
    data = b"\n" * (20 << 20)
    head = b'--X\r\nContent-Disposition: form-data; name="file"; filename="a.csv"\r\n\r\n'
    started = time.process_time()
    form = parse_form("multipart/form-data; boundary=X", head + data + b"\r\n--X--\r\n")
    assert len(form.files["file"].data) == len(data)
    # about 0.2 s; a parser of lines takes 16 s
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\n" * 10_000,
        b'--X\r\nContent-Disposition: form-data; name="a"\r\n\r\ncut off',
        b"--X\r\n\r\nno name\r\n--X--\r\n",
        b'--X\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n--X--\r\n',
        b'--X\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n' * (MAX_FIELDS + 1) + b"--X--\r\n",
    ],
)
def test_a_form_that_is_cut_off_or_odd_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_form("multipart/form-data; boundary=X", body)
