"""The section Chat: answers of a tiny engine, blind comparisons, votes, refusals, the line for a shell."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.registry.datasets import list_datasets
from storage.registry.decisions import commit_decision
from storage.registry.models import list_versions
from storage.store.objects import ObjectStore, open_store
from tasks.datasets.votes import list_votes
from tests.fixtures.page import HOSTILE, PROVENANCE, PageClient, publish, scripted_chat
from tests.fixtures.servers.openai_calls import OpenAIRun
from tests.fixtures.servers.openai_server import running_openai_server


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "store")


@pytest.fixture
def page(store: ObjectStore) -> Iterator[PageClient]:
    with scripted_chat({"a@1": "four", "b@1": "five", "evil@1": HOSTILE}) as url:
        yield PageClient(store.url, engine=url)


def begin(page: PageClient, **fields: str) -> str:
    return page.done("/chat", **({"max_tokens": "16", "temperature": "1"} | fields))


def say(page: PageClient, chat: str, question: str = "2+2?") -> list[dict[str, str]]:
    reply = page.post(f"{chat}/say", question=question)
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def said(events: list[dict[str, str]], side: str) -> str:
    return "".join(event.get("text", "") for event in events if event["side"] == side)


def vote(page: PageClient, chat: str, choice: str) -> Any:
    comparison = re.search(r'name="comparison" value="(\w+)"', page.text(chat))
    assert comparison is not None
    return page.post(f"{chat}/vote", choice=choice, comparison=comparison[1])


def test_one_model_answers_and_remembers(store: ObjectStore) -> None:
    requests: list[Any] = []
    with scripted_chat({"a@1": "four"}, requests) as url:
        page = PageClient(store.url, engine=url)
        chat = begin(page, first="a@1", temperature="0")
        assert said(say(page, chat), "left") == "four"
        say(page, chat, "Sure?")
    assert [message["content"] for message in requests[1]["messages"]] == ["2+2?", "four", "Sure?"]
    assert (requests[1]["temperature"], requests[1]["max_tokens"]) == (0, 16)
    text = page.text(chat)
    assert text.count("four") == 2 and "Left is better" not in text


def test_a_blind_comparison_hides_the_sides_until_the_vote(page: PageClient, store: ObjectStore) -> None:
    left_models = set()
    for number in range(12):
        chat = begin(page, first="a@1", second="b@1", blind="yes")
        events = say(page, chat)
        left = said(events, "left")
        assert {left, said(events, "right")} == {"four", "five"}
        # before the vote nothing tells which model is on which side
        assert all(set(event) == {"side", "text"} for event in events)
        before = page.text(chat)
        assert "<b>Left</b>" in before and "Left was" not in before
        assert vote(page, chat, "left").status_code == 303
        stored = list_votes(store)[-1]
        assert (stored.left.text, stored.choice, stored.blind) == (left, "left", True)
        assert f"Left was {stored.left.model}" in page.text(chat)
        left_models.add(stored.left.model)
        if len(left_models) == 2 and number > 2:
            break
    # the tally of the blind votes, by hand
    votes = list_votes(store)
    for model in ("a@1", "b@1"):
        won = sum(stored.left.model == model for stored in votes)
        row = page.text("/chat").partition(f"<td>{model}</td>")[2].partition("</tr>")[0]
        cells = [f"{won} ({100 * won / len(votes):.0f} %)", "0", str(len(votes))]
        assert re.findall(r'<td class="number">(.*?)</td>', row) == cells
    assert left_models == {"a@1", "b@1"}  # by chance in one of 2,048 runs it is not


def test_the_preferred_answer_goes_on_and_a_comparison_has_one_vote(page: PageClient, store: ObjectStore) -> None:
    chat = begin(page, first="a@1", second="b@1")
    right = said(say(page, chat), "right")
    comparison = re.search(r'name="comparison" value="(\w+)"', page.text(chat))
    assert comparison is not None
    assert vote(page, chat, "right").status_code == 303
    again = page.post(f"{chat}/vote", choice="left", comparison=comparison[1])
    assert again.status_code == 409 and "its vote already" in again.text
    say(page, chat, "Sure?")
    assert vote(page, chat, "tie").status_code == 303
    first, second = list_votes(store)
    assert first.messages == (("user", "2+2?"),)
    assert second.messages == (("user", "2+2?"), ("assistant", right), ("user", "Sure?"))
    assert first.left.policy.startswith("policy:served/") and second.choice == "tie"


def test_dpo_on_the_votes_is_one_click(page: PageClient, store: ObjectStore, tmp_path: Path) -> None:
    refused = page.post("/chat/votes/train")
    assert refused.status_code == 409 and "No vote prefers an answer yet" in refused.text
    chat = begin(page, first="a@1", second="b@1")
    say(page, chat)
    vote(page, chat, "left")
    assert "Train DPO on these votes" in page.text("/chat")
    place = page.done("/chat/votes/train")
    (dataset,) = list_datasets(store)
    assert (dataset.name, dataset.use, dataset.ref.rows) == ("votes", "preference", 1)
    assert place == f"/start?training=dpo&data.train=%7Bkind%3A+registered%2C+key%3A+votes%40{dataset.version}%7D"
    # the preferred model, once the store has it
    winner = list_votes(store)[0].left.model
    publish(store, tmp_path, *winner.split("@"))
    assert page.done("/chat/votes/train") == f"{place}&model.key={winner.replace('@', '%40')}"
    assert f'name="v.model.key" type="text" value="{winner}"' in page.text(page.done("/chat/votes/train"))


def test_a_model_that_is_not_served_is_refused_in_the_form(
    page: PageClient, store: ObjectStore, tmp_path: Path
) -> None:
    publish(store, tmp_path, "a", "1")
    refused = page.post("/chat", first="a@1", second="absent/x@2", max_tokens="16", temperature="1")
    assert refused.status_code == 422
    text = html.unescape(refused.text)
    assert "The engine has no model 'absent/x@2'. It serves a@1." in text and text.count('role="alert"') == 0
    assert 'id="e-second"' in text and 'id="e-first"' not in text


def test_the_next_conversation_has_the_same_models(page: PageClient) -> None:
    for fields in ({"first": "a@1", "second": "b@1", "blind": "yes"}, {"first": "a@1", "second": "", "blind": ""}):
        chat = begin(page, **fields, max_tokens="9", temperature="0.5")
        say(page, chat)
        sent = dict(re.findall(r'name="(\w+)" value="([^"]*)"', page.text(chat).partition("</form>")[0]))
        assert sent.items() >= (fields | {"max_tokens": "9", "temperature": "0.5"}).items()
        following = page.done("/chat", **{name: text for name, text in sent.items() if name != "csrf"})
        assert following != chat and "2+2?" not in page.text(following)
        assert ("Blind:" in page.text(following)) == bool(fields["blind"])


def test_refusals_and_outages_are_one_sentence_and_forget_the_question(store: ObjectStore) -> None:
    answers = {"a@1": "four", "b@1": "five"}
    with scripted_chat(answers) as url:
        page = PageClient(store.url, engine=url)
        chat = begin(page, first="b@1", second="a@1")
        # it is deleted while it is talked to
        del answers["b@1"]
        (error,) = [event["error"] for event in say(page, chat) if "error" in event]
    assert error == "the engine refused: no model 'b@1'."
    assert "2+2?" not in page.text(chat) and "Left is better" not in page.text(chat)
    gone = PageClient(store.url, engine="http://127.0.0.1:9")
    (event,) = say(gone, begin(gone, first="a@1"))
    assert event["error"].startswith("the engine at http://127.0.0.1:9 does not answer (ConnectError); look whether")
    without = PageClient(store.url)
    assert "started without --engine" in without.text("/chat") and "<button>Begin" not in without.text("/chat")
    assert "has ended" in page.get("/chat/nonsense").text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"first": ""}, "Choose a model."), ({"first": "a@1", "blind": "yes"}, "needs a second model"),
        ({"first": "a@1", "max_tokens": "0"}, "from 1 to"), ({"first": "a@1", "temperature": "nan"}, "from 0.01 to 2"),
        ({"first": "a@1", "temperature": "²"}, "from 0.01 to 2"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_refused_beside_its_field(page: PageClient, fields: dict[str, str], message: str) -> None:
    refused = page.post("/chat", **({"max_tokens": "16", "temperature": "1"} | fields))
    assert refused.status_code == 422 and message in refused.text


def test_what_a_model_wrote_is_escaped(page: PageClient) -> None:
    chat = begin(page, first="evil@1")
    assert said(say(page, chat, "<b>hi</b>"), "left") == HOSTILE
    text = page.text(chat)
    assert "<script>document" not in text and "&lt;script&gt;document" in text and "&lt;b&gt;hi" in text
    assert 'dir="auto"' in text


def test_names_that_the_engine_serves_are_offered(page: PageClient, store: ObjectStore, tmp_path: Path) -> None:
    publish(store, tmp_path, "m", "v1")
    commit_decision(
        store, "m", "v1", "promote", over=None, reasons=["a start"], who="ada", provenance=PROVENANCE
    )  # fmt: skip
    text = page.text("/chat")
    assert '<option value="m@champion">' in text and '<option value="m@v1">' in text


def test_a_tiny_engine_answers_for_a_run_and_a_champion_and_the_line_works(
    tmp_path: Path, tiny_folder: Path
) -> None:
    run = OpenAIRun(tmp_path, tiny_folder)
    (version,) = list_versions(run.store, "tiny")
    commit_decision(
        run.store, "tiny", version, "promote", over=None, reasons=["a start"], who="ada", provenance=PROVENANCE
    )  # fmt: skip
    try:
        with running_openai_server(run.local, run.store) as url:
            page = PageClient(run.store.url, engine=url.removesuffix("/v1"))
            assert '<option value="r">' in page.text("/chat")
            chat = begin(page, first="tiny@champion", second="r")
            events = say(page, chat)
            assert not [event for event in events if "error" in event] and said(events, "left")
            assert vote(page, chat, "left").status_code == 303
            policies = {vote.left.policy for vote in list_votes(run.store)} | {
                vote.right.policy for vote in list_votes(run.store)
            }
            assert run.policy.uri in policies and any("served/tiny" in policy for policy in policies)
            # the line for a shell, as it stands on the page
            line = re.search(r'class="call">(.+?)</pre>', page.text("/chat?model=tiny@champion"), re.S)
            assert line is not None
            if shutil.which("curl"):
                done = subprocess.run(
                    ["bash", "-c", f"{html.unescape(line[1])} -sS"], capture_output=True, text=True, timeout=60,
                    check=True,
                )  # fmt: skip
                assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"
    finally:
        asyncio.run(run.local.close())
