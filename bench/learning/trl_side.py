"""TRL's side of a task: the trainer of the same name, with the settings of our side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)

from bench.learning.measured import CPUMeter, Point
from bench.learning.tasks import BETA_OF_PAIRS, CLIP, Data, Row, Task
from bench.parity.learning import optimizer_and_schedule, user
from bench.parity.peers import COMMON, load
from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader


class SaveModel(TrainerCallback):  # type: ignore[misc]
    """Saves the model at regular steps."""

    def __init__(self, task: Task, tokenizer: Any, work: Path, meter: CPUMeter) -> None:
        self.task, self.tokenizer, self.work, self.meter = task, tokenizer, work, meter
        self.points: list[Point] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step % self.task.every:
            return
        cpu = self.meter.read()
        with self.meter.paused():
            folder = self.work / f"step-{state.global_step}"
            # the evaluator computes in bfloat16 on both sides
            weights = {name: value.to(torch.bfloat16) for name, value in others["model"].state_dict().items()}
            others["model"].save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)
        self.points.append(Point(state.global_step * self.task.samples, folder, cpu))


def train(
    task: Task, data: Data, seed: int, *, model_folder: Path, teacher: Path, work: Path, meter: CPUMeter
) -> list[Point]:
    """Trains the model of a folder on a task. Returns the models at the task's intervals."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_folder)
    common = COMMON | {
        "bf16": True, "seed": seed, "output_dir": str(work / "trl"), "max_steps": task.steps,
        "learning_rate": task.lr, "per_device_train_batch_size": task.samples,
    }  # fmt: skip
    kind, arguments, further = _TRAININGS[task.training](task, common)
    if task.training == "distill":
        further["teacher_model"] = load(teacher)[0]
    save = SaveModel(task, tokenizer, work, meter)
    trainer = kind(
        model=model, args=arguments, train_dataset=Dataset.from_list([chat(row, task) for row in data.train]),
        processing_class=tokenizer, optimizers=optimizer_and_schedule(model, task.lr, task.steps),
        callbacks=[save], **further,
    )  # fmt: skip
    trainer.train()
    _count_tokens(task, trainer.state.log_history, save.points)
    return save.points


def chat(row: Row, task: Task) -> dict[str, Any]:
    """A row in TRL's conversational form."""
    columns: dict[str, Any] = {"prompt": user(row["prompt"])}
    if task.training == "grpo":
        # as text, because the rows of a table of datasets have one schema
        columns["metadata"] = json.dumps(row["metadata"])
    for name in ("completion", "chosen", "rejected"):
        if name in row and task.training in ("sft", "dpo", "kto"):
            columns[name] = [{"role": "assistant", "content": row[name]}]
    if "label" in row:
        columns["label"] = row["label"]
    return columns


def reward_function(grader: BaseGrader) -> Callable[..., list[float]]:
    """Our grader as a reward function of TRL."""

    async def grade(prompts: list[Any], completions: list[Any], metadata: list[str]) -> list[float]:
        grades = []
        for prompt, completion, text in zip(prompts, completions, metadata, strict=True):
            thread = StringThread([("user", prompt[0]["content"])], metadata=json.loads(text))
            grades.append((await grader.grade(thread.assistant(completion[0]["content"]))).value)
        return grades

    def reward(prompts: list[Any], completions: list[Any], metadata: list[str], **_: Any) -> list[float]:
        return asyncio.run(grade(prompts, completions, metadata))

    return reward


Trainer = tuple[Any, Any, dict[str, Any]]
"""The trainer's class, its arguments, and its further keyword arguments."""


def _grpo(task: Task, common: dict[str, Any]) -> Trainer:
    arguments = GRPOConfig(
        num_generations=task.completions, max_completion_length=task.new_tokens, temperature=1.0, epsilon=CLIP,
        beta=0.0, loss_type="bnpo", **common,
    )  # fmt: skip
    return GRPOTrainer, arguments, {"reward_funcs": reward_function(task.grader())}


def _distill(task: Task, common: dict[str, Any]) -> Trainer:
    """The reverse KL divergence on completions of the student. TRL computes it over the whole vocabulary, ours with
    the sampled tokens."""
    arguments = DistillationConfig(max_completion_length=task.new_tokens, temperature=1.0, beta=1.0, **common)
    return DistillationTrainer, arguments, {}


def _sft(task: Task, common: dict[str, Any]) -> Trainer:
    return SFTTrainer, SFTConfig(completion_only_loss=True, **common), {}


def _dpo(task: Task, common: dict[str, Any]) -> Trainer:
    return DPOTrainer, DPOConfig(beta=BETA_OF_PAIRS, **common), {}


def _kto(task: Task, common: dict[str, Any]) -> Trainer:
    return KTOTrainer, KTOConfig(beta=BETA_OF_PAIRS, **common), {}


_TRAININGS: dict[str, Callable[[Task, dict[str, Any]], Trainer]] = {
    "grpo": _grpo, "distill": _distill, "sft": _sft, "dpo": _dpo, "kto": _kto,
}  # fmt: skip


def _count_tokens(task: Task, log: list[dict[str, Any]], points: list[Point]) -> None:
    """Sets the sampled tokens of each point, from the mean length of the completions of each step."""
    for point in points:
        lengths = [
            entry["completions/mean_length"]
            for entry in log
            if "completions/mean_length" in entry and entry["step"] * task.samples <= point.samples
        ]
        point.sampled_tokens = round(task.samples * sum(lengths))
