"""Tests of the example automations on a real server, created as their first lines describe. Each fires on the event of
our code and starts its run. There is no worker, so a created run is the result."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock

from flows.ops.automations import automations
from flows.ops.local_server import use_server
from flows.runs import events
from tests.fixtures.runs.deployed import ROOT, Site, recurring_config, wait_for
from tests.fixtures.toy import write_prompts

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples" / "automations"


class Webhook:
    """Hears what is posted to `url`."""

    def __init__(self) -> None:
        self.heard: list[dict[str, str]] = []
        heard = self.heard

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    webhook = Webhook()
    yield webhook
    webhook.server.shutdown()
    webhook.server.server_close()


@pytest.fixture
def server(site: Site) -> Iterator[Site]:
    """The server, which this process's events go to; without the automations and the runs of a test afterwards."""
    with use_server(site.api_url):
        yield site
    ours = {each.name for each in automations()}
    for found in site.ask("POST", "/automations/filter"):
        if found["name"] not in ours:
            site.ask("DELETE", f"/automations/{found['id']}")
    for name in ("evaluation", "recurring"):
        for run in site.runs_of(name):
            site.ask("DELETE", f"/flow_runs/{run['id']}")


def create(site: Site, example: str, folder: Path, **words: str) -> None:
    """`prefect automation create --from-file`, with the example's words in capitals replaced."""
    text = (EXAMPLES / f"{example}.yaml").read_text()
    for word, by in words.items():
        assert word in text
        text = text.replace(word, by)
    file = folder / f"{example}.yaml"
    file.write_text(text)
    command = [sys.executable, "-m", "prefect", "automation", "create", "--from-file", str(file)]
    done = subprocess.run(command, env=site.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_person_is_told_of_each_event(server: Site, webhook: Webhook, tmp_path: Path) -> None:
    body = {"subject": "{{subject}}", "body": "{{body}}"}
    block = CustomWebhookNotificationBlock(name="test", url=webhook.url, method="POST", json_data=body)
    create(server, "notify", tmp_path, BLOCK_ID=str(block.save("told", overwrite=True)))
    events.emit_model_promoted("sums", "v2", alias="champion", number=3, previous="v1")
    events.emit_run_stalled("grpo-1", step=4, silent_seconds=700.0, usual_seconds=2.0)
    events.emit_eval_regressed(
        "sums", "v2", baseline="sums@v1", dataset="all", difference=-0.1, low=-0.2, high=-0.01, n=50
    )
    wait_for(lambda: len(webhook.heard) >= 3, seconds=60)
    told = {each["subject"]: json.loads(each["body"]) for each in webhook.heard}
    assert set(told) == {
        "ostinato.model.promoted: sums", "ostinato.run.stalled: grpo-1", "ostinato.eval.regressed: sums",
    }  # fmt: skip
    assert told["ostinato.model.promoted: sums"]["model"] == "sums@v2"
    assert told["ostinato.run.stalled: grpo-1"]["silent_seconds"] == 700.0
    assert told["ostinato.eval.regressed: sums"]["high"] == -0.01
    assert len(webhook.heard) == 3


def test_a_promoted_model_is_evaluated(server: Site, tmp_path: Path) -> None:
    create(server, "evaluate-promoted", tmp_path, DEPLOYMENT_ID=server.deployment("evaluation"))
    events.emit_model_promoted("sums", "v2", alias="champion", number=3, previous="v1")
    wait_for(lambda: bool(server.runs_of("evaluation")), seconds=60)
    (run,) = server.runs_of("evaluation")
    assert run["parameters"]["config"]["models"] == ["sums@v2"]


def test_new_data_starts_recurring_and_the_same_data_does_not(server: Site, tmp_path: Path) -> None:
    config = recurring_config(server.folder, server.tiny, steps=2)
    deployment = server.deployment("recurring")
    server.ask("PATCH", f"/deployments/{deployment}", parameters={"config": config})
    create(server, "recur-on-new-data", tmp_path, DEPLOYMENT_ID=deployment, DATASET="fresh")

    def add(name: str) -> str:
        command = [sys.executable, "-m", "flows.cli.main", "data", "add", name, "--storage", str(tmp_path / "data")]
        done = subprocess.run(command, env=server.environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    write_prompts(tmp_path / "other.jsonl")
    write_prompts(tmp_path / "fresh.jsonl")
    assert "new" in add("other.jsonl")  # another dataset, for which there is no automation
    assert "new" in add("fresh.jsonl")
    wait_for(lambda: bool(server.runs_of("recurring")), seconds=60)
    assert "there already" in add("fresh.jsonl")
    write_prompts(tmp_path / "fresh.jsonl", repeats=2)
    assert "new" in add("fresh.jsonl")
    wait_for(lambda: len(server.runs_of("recurring")) == 2, seconds=60)
    assert all(run["parameters"]["config"]["model"] == "digits" for run in server.runs_of("recurring"))
    server.ask("PATCH", f"/deployments/{deployment}", parameters={})
