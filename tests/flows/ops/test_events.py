"""Tests of events and of the example automations: they name every event, and only fields that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.runs import events

EXAMPLES = Path(__file__).parents[3] / "examples" / "automations"
SENT = {
    "ostinato.model.promoted": lambda: events.emit_model_promoted(
        "sums", "v2", alias="champion", number=3, previous="v1"
    ),
    "ostinato.run.stalled": lambda: events.emit_run_stalled(
        "grpo-1", step=4, silent_seconds=700.04, usual_seconds=None
    ),
    "ostinato.eval.regressed": lambda: events.emit_eval_regressed(
        "sums", "v2", baseline="sums@v1", dataset="heldout", difference=-0.1, low=-0.2, high=-0.01, n=50
    ),
    "ostinato.dataset.registered": lambda: events.emit_dataset_registered(
        "sums", "0a1b", use="prompt", rows=12, source="data/sums.jsonl", uri="datasets/sums/0a1b/threads#00"
    ),
    "ostinato.run.idle": lambda: events.emit_run_idle("grpo-1", step=4, reason="its gradient was 0"),
}


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(events, "emit_event", lambda **body: found.append(body))
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        yield found


def test_each_event_names_what_it_is_about(heard: list[dict[str, Any]]) -> None:
    for send in SENT.values():
        send()
    assert [event["event"] for event in heard] == list(SENT)
    identities = [event["resource"]["prefect.resource.id"] for event in heard]
    assert identities == [
        "ostinato.model.sums", "ostinato.run.grpo-1", "ostinato.model.sums", "ostinato.dataset.sums",
        "ostinato.run.grpo-1",
    ]  # fmt: skip
    assert heard[0]["payload"]["model"] == "sums@v2"
    assert heard[0]["payload"]["previous"] == "v1"
    assert heard[1]["payload"] == {"run": "grpo-1", "step": 4, "silent_seconds": 700.0, "usual_seconds": None}
    assert (heard[2]["payload"]["difference"], heard[2]["payload"]["n"]) == (-0.1, 50)
    assert (heard[3]["payload"]["dataset"], heard[3]["payload"]["rows"]) == ("sums@0a1b", 12)
    assert heard[4]["payload"] == {"run": "grpo-1", "step": 4, "reason": "its gradient was 0"}


def test_without_a_server_nothing_is_sent_and_none_is_started(heard: list[dict[str, Any]]) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        for send in SENT.values():
            send()
    assert heard == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_automation_is_valid_and_uses_what_events_have(path: Path, heard: list[dict[str, Any]]) -> None:
    text = re.sub(r"(BLOCK|DEPLOYMENT)_ID$", str(uuid4()), path.read_text(), flags=re.MULTILINE)
    automation = AutomationCore.model_validate(yaml.safe_load(text))
    trigger: Any = automation.trigger
    assert trigger.expect <= set(SENT)
    for name in trigger.expect:
        SENT[name]()
    for field in re.findall(r"event\.payload\.(\w+)", text):
        assert all(field in event["payload"] for event in heard)
    assert len(automation.actions) == 1


def test_the_documentation_names_every_event_and_every_field(heard: list[dict[str, Any]]) -> None:
    text = (EXAMPLES.parents[1] / "docs" / "operations.md").read_text()
    for send in SENT.values():
        send()
    for event in heard:
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{event['event']}`")]
        assert row.split("|")[3].strip().split(", ") == list(event["payload"])
