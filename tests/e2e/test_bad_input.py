"""Runs that cannot succeed, each as a real `ostinato run` process: the terminal shows one line that names the cause,
and no traceback; the log file, whose path is the last line, holds the traceback."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from engine.http.service import ServerOptions
from engine.local.engine import LocalEngine
from storage.chain.run_record import create_or_check_run
from storage.store.objects import open_store
from tests.fixtures.engines import DETERMINISTIC
from tests.fixtures.servers.http_engine import running_server
from tests.fixtures.stores.s3 import KEY, SECRET
from tests.fixtures.toy import toy_config

ROOT = Path(__file__).resolve().parents[2]
RUN = "bad"

pytestmark = pytest.mark.slow


@dataclass
class BadRun:
    """A toy run that is about to be broken."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    @property
    def data(self) -> Path:
        return Path(self.config["data"]["train"]["path"])

    def model(self) -> Path:
        """A copy of the tiny model that may be broken."""
        copy = self.folder / "model"
        shutil.copytree(self.config["model"]["key"], copy)
        self.config["model"]["key"] = str(copy)
        return copy

    def start(self) -> subprocess.CompletedProcess[str]:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))
        command = [sys.executable, "-m", "flows.cli.main", "run", "grpo", "--config", "config.yaml", "--run", RUN]
        return subprocess.run(
            [*command, *self.options],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )


@pytest.fixture
def bad_run(tmp_path: Path, tiny_folder: Path, prefect_server: str) -> BadRun:
    config = toy_config(tmp_path, tiny_folder, grader__path="tests.fixtures.grading:even_share", algorithm__steps=1)
    return BadRun(tmp_path, config, {"PREFECT_API_URL": prefect_server})


def no_data_file(run: BadRun) -> None:
    run.data.unlink()


def malformed_row(run: BadRun) -> None:
    lines = run.data.read_text().splitlines()
    run.data.write_text("\n".join([*lines[:2], '{"prompt": ', *lines[2:]]))


def wrong_column(run: BadRun) -> None:
    run.config["data"]["train"]["columns"] = {"prompt": "question"}


def python_dataset_without_an_argument(run: BadRun) -> None:
    rows = {"kind": "python", "path": "tests.fixtures.grading:by_hash", "arguments": {"nothing": 1}}
    run.config["data"]["train"] = rows


def unknown_model(run: BadRun) -> None:
    run.config["model"]["key"] = "never-published"


def no_tokenizer(run: BadRun) -> None:
    for path in run.model().glob("tokenizer*"):
        path.unlink()


def pickled_weights(run: BadRun) -> None:
    folder = run.model()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def nan_weights(run: BadRun) -> None:
    path = run.model() / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})


def template_that_overflows(run: BadRun) -> None:
    folder = run.model()
    (folder / "chat_template.jinja").write_text("{{ 10.0 ** 1000 }}")


def too_long_prompt(run: BadRun) -> None:
    run.config["data"]["max_prompt_tokens"] = 3


def grader_that_raises(run: BadRun) -> None:
    run.config["grader"] = {"path": "tests.fixtures.toy:digit_share", "arguments": {"sign": "minus"}, "retries": 0}


def enormous_reward(run: BadRun) -> None:
    run.config["grader"] = {"path": "tests.fixtures.grading:constant", "arguments": {"value": 1e308}, "retries": 0}


def grader_without_that_argument(run: BadRun) -> None:
    run.config["grader"] = {"path": "tests.fixtures.grading:constant", "arguments": {"no_such_argument": 1}}


def unknown_grader(run: BadRun) -> None:
    run.config["grader"]["path"] = "tests.fixtures.grading:no_such_grader"


def other_run_of_the_key(run: BadRun) -> None:
    store = open_store(run.config["storage"]["url"])
    create_or_check_run(store, RUN, semantic={"seed": 7}, other={}, code_version="none")


def unreachable_engine(run: BadRun) -> None:
    run.config["engine"] = {"kind": "http", "url": "http://127.0.0.1:9", "patience_seconds": 1, "timeout_seconds": 1}


def store_that_does_not_answer(run: BadRun) -> None:
    run.config["storage"]["url"] = "s3://bucket/runs"
    run.environment |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": KEY}
    run.environment |= {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}


def no_prefect_server(run: BadRun) -> None:
    run.options = ("--server", "http://127.0.0.1:9/api")


def check(run: BadRun, status: int, cause: str) -> None:
    """The command's output: the cause in one line, the log file as the last line, no traceback but in that file."""
    ended = run.start()
    assert "Traceback" not in ended.stdout
    assert ended.returncode == status, ended.stdout
    lines = ended.stdout.splitlines()
    assert [line for line in lines if re.search(cause, line)], ended.stdout
    log = run.folder / ".ostinato" / "logs" / f"{RUN}.log"
    assert str(log.relative_to(run.folder)) in lines[-1]
    text = log.read_text()
    assert "Traceback (most recent call last)" in text
    assert re.search(cause.removeprefix("^"), text)


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (no_data_file, r"^ConfigError: data\.train: no file at .*prompts\.jsonl"),
        (malformed_row, r"^BadRow: .*prompts\.jsonl, row 3: given '{\"prompt\":', not JSON"),
        (wrong_column, r"^BadRow: .*prompts\.jsonl, row 1, column 'question'"),
        (python_dataset_without_an_argument, r"^ConfigError: data\.train: 'tests.fixtures.grading:by_hash'.*'thread'"),
        (unknown_model, r"^ConfigError: model\.key: no model 'never-published'"),
        (no_tokenizer, "^TokenizerMissing: .*model holds .*, but no tokenizer"),
        (pickled_weights, r"^ConfigError: model\.key: .*pickled weights \(pytorch_model\.bin\)"),
        (nan_weights, r"^BadModelFolder: .*model\.layers\.1\.mlp\.up_proj\.weight holds NaN"),
        (template_that_overflows, "^TemplateRefused: .*OverflowError"),
        (too_long_prompt, r"^SampleTooLong: .*tokens, at most 3 are allowed"),
        (grader_that_raises, "^TooManyMasked: .*TypeError"),
        (enormous_reward, r"^TooManyMasked: .*returned 1e\+308; expected a number from -1e\+15"),
        (grader_without_that_argument, "^ConfigError: grader: .*no_such_argument"),
        (unknown_grader, "^ConfigError: grader: .*no_such_grader"),
        (other_run_of_the_key, "^SemanticMismatch: "),
        (unreachable_engine, r"^EngineUnreachable: .*127\.0\.0\.1:9"),
        (store_that_does_not_answer, r"^StorageUnavailable: .*127\.0\.0\.1:9"),
        (no_prefect_server, r"127\.0\.0\.1:9"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_run_that_cannot_succeed_ends_in_one_line(
    bad_run: BadRun, damage: Callable[[BadRun], None], cause: str
) -> None:
    damage(bad_run)
    check(bad_run, 1, cause)


def test_an_engine_that_wants_another_token(bad_run: BadRun, tmp_path: Path) -> None:
    engine = LocalEngine(f"file://{tmp_path}/data", DETERMINISTIC)
    with running_server(engine, ServerOptions(token="right")) as spec:
        bad_run.config["engine"] = {"kind": "http", "url": spec.url, "patience_seconds": 5}
        check(bad_run, 1, "^NotAuthenticated: ")


def test_a_bucket_that_is_not_there(bad_run: BadRun, moto_endpoint: str) -> None:
    store_that_does_not_answer(bad_run)
    bad_run.environment["AWS_ENDPOINT_URL"] = moto_endpoint
    check(bad_run, 1, "bucket")


def test_a_config_that_is_refused_starts_no_log(bad_run: BadRun) -> None:
    """Nothing ran: the message is all there is."""
    bad_run.config["algorithm"]["stepps"] = 1
    ended = bad_run.start()
    assert ended.returncode == 2
    assert "algorithm.stepps: unknown key; did you mean 'steps'?" in ended.stdout
    assert "Traceback" not in ended.stdout
    assert not (bad_run.folder / ".ostinato" / "logs").exists()
