"""The section Chat: conversations with one model or with two next to each other, and votes between two answers.

The models answer through the engine's OpenAI routes. A conversation lives in this process, not in the store, and it
ends with the process; a vote is stored (tasks.datasets.votes). The browser never learns which model gave which answer
before the vote of a blind comparison: the sides are shuffled here, at each question.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, cast

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse, StreamingResponse

from engine.errors import EngineError
from engine.http.client import lacks_model, stream_chat
from engine.http.curl import curl_line
from flows.ops.state import TOKEN_ENV
from flows.page.shared import Page, PageError, PageSettings, start_link
from flows.runs.code_version import code_version
from storage.chain.listing import is_auxiliary
from storage.registry.decisions import model_names
from storage.store import keys
from storage.store.index import run_entries
from storage.store.objects import ObjectStore
from tasks.datasets.errors import EmptyDataset
from tasks.datasets.votes import Vote, VotedAnswer, commit_vote, count_wins, list_votes, preferred_model, register_votes

MAX_CONVERSATIONS = 200
"""Conversations that are kept; the one that was used least recently ends first."""
SIDES, FIELDS = ("left", "right"), ("first", "second", "blind", "max_tokens", "temperature")
BUSY = ("The answers to the last question are not complete.", "Wait for them.")
"""What is wrong, and what to do, when a conversation is used in two windows at once."""
Choice = Literal["left", "right", "tie"]


@dataclass
class Answer:
    """An answer that is being given, or is complete."""

    model: str
    text: str = ""
    policy: str = ""
    """URI of the policy that answered."""
    complete: bool = False


@dataclass
class Conversation:
    """The state of one conversation."""

    id: str
    models: tuple[str, ...]
    """One model, or the two that are compared."""
    blind: bool
    max_tokens: int
    temperature: float
    turns: list[tuple[str, str]] = field(default_factory=list)
    """(role, text). With two models the answer that was voted for, or the left one, goes on."""
    answers: list[Answer] = field(default_factory=list)
    """The two answers to the last question, from left to right, until the vote."""
    comparison: str = ""
    """Id of the comparison of the two answers."""
    vote: Vote | None = None
    """The vote on the answers before the last question, or on its answers."""
    busy: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, question: str) -> None:
        """Adds the question, and prepares an answer for each side."""
        if self.answers:
            # without a vote, the left answer goes on
            self.turns.append(("assistant", self.answers[0].text))
        self.turns.append(("user", question))
        models = list(self.models)
        if len(models) == 2:
            secrets.SystemRandom().shuffle(models)
        self.answers, self.comparison, self.vote = [Answer(model) for model in models], secrets.token_hex(12), None

    def finish(self) -> None:
        """Keeps the answers if all of them are complete, and otherwise forgets the question."""
        if not all(answer.complete for answer in self.answers):
            self.turns.pop()
            self.answers = []
        elif len(self.answers) == 1:
            self.turns.append(("assistant", self.answers.pop().text))

    def vote_for(self, choice: Choice) -> Vote:
        """Returns the vote on the present answers."""
        left, right = (VotedAnswer(model=a.model, policy=a.policy, text=a.text) for a in self.answers)
        return Vote(
            id=self.comparison, messages=tuple(self.turns), left=left, right=right, choice=choice, blind=self.blind,
            created=datetime.now(UTC).isoformat(),
        )  # fmt: skip

    def go_on_with(self, vote: Vote) -> None:
        """Keeps the answer that was voted for; with a tie, the left one."""
        preferred = self.answers[1 if vote.choice == "right" else 0]
        self.turns.append(("assistant", preferred.text))
        self.vote, self.answers = vote, []


class Conversations:
    """The conversations of this process, by id."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Conversation] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, conversation: Conversation) -> None:
        with self._lock:
            self._by_id[conversation.id] = conversation
            if len(self._by_id) > MAX_CONVERSATIONS:
                self._by_id.popitem(last=False)

    def get(self, id: str) -> Conversation:
        """Raises PageError if there is no such conversation."""
        with self._lock:
            conversation = self._by_id.get(id)
            if conversation is None:
                raise PageError("This conversation has ended with the page's process.", "Begin another one.", 404)
            self._by_id.move_to_end(id)
            return conversation


def router(page: Page) -> APIRouter:
    """Returns the routes of the section."""
    router = APIRouter()
    conversations = Conversations()

    @router.get("/chat")
    def show(request: Request, model: str = "") -> Response:
        return _show_start(page, request, {"first": model})

    @router.post("/chat")
    def begin(request: Request) -> Response:
        """Begins a conversation."""
        typed = {name: request.state.form.get(name) for name in FIELDS}
        conversation = _conversation(page, typed)
        if isinstance(conversation, dict):
            return _show_start(page, request, typed, conversation)
        conversations.add(conversation)
        return RedirectResponse(f"/chat/{conversation.id}", status_code=303)

    @router.post("/chat/votes/train")
    def train(request: Request) -> Response:
        """Commits all votes as a dataset, and opens the form that trains on it."""
        data, model = _registered_votes(page.store), preferred_model(page.store)
        settings = {"model__key": model} if model else {}
        return RedirectResponse(start_link("dpo", data__train=data, **settings), status_code=303)

    @router.get("/chat/{id}")
    def show_conversation(request: Request, id: str) -> Response:
        conversation = conversations.get(id)
        calls = [how_to_call(page.settings, model) for model in conversation.models]
        return page.render(request, "conversation.html", chat=conversation, calls=calls)

    @router.post("/chat/{id}/say")
    async def say(request: Request, id: str) -> Response:
        """Streams the answers to a question, as lines of JSON."""
        conversation = conversations.get(id)
        question = request.state.form.get("question")
        if not question:
            raise PageError("Type a question first.")
        return StreamingResponse(_answers(page.settings, conversation, question), media_type="application/x-ndjson")

    @router.post("/chat/{id}/vote")
    def vote(request: Request, id: str) -> Response:
        conversation = conversations.get(id)
        form = request.state.form
        choice = form.get("choice")
        if choice not in (*SIDES, "tie"):
            raise PageError("Vote for left, right or a tie.")
        if not conversation.busy.acquire(blocking=False):
            raise PageError(*BUSY, 409)
        try:
            if form.get("comparison") != conversation.comparison or not conversation.answers:
                raise PageError("This comparison has its vote already.", "Ask the next question.", 409)
            conversation.go_on_with(commit_vote(page.store, conversation.vote_for(cast(Choice, choice))))
        finally:
            conversation.busy.release()
        return RedirectResponse(f"/chat/{id}", status_code=303)

    return router


def _registered_votes(store: ObjectStore) -> dict[str, str]:
    """The dataset of all votes, for a config."""
    try:
        data = register_votes(store, code_version=code_version())
    except EmptyDataset as error:
        raise PageError("No vote prefers an answer yet.", "Compare two models and vote first.", 409) from error
    name, version = keys.dataset_of(data.ref.key)
    return {"kind": "registered", "key": f"{name}@{version}"}


def _show_start(
    page: Page, request: Request, typed: dict[str, str], problems: dict[str, str] | None = None
) -> Response:
    """The form that begins a conversation."""
    typed = {"second": "", "blind": "", "max_tokens": "512", "temperature": "1"} | typed
    call = how_to_call(page.settings, typed["first"]) if typed["first"] else None
    votes = list_votes(page.store)
    return page.render(
        request, "chat.html", status=422 if problems else 200, typed=typed, problems=problems or {}, call=call,
        choices=served_names(page.store), has_engine=bool(page.settings.engine), votes=votes,
        tallies=count_wins(page.store, votes),
    )  # fmt: skip


def _conversation(page: Page, typed: dict[str, str]) -> Conversation | dict[str, str]:
    """The conversation that a form describes, or its problems by field."""
    problems = {}
    if not typed["first"]:
        problems["first"] = "Choose a model."
    if typed["blind"] and not typed["second"]:
        problems["second"] = "A blind comparison needs a second model."
    max_tokens = int(typed["max_tokens"]) if typed["max_tokens"].isdecimal() else 0
    if not 1 <= max_tokens <= 100_000:
        problems["max_tokens"] = "Give a number from 1 to 100000."
    try:
        temperature = float(typed["temperature"])
        if not (temperature == 0 or 0.01 <= temperature <= 2):
            raise ValueError
    except ValueError:
        problems["temperature"] = "Give 0, or a number from 0.01 to 2."
    for name in ("first", "second"):
        if typed[name] and lacks_model(page.settings.engine, page.settings.engine_token, typed[name]):
            served = ", ".join(served_names(page.store)) or "nothing yet"
            problems[name] = f"The engine has no model {typed[name]!r:.100}. It serves {served:.1000}."
    if problems:
        return problems
    models = (typed["first"], typed["second"]) if typed["second"] else (typed["first"],)
    return Conversation(secrets.token_hex(8), models, bool(typed["blind"]), max_tokens, temperature)


def served_names(store: ObjectStore) -> list[str]:
    """Returns the names that the engine serves: champions, versions of models, runs."""
    return model_names(store) + [run for run in sorted(run_entries(store, kind="chains")) if not is_auxiliary(run)]


def how_to_call(settings: PageSettings, model: str) -> dict[str, str] | None:
    """Returns the base URL, where the token is, and a line for a shell that asks the model. None without an engine."""
    if not settings.engine:
        return None
    # the token itself is not shown
    has_token = settings.engine_token is not None
    file, variable = (settings.engine_token_file, TOKEN_ENV) if has_token else ("", "")
    line = curl_line(settings.engine, model, token_file=file, token_env=variable)
    token = file or (f"${TOKEN_ENV}" if has_token else "")
    return {"base_url": f"{settings.engine.rstrip('/')}/v1", "token": token, "curl": line}


async def _answers(settings: PageSettings, conversation: Conversation, question: str) -> AsyncIterator[str]:
    """Streams the answers of all sides as they come: lines of JSON with `side`, and `text` or `error`."""
    # taken here, because a response whose browser has left is never iterated, and so could not release it
    if not conversation.busy.acquire(blocking=False):
        yield json.dumps({"side": "left", "error": " ".join(BUSY)}) + "\n"
        return
    conversation.ask(question)
    events: asyncio.Queue[dict[str, str] | None] = asyncio.Queue()
    tasks = []
    for side, answer in zip(SIDES, conversation.answers, strict=False):
        tasks.append(asyncio.create_task(_answer(settings, conversation, answer, side, events)))
    try:
        running = len(tasks)
        while running:
            event = await events.get()
            if event is None:
                running -= 1
            else:
                yield json.dumps(event) + "\n"
    finally:
        # a browser that left must not keep the engine busy
        for task in tasks:
            task.cancel()
        conversation.finish()
        conversation.busy.release()


async def _answer(
    settings: PageSettings, conversation: Conversation, answer: Answer, side: str, events: asyncio.Queue[Any]
) -> None:
    """Reads one answer of the engine into `answer`, and puts its pieces into the queue. None is the end."""
    body = {
        "model": answer.model, "messages": [{"role": role, "content": text} for role, text in conversation.turns],
        "max_tokens": conversation.max_tokens, "temperature": conversation.temperature,
    }  # fmt: skip
    try:
        async for piece in stream_chat(settings.engine, settings.engine_token, body):
            answer.policy, answer.text = piece.policy, answer.text + piece.text
            events.put_nowait({"side": side, "text": piece.text})
        answer.complete = True
    except EngineError as error:
        events.put_nowait({"side": side, "error": f"{error}."})
    finally:
        events.put_nowait(None)
