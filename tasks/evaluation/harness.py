"""Runs tasks of EleutherAI's lm-evaluation-harness (the package lm_eval) on a model, in a process of its own.

The model is a Hugging Face folder, or is behind an OpenAI-compatible endpoint. Tasks that compare the log-probabilities
of given answers need the model's tokenizer and, of the endpoint, logprobs of prompts (`echo`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field

from engine.workspace import Workspace
from storage.serialization import Frozen, canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, commit_bytes, read_bytes
from storage.temporary import process_folder
from tasks.child_process import DIE_WITH_PARENT
from tasks.committed import commit_once

STAGE = "0-lm_eval"
ENDPOINT_REQUESTS = 32
"""Number of questions that an endpoint is asked at the same time."""
TAIL = 2000
"""Characters of the end of the harness's output that an error shows."""


class HarnessError(ValueError):
    """The harness is not installed, or has ended with an error."""


class HarnessTasks(Frozen):
    """What the harness evaluates."""

    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of tasks or groups of the harness, such as hellaswag, or of tasks in include_path."""
    include_path: str | None = Field(None, min_length=1)
    """Folder with further tasks, each a YAML file in the harness's layout."""
    num_fewshot: int | None = Field(None, ge=0)
    """Number of examples before each question. None: that of the task."""
    limit: int | None = Field(None, ge=1)
    """Number of questions of each task: the first ones. None: all."""
    chat_template: bool = False
    """Whether the questions are rendered as conversations by the model's chat template."""
    seed: int = 0
    """Seed of the harness's random numbers, such as the choice of examples."""
    model_arguments: dict[str, str | int | float | bool] = Field({}, exclude_if=lambda arguments: not arguments)
    """Further arguments of the harness's model (its --model_args), such as parallelize: true, which divides a model
    over all GPUs, or max_length."""


class HarnessScore(Frozen):
    """The value of one metric of one task."""

    model: str
    task: str
    metric: str
    value: float
    stderr: float | None
    questions: int


class HarnessModel(Frozen):
    """The model that the harness evaluates: one of `folder` and `endpoint`."""

    name: str
    """Name of the model in scores and, at an endpoint, in requests."""
    folder: str | None = None
    """Hugging Face folder on this machine."""
    endpoint: str | None = None
    """Address of an OpenAI-compatible API, which ends with /v1."""
    tokenizer: str | None = None
    """Folder with the tokenizer of the model behind the endpoint. None: the endpoint encodes the questions."""
    max_length: int | None = None
    """Longest sequence of the model behind the endpoint, in tokens. None: the harness's default."""
    token_env: str = "OPENAI_API_KEY"
    """Environment variable with the token of the endpoint."""

    def options(self, tasks: HarnessTasks) -> list[str]:
        """The options of the harness's command for this model."""
        further = "".join(f",{name}={value}" for name, value in tasks.model_arguments.items())
        if self.endpoint is None:
            # the default is a batch of one question
            arguments = f"pretrained={self.folder},dtype=auto{further}"
            return ["--model", "hf", "--batch_size", "auto", "--model_args", arguments]
        route = "chat/completions" if tasks.chat_template else "completions"
        arguments = f"model={self.name},base_url={self.endpoint}/{route}"
        if self.tokenizer is None or tasks.chat_template:
            arguments += ",tokenizer_backend=None,tokenized_requests=False"
        else:
            arguments += f",tokenizer_backend=huggingface,tokenizer={self.tokenizer},tokenized_requests=True"
            arguments += "" if self.max_length is None else f",max_length={self.max_length}"
        arguments += f",num_concurrent={ENDPOINT_REQUESTS}{further}"
        model = "local-chat-completions" if tasks.chat_template else "local-completions"
        return ["--model", model, "--model_args", arguments]


def check_harness() -> None:
    """Raises HarnessError if the harness is not installed."""
    if find_spec("lm_eval") is None:
        raise HarnessError("a suite of kind lm_eval needs the package lm_eval: pip install 'ostinato[lm_eval]'")


async def stored_scores(
    workspace: Workspace, model: str, evaluate: Callable[[], Awaitable[list[HarnessScore]]], *, parent: str
) -> list[HarnessScore]:
    """The scores of a model in the run of the workspace. If they are not stored, `evaluate` is called and its scores
    are stored, so that a run that ends at a later model does not evaluate this one again.

    Args:
        parent: URI of the registered model or of the policy that is evaluated.
    """
    store = workspace.open_store()
    key = keys.evaluation(workspace.run, STAGE, digest([model, parent])[:32])

    async def commit() -> ArtifactRef:
        lines = [canonical_json(score) for score in await evaluate()]
        return commit_bytes(
            store, key, b"\n".join(lines), kind="harness_scores", suffix=".jsonl", rows=len(lines), parents=[parent],
            provenance=workspace.provenance,
        )  # fmt: skip

    ref = await commit_once(workspace, key, commit)
    return [HarnessScore.model_validate_json(line) for line in read_bytes(store, ref).splitlines()]


async def run_harness(model: HarnessModel, tasks: HarnessTasks) -> list[HarnessScore]:
    """The scores of a model, by task and metric. Raises HarnessError."""
    check_harness()
    environment = os.environ | {"OPENAI_API_KEY": os.environ.get(model.token_env) or "none"}
    with tempfile.TemporaryDirectory(prefix="harness-", dir=process_folder()) as folder:
        # a killed flow must not leave it behind either
        guard = [sys.executable, "-c", DIE_WITH_PARENT, str(os.getpid())]
        process = await asyncio.create_subprocess_exec(
            *guard, *harness_command(model, tasks, Path(folder))[1:], env=environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = await process.communicate()
        finally:
            # a cancelled flow must not leave it behind
            if process.returncode is None:
                process.kill()
                await process.wait()
        results = sorted(Path(folder).rglob("results*.json"))
        if process.returncode or not results:
            end = output.decode(errors="replace").strip()[-TAIL:]
            raise HarnessError(f"lm_eval ended with status {process.returncode} on {model.name}; its last lines: {end}")
        return scores_of(model.name, json.loads(results[-1].read_text(encoding="utf-8")))


def harness_command(model: HarnessModel, tasks: HarnessTasks, output: Path) -> list[str]:
    """The command that writes the scores into the folder `output`."""
    command = [sys.executable, "-m", "lm_eval", "run", *model.options(tasks)]
    command += ["--tasks", ",".join(tasks.tasks), "--output_path", str(output), "--seed", str(tasks.seed)]
    for option in ("include_path", "num_fewshot", "limit"):
        value = getattr(tasks, option)
        if value is not None:
            command += [f"--{option}", str(value)]
    if tasks.chat_template:
        command.append("--apply_chat_template")
    return command


def scores_of(model: str, results: dict[str, Any]) -> list[HarnessScore]:
    """The scores in a result file of the harness, whose metrics are named `metric,filter`."""
    scores = []
    for task, measures in results["results"].items():
        questions = results.get("n-samples", {}).get(task, {}).get("effective", 0)
        for key, value in measures.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = measures.get(f"{metric}_stderr,{filter_name}")
            scores.append(
                HarnessScore(
                    model=model,
                    task=task,
                    metric=metric if filter_name == "none" else f"{metric} ({filter_name})",
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, int | float) else None,
                    questions=questions,
                )
            )
    return scores
