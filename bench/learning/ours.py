"""Our side of a task: a training class of `flows`, in this process, without a Prefect server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench.without_prefect  # noqa: F401 - first, before the tasks
from bench.learning.calculator import TURNS
from bench.learning.evaluate import PROVENANCE, Context
from bench.learning.measured import CPUMeter, Point
from bench.learning.tasks import BETA_OF_PAIRS, CLIP, Data, Task
from engine.handles import InferenceModel, Model, TrainingModel
from engine.specs.engine import LocalEngineSpec
from engine.workspace import Workspace
from flows.callbacks import Cadence, Moment
from flows.configs.common import CheckpointConfig
from flows.distill import Distillation
from flows.dpo import DPO
from flows.env_grpo import ENVGRPO
from flows.grpo import GRPO
from flows.kto import KTO
from flows.rft import RFT
from flows.sft import SFT
from flows.training.checkpointing import CheckpointSchedule
from flows.training.endings import use_after
from flows.training.schedules import CosineScheduler
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.pools import PromptPools
from tasks.datasets.spec import DatasetUse, FileDataset

USES: dict[str, DatasetUse] = {"sft": "completion", "dpo": "preference", "kto": "rating"}
"""How a training reads rows; the others read prompts."""


class SaveModel:
    """A callback that saves the model at regular steps."""

    def __init__(self, task: Task, cadence: Cadence, meter: CPUMeter) -> None:
        self.task, self.cadence, self.meter = task, cadence, meter
        self.points: list[Point] = []

    async def at(self, moment: Moment) -> None:
        number = len(self.points) + 1
        cpu = self.meter.read()
        with self.meter.paused():
            workspace = moment.model.workspace
            key = await moment.model.save(f"{self.task.name}-{number}")
            folder = Path(workspace.store) / "models" / key.replace("@", "/")
            tokens = use_after(workspace.open_store(), moment.policy).tokens_sampled
        self.points.append(Point(number * self.task.every * self.task.samples, folder, cpu, tokens))


async def train(
    task: Task, data: Data, seed: int, *, model_folder: Path, teacher: Path, work: Path, meter: CPUMeter
) -> list[Point]:
    """Trains the model of a folder on a task. Returns the models at the task's intervals."""
    provenance = PROVENANCE.model_copy(update={"seed": seed})
    workspace = Workspace(
        store=str(work / "store"), engine=LocalEngineSpec(threads=1), run=task.name, seed=seed, provenance=provenance
    )
    model = await Model(str(model_folder)).to_builder(Context(workspace)).spawn_train("policy")
    model = model.temperature(1.0).max_gen_len(task.new_tokens)
    # the rows
    path = work / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in data.train))
    spec = FileDataset(path=str(path), order="pools" if task.pools else "shuffled", pools=PromptPools())
    rows = load_dataset(
        workspace.open_store(), spec, use=USES.get(task.training, "prompt"), provenance=provenance
    )
    # the loop
    # a round of RFT is a loop of its own, at whose end the callback is called
    every = None if task.training == "rft" else task.every
    save = SaveModel(task, Cadence(every_steps=every, at_start=False), meter)
    options: dict[str, Any] = {
        "data_seed": seed, "lr_scheduler": CosineScheduler(task.lr), "callbacks": [save],
        "checkpoints": CheckpointSchedule(CheckpointConfig(frequency=None)),
    }  # fmt: skip
    loop = await create_loop(task, rows, model, options, teacher)
    await loop.run()
    return save.points


async def create_loop(
    task: Task, rows: LoadedDataset, model: TrainingModel, options: dict[str, Any], teacher: Path
) -> Any:
    """The training class of a task, with its settings."""
    if task.training == "rft":
        return RFT(
            rows, model, task.grader(), rounds=task.steps, prompts_per_round=task.samples // task.completions,
            completions_per_sample=task.completions, samples_per_batch=8, **options,
        )  # fmt: skip
    if task.training in ("sft", "dpo", "kto"):
        kind: Any = {"sft": SFT, "dpo": DPO, "kto": KTO}[task.training]
        if kind is not SFT:
            options["kl_beta"] = BETA_OF_PAIRS
        return kind(rows, model, max_steps=task.steps, samples_per_batch=task.samples, **options)
    options |= {
        "samples_per_batch": task.samples, "samples_per_mini_batch": task.samples, "kl_beta": 0.0,
        "completions_per_sample": task.completions, "clip_range": CLIP, "max_idle_steps": None,
        "max_num_grpo_steps": task.steps,
    }  # fmt: skip
    if task.training == "distill":
        options["max_num_distill_steps"] = options.pop("max_num_grpo_steps")
        frozen = await Model(str(teacher)).to_builder(Context(model.workspace)).spawn_inference("teacher")
        assert isinstance(frozen, InferenceModel)
        return Distillation(rows, model, frozen, **options)
    if task.training == "env_grpo":
        return ENVGRPO(rows, model, task.grader(), max_turns=TURNS, **options)
    return GRPO(rows, model, task.grader(), advantage_estimator="group_sample_std", **options)
