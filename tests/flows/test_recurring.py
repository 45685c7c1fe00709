"""Tests of `recurring` on the tiny model: a first promotion, runs without new data, worse models, approvals and
retries."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import flows.recurring
import storage.registry.decisions
from engine.workspace import connect
from flows.configs.common import SFTConfig
from flows.configs.recurring import RecurringConfig
from flows.recurring import recurring
from flows.sft import sft
from storage.registry.decisions import Decision, alias_log, champion_of, commit_decision, decisions_of
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from tests.fixtures.prefect import prefect_client
from tests.fixtures.toy import write_prompts
from tests.fixtures.worklog import events

NAME = "digits"
PROVENANCE = Provenance(code_version="abc", config_digest="0" * 64, seed=0)


class Line:
    """Recurring fine-tunes of one model: conversations whose answers are one character, six times."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder, self.base = folder, base
        self.store = open_store(str(folder / "data"))

    def answers(self, character: str) -> None:
        """The training data as it is from now on."""
        rows = [{"prompt": str(digit), "completion": character * 6} for digit in range(10)]
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(self, **changes: Any) -> RecurringConfig:
        training = {
            "model": {"key": str(self.base)},
            "data": {"train": {"kind": "file", "path": str(self.folder / "rows.jsonl")}},
            "algorithm": {"samples_per_batch": 10, "steps": 12},
            "optimizer": {"lr": 1e-2, "schedule": "constant"},
            "checkpoints": {"frequency": None},
            "engine": {"deterministic": True, "threads": 1},
            "storage": {"url": str(self.folder / "data")},
        }
        prompts = {"kind": "file", "path": str(write_prompts(self.folder / "suite.jsonl"))}
        suite = {
            "datasets": [{"name": "all", "source": prompts}],
            "graders": [{"name": "odd", "path": "tests.fixtures.grading:odd_share"}],
            "sampling": {"max_new_tokens": 6, "min_new_tokens": 6, "temperature": 0.0},
        }
        body = {"model": NAME, "training": {"kind": "sft", "config": training}, "suite": suite}
        return RecurringConfig.model_validate(body | changes)

    def run(self, **changes: Any) -> dict[str, Any]:
        return asyncio.run(recurring(self.config(**changes)))

    def train(self, character: str) -> str:
        """Publishes a version by a training run that is not part of the flow."""
        self.answers(character)
        config = self.config().training.config
        model = config.model.model_copy(update={"publish_as": NAME})
        assert isinstance(config, SFTConfig)
        return str(asyncio.run(sft(config.model_copy(update={"run": "by-hand", "model": model})))["model"])

    def keys(self) -> set[str]:
        return {info.key for info in self.store.list()}

    def promote(self, model: str) -> str:
        """Makes a version the first champion by hand, and returns it."""
        version = model.partition("@")[2]
        commit_decision(
            self.store, NAME, version, "promote", over=None, reasons=["by hand"], who="ada", provenance=PROVENANCE
        )
        return version

    @property
    def champions(self) -> list[str]:
        return [f"{NAME}@{entry.version}" for entry in alias_log(self.store, NAME)]

    @property
    def decisions(self) -> list[Decision]:
        return decisions_of(self.store, NAME)


@pytest.fixture
def line(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> Line:
    line = Line(tmp_path, tiny_folder)
    line.answers("1")  # an odd code point: what the suite rewards
    return line


@pytest.mark.slow
def test_promote_then_nothing_then_hold_then_nothing(line: Line, worklog: Path) -> None:
    first = line.run()
    assert first["outcome"] == "promoted"
    assert first["reasons"][0].startswith("there is no champion yet: the challenger was compared with /")
    assert "all/odd must be better" in first["reasons"][-1] and "passed" in first["reasons"][-1]
    assert line.champions == [first["model"]]
    _card_says_where_it_comes_from(line, first)

    _does_nothing(line, worklog, "unchanged", "no new data")

    line.answers("2")  # even: the suite punishes it
    third = line.run()
    assert third["outcome"] == "held" and third["champion"] == first["model"] != third["model"]
    assert any("must not be worse by more than 0.05" in reason and "failed" in reason for reason in third["reasons"])
    assert line.champions == [first["model"]]
    held = line.decisions[-1]
    assert (held.action, f"{NAME}@{held.version}", held.id) == ("hold", third["model"], third["decision"])
    assert held.evaluation is not None and held.evidence["start"] == first["model"]

    _does_nothing(line, worklog, "decided before", "hold")

    line.answers("3")  # odd again, and new: as good as the champion, so not better
    fourth = line.run()
    assert fourth["outcome"] == "held" and "must be better" in " ".join(fourth["reasons"])
    assert [decision.action for decision in line.decisions] == ["promote", "hold", "hold"]


def _does_nothing(line: Line, worklog: Path, outcome: str, said: str) -> None:
    """No engine work, no new object, not even the engine's own object in memory."""
    before = line.keys()
    connect.cache_clear()
    worklog.write_text("")
    again = line.run()
    assert again["outcome"] == outcome and said in " ".join(again["reasons"])
    assert line.keys() == before
    assert worklog.read_text() == ""
    assert connect.cache_info().currsize == 0


def _card_says_where_it_comes_from(line: Line, outcome: dict[str, Any]) -> None:
    (card,) = (line.folder / "data" / "models" / NAME / "cards").glob("*.md")
    text = card.read_text()
    assert text.startswith("---\n") and "base_model: tiny@" in text
    assert outcome["model"] in text and outcome["evaluation"] in text and outcome["decision"] in text
    assert "12 gradient steps" in text and "| sft | 1–12 | 0.01 |" in text
    dataset = json.loads(next((line.folder / "data" / "datasets" / "rows").glob("*/threads.json")).read_text())
    assert dataset["sha256"] in text


@pytest.mark.slow
def test_without_a_champion_the_newest_version_of_others_is_the_one_to_beat(
    line: Line, monkeypatch: pytest.MonkeyPatch, answer: Callable[..., list[str]]
) -> None:
    pages: list[str] = []

    async def keep_page(_key: str, page: str) -> None:
        pages.append(page)

    monkeypatch.setattr(flows.recurring, "put_markdown", keep_page)
    # a good version, published by a training run of its own
    good = line.train("1")
    # a worse challenger does not replace it, and the page has every number
    line.answers("2")
    first = line.run()
    assert first["outcome"] == "held" and first["champion"] is None and line.champions == []
    assert f"the challenger was compared with {good}, the newest published version" in first["reasons"][0]
    # 10 prompts from 1 to 0: the upper end c of the change has (1 - (c + 1) / 2)^10 = 0.025
    for text in (good, first["model"], "-1.000", "-1.000 to -0.383", "n=10", "| 1.000 |", "| 0.000 |", "trained from"):
        assert text in pages[-1], text
    # the one to beat is still the good version, and not the challenger that was held
    line.answers("4")
    second = line.run()
    assert second["outcome"] == "held" and good in second["reasons"][0]
    # by config, a person decides on the first champion, whether the gate was passed or not
    questions = answer({"promote": True, "your_name": "Ada"})
    third = line.run(gate={"first_champion": "approval"}, approval={"timeout_seconds": 60})
    assert third["outcome"] == "promoted" and line.champions == [second["model"]]
    assert line.decisions[-1].who == "Ada" and "failed" in questions[0]


@pytest.mark.slow
def test_a_better_challenger_is_promoted_over_the_champion_and_announced(line: Line, prefect_server: str) -> None:
    line.answers("2")
    first = line.run()
    # as bad as the model it was trained from, so a person has to make it the champion
    assert first["outcome"] == "held" and "'ostinato models promote digits@VERSION'" in first["reasons"][-1]
    version = line.promote(first["model"])
    line.answers("1")
    second = line.run()
    assert second["outcome"] == "promoted" and "must be better" in second["reasons"][-1]
    assert line.champions == [first["model"], second["model"]]
    assert line.decisions[-1].champion == version
    assert _announced(prefect_server, second["model"])["payload"]["previous"] == version


def _announced(api: str, model: str) -> dict[str, Any]:
    """The event of the promotion; events lag."""
    query = {"filter": {"event": {"name": ["ostinato.model.promoted"]}}, "limit": 50}
    deadline = time.monotonic() + 60
    with prefect_client(api) as client:
        while time.monotonic() < deadline:
            for event in client.post("/events/filter", json=query).json()["events"]:
                if event["payload"]["model"] == model and event["payload"]["number"] == 2:
                    return dict(event)
            time.sleep(0.5)
    raise AssertionError(f"no event tells of {model}")


class Ended(Exception):
    """The process ends here."""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before the move", "after the move", "before the decision"])
def test_a_retry_after_an_end_anywhere_near_the_decision_decides_once(
    line: Line, worklog: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    module, name = {
        "before the decision": (flows.recurring, "commit_decision"),
        "before the move": (storage.registry.decisions, "apply_decision"),
        "after the move": (flows.recurring, "announce_promotion"),
    }[where]  # fmt: skip
    real = getattr(module, name)

    # End the first run there.
    def ends(*_: Any, **__: Any) -> None:
        raise Ended(where)

    monkeypatch.setattr(module, name, ends)
    with pytest.raises(Ended):
        line.run()
    assert len(line.decisions) == (0 if where == "before the decision" else 1)
    # The retry computes nothing again and decides once.
    monkeypatch.setattr(module, name, real)
    connect.cache_clear()
    worklog.write_text("")
    again = line.run()
    assert again["outcome"] == ("unchanged" if where == "after the move" else "promoted")
    done = {line["event"] for line in events(worklog)}
    assert not done & {"step", "shard", "grade", "generate"}
    assert len(line.decisions) == len(line.champions) == 1
    assert len(list((line.folder / "data" / "models" / NAME / "cards").glob("*.md"))) == 1


@pytest.mark.slow
def test_a_champion_that_is_moved_meanwhile_is_left_alone(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    real = flows.recurring.evaluation

    async def somebody_promotes(config: Any) -> Any:
        line.promote(config.models[1])
        return await real(config)

    monkeypatch.setattr(flows.recurring, "evaluation", somebody_promotes)
    outcome = line.run()
    assert outcome["outcome"] == "overtaken" and "decide again" in outcome["reasons"][0]
    champion = champion_of(line.store, NAME)
    assert champion is not None and champion.number == 1
    assert [d.who for d in line.decisions if d.id == champion.decision] == ["ada"]


# -- a person's word ---------------------------------------------------------------------------------------------


@pytest.fixture
def answer(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Answers the forms of paused runs, in order, as the UI does; gives the forms' descriptions."""
    monkeypatch.setattr(flows.recurring, "POLL_SECONDS", 0.2)
    threads = []

    def start(*answers: dict[str, Any]) -> list[str]:
        asked: list[str] = []
        thread = threading.Thread(target=_resume, args=(prefect_server, list(answers), asked), daemon=True)
        thread.start()
        threads.append(thread)
        return asked

    yield start
    for thread in threads:
        thread.join(30)


def _resume(api: str, answers: list[dict[str, Any]], asked: list[str]) -> None:
    deadline = time.monotonic() + 120
    query = {"flow_runs": {"state": {"type": {"any_": ["PAUSED"]}}}}
    with prefect_client(api) as client:
        while answers and time.monotonic() < deadline:
            for run in client.post("/flow_runs/filter", json=query).json():
                keyset = run["state"]["state_details"]["run_input_keyset"]
                response = client.get(f"/flow_runs/{run['id']}/input/{keyset['description']}")
                if response.status_code != 200:
                    continue  # the form is on its way
                asked.append(response.text)
                body = {"run_input": answers.pop(0)}
                assert client.post(f"/flow_runs/{run['id']}/resume", json=body).json()["status"] == "ACCEPT"
            time.sleep(0.2)


REQUIRED = {"required": True, "timeout_seconds": 60}


@pytest.mark.slow
def test_a_person_approves_and_is_named(line: Line, answer: Callable[..., list[str]]) -> None:
    questions = answer({"promote": True, "your_name": "Ada", "reason": "reads well"})
    outcome = line.run(approval=REQUIRED)
    assert outcome["outcome"] == "promoted"
    decision = line.decisions[0]
    assert decision.who == "Ada" and decision.reasons[0].startswith("there is no champion yet")
    assert decision.reasons[-1] == "reads well"
    assert "95 % interval" in questions[0] and "as the first champion" in questions[0]


@pytest.mark.slow
def test_a_person_declines(line: Line, answer: Callable[..., list[str]]) -> None:
    answer({"promote": False, "your_name": "Ada", "reason": "it repeats itself"})
    assert line.run(approval=REQUIRED)["outcome"] == "held"
    assert line.decisions[0].reasons == ("Ada declined", "it repeats itself")
    assert line.champions == []


@pytest.mark.slow
def test_an_answer_without_a_name_is_asked_for_again(line: Line, answer: Callable[..., list[str]]) -> None:
    questions = answer({"promote": True}, {"promote": True, "your_name": "Ada"})
    assert line.run(approval=REQUIRED)["outcome"] == "promoted"
    assert "The last answer is not valid (your_name: " in questions[1]


@pytest.mark.slow
def test_without_an_answer(line: Line, prefect_server: str) -> None:
    outcome = line.run(approval={"required": True, "timeout_seconds": 2})
    assert outcome["outcome"] == "held" and outcome["reasons"][-1] == "there was no approval within 2 s"
    query = {"flow_runs": {"name": {"any_": [f"recurring {NAME}"]}}, "sort": "START_TIME_DESC", "limit": 1}
    with prefect_client(prefect_server) as client:
        (run,) = client.post("/flow_runs/filter", json=query).json()
    assert run["state_type"] == "COMPLETED"


# -- the config --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": {"target": "odd"}}, "not a dataset/grader of the suite, which has all/odd"),
        ({"model": "a/b"}, "is not a name"),
        ({"model": "a" * 128}, "recurring-a.* is not a name; give 1 to 128"),  # the keys of its runs are longer
        ({"gate": {"better_by": -1}}, "greater than or equal to 0"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Line(tmp_path, tmp_path).config(**change)
