"""Estimates engine memory, disk and time of a run before it begins, and refuses a run that cannot fit.

Sizes follow from the number of parameters P. Times are counted as flows.runs.durations describes, and assume that every
completion reaches its maximum length. Grading is not counted, and a small model on few rows does not reach the measured
speed, so that a run may take longer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, TypeVar

from engine.errors import BadSpec
from engine.memory_plan.plan import budgeted_bytes
from engine.memory_plan.records import Machine, Workload
from engine.memory_plan.shape import ModelShape, read_shape, stored_shape
from engine.models.folder import local_folder, parameter_count, registered_model
from engine.protocol import EngineInfo
from flows.callbacks import Cadence
from flows.configs.common import CheckpointConfig, StageConfig, TrainingConfig
from flows.configs.inputs import ModelConfig
from flows.configs.ppo import ValueModelConfig
from flows.runs.durations import FAST_STORE, FIXED_START_SECONDS, TASK_SECONDS, Durations, StoreSpeed
from flows.runs.expected_errors import DoesNotFit
from flows.training.checkpointing import MIN_SECONDS, SAVES_BETWEEN, CheckpointSchedule
from storage.serialization import canonical_text
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import RowReader
from tasks.datasets.load import THREAD_COLUMNS, LoadedDataset
from tasks.datasets.load_order import load_order
from tasks.datasets.order import DataCursor

N = TypeVar("N", int, Durations)

MASTER_BYTES = 4
"""Bytes per parameter of the master weights, which are float32."""
MOMENTS = 2
"""AdamW keeps two moments per parameter."""
EFFICIENCY = 0.4
"""Share of the measured matrix speed that packed training and batched decoding reach."""
CHARACTERS_PER_TOKEN = 4
"""Typical number of characters of a turn's text per token."""
TURN_TOKENS = 5
"""Tokens that a chat template adds to each turn, as ChatML does: <|im_start|>, the role, a line break, <|im_end|> and
another line break."""
BYTES_PER_STORED_TOKEN = 16
"""Compressed size of one token's id, weight and logprobs in the tables of a step."""
OBJECTS_PER_TASK = 2
"""Objects that a task writes: its data and its manifest."""
FILES = 4
"""Objects of a checkpoint or a published model."""
SAMPLED_ROWS = 64
"""Rows of the dataset that are read to estimate its mean length."""
GIB = 1 << 30


@dataclass(frozen=True)
class Estimate:
    """Memory and disk in bytes, and time. None means unknown, as for a run without an end."""

    memory_bytes: int
    disk_bytes: int | None
    durations: Durations | None

    def check(self, info: EngineInfo, *, resumed: bool = False) -> None:
        """Raises DoesNotFit with what is available and what to change.

        The disk is not checked for a resumed run, because the run has already written part of what it needs.
        """
        if self.memory_bytes > info.memory_bytes:
            raise DoesNotFit(
                f"the run needs about {_gib(self.memory_bytes)} of the engine's memory, which is "
                f"{_gib(info.memory_bytes)}; train an adapter (model.adapter={{}}) or a smaller model, or raise "
                "engine.memory_gib"
            )
        free = None if resumed else info.disk_free_bytes
        if free is not None and self.disk_bytes is not None and self.disk_bytes > free:
            raise DoesNotFit(
                f"the run writes about {_gib(self.disk_bytes)}, but the disk of its store has {_gib(free)} free; keep "
                "fewer checkpoints (checkpoints.frequency, checkpoints.keep_last), or choose another storage.url"
            )

    def followed_by(self, other: Estimate) -> Estimate:
        """The estimate of two stages that run one after the other."""
        return Estimate(
            memory_bytes=max(self.memory_bytes, other.memory_bytes),
            disk_bytes=_sum(self.disk_bytes, other.disk_bytes),
            durations=_sum(self.durations, other.durations),
        )

    def text(self, info: EngineInfo) -> str:
        """The estimate in one line, with the engine's memory and the free disk space."""
        parts = [f"{_gib(self.memory_bytes)} of the engine's {_gib(info.memory_bytes)} memory"]
        if self.disk_bytes is not None:
            free = "" if info.disk_free_bytes is None else f" of {_gib(info.disk_free_bytes)} free"
            parts.append(f"{_gib(self.disk_bytes)}{free} storage")
        text = "estimate: " + ", ".join(parts)
        if self.durations is None:
            return text
        # the largest part first
        by_part = sorted(self.durations.parts().items(), key=lambda part: part[1], reverse=True)
        listed = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in by_part)
        return f"{text}, about {_duration(self.durations.total)}" + (f" ({listed})" if listed else "")


def estimate(
    store: ObjectStore,
    config: TrainingConfig,
    base: ArtifactRef | None,
    datasets: Sequence[LoadedDataset],
    info: EngineInfo,
    *,
    heldout: LoadedDataset | None = None,
    speed: StoreSpeed = FAST_STORE,
    committed: Sequence[int] = (),
) -> Estimate:
    """Estimates what is left of a run of `config` on the engine that `info` describes.

    `base` None is the model that `config.model` names, a folder or a registered model that is not imported yet.
    `datasets` are those of the stages, `heldout` are the rows that the run evaluates on, `speed` is that of the store,
    and `committed` are the committed steps of each stage that has begun.
    """
    stages = list(config.stages.values())
    # a stage begins when the one before it has ended
    current = min(max(0, len(committed) - 1), len(stages) - 1)
    estimates = []
    for index in range(current, len(stages)):
        # the last policy is evaluated, and so are those of the last stage
        evaluated = heldout if index == len(stages) - 1 else None
        done = sum(committed[index:])
        estimates.append(_estimate_stage(store, stages[index], base, datasets[index], info, evaluated, speed, done))
    return reduce(Estimate.followed_by, estimates)


def _estimate_stage(
    store: ObjectStore,
    config: StageConfig,
    base: ArtifactRef | None,
    data: LoadedDataset,
    info: EngineInfo,
    heldout: LoadedDataset | None,
    speed: StoreSpeed,
    done: int,
) -> Estimate:
    """The estimate of a stage of which `done` steps are committed."""
    # one step of the trained model
    shape = _named_shape(store, config.model.key) if base is None else _shape(store, base)
    parameters = shape.parameters
    steps, frozen = config.count_steps(data.rows), config.needs_reference
    stored_tokens = config.tokens_per_step(data.rows, _mean_row_tokens(store, data))
    operations = parameters * stored_tokens * (2.0 * config.passes_before_gradient + 6.0 * config.passes_of_gradient)
    trained = shape.with_scalar_head() if config.has_scalar_head else shape
    memory = _memory(info, trained, config.model, frozen=int(frozen))
    steps_left = None if steps is None else max(0, steps - done)
    loaded_parameters, published_parameters = parameters * (1 + frozen), parameters
    saved_bytes = _checkpoint_bytes(config.model, shape)

    # the value model reads every token, and is trained as often as the policy
    value_model = config.critic
    if value_model is not None:
        value_shape = _value_shape(store, value_model, shape)
        adapters = [model.adapter for model in (config.model, value_model) if model.adapter is not None]
        shared = value_model.key is None and len(adapters) == 2 and adapters[0].load_in_4bit == adapters[1].load_in_4bit
        memory += _memory(info, value_shape.with_scalar_head(), value_model, own_base=not shared)
        loaded_parameters += value_shape.parameters
        published_parameters += value_shape.parameters
        saved_bytes += _checkpoint_bytes(value_model, value_shape)
        operations += value_shape.parameters * stored_tokens * (2.0 + 6.0 * config.passes_of_gradient)

    # the teachers read every token, each its share of the prompts, and are held as frozen models
    for key in config.teacher_keys:
        teacher_shape = _named_shape(store, key)
        memory += teacher_shape.parameters * MASTER_BYTES
        loaded_parameters += teacher_shape.parameters
        operations += 2.0 * (teacher_shape.parameters - parameters) * stored_tokens / len(config.teacher_keys)

    if steps is None or steps_left is None:
        return Estimate(memory_bytes=memory, disk_bytes=None, durations=None)
    per_second, step_bytes = EFFICIENCY * info.operations_per_second, stored_tokens * BYTES_PER_STORED_TOKEN
    evaluation = _evaluation_operations(store, config, parameters, heldout, range(done, steps + 1))
    step_seconds, save_seconds = operations / per_second, speed.write_seconds(saved_bytes, FILES)
    written = _checkpoints_written(config.checkpoints, steps, done, step_seconds, save_seconds)
    durations = Durations(
        start=FIXED_START_SECONDS + loaded_parameters * MASTER_BYTES / speed.read_bytes_per_second,
        steps=steps_left * step_seconds,
        evaluation=evaluation / per_second,
        checkpoints=written * save_seconds + speed.write_seconds(parameters * MASTER_BYTES, FILES),
        storage=steps_left * _storage_seconds(config, step_bytes, speed),
    )
    # checkpoints on the disk at one time, with one that is being written, and the published model
    by_time = int(durations.steps / config.checkpoints.recovery_seconds)
    held = min(_checkpoints(config.checkpoints, steps_left) + 1, written + by_time)
    disk = held * saved_bytes + published_parameters * MASTER_BYTES + steps_left * step_bytes
    return Estimate(memory_bytes=memory, disk_bytes=disk, durations=durations)


def _evaluation_operations(
    store: ObjectStore, config: StageConfig, parameters: int, heldout: LoadedDataset | None, counts: range
) -> float:
    """Operations of the evaluations after each number of steps in `counts`, the last of which is that of the whole run.
    Each held-out prompt is read and answered, each held-out row is read."""
    if heldout is None:
        return 0.0
    cadence = Cadence.of(config.measurements)
    times = sum(cadence.due(done, counts[-1]) for done in counts)
    tokens = config.tokens_per_heldout_row(_mean_row_tokens(store, heldout))
    return 2.0 * parameters * times * heldout.rows * tokens


def _storage_seconds(config: StageConfig, step_bytes: int, speed: StoreSpeed) -> float:
    """Seconds of a step for its artifacts and tasks: the batch, the gradient step and, for each shard, sampling and
    grading."""
    tasks = 2 + 2 * config.shards_per_step
    return speed.write_seconds(step_bytes, OBJECTS_PER_TASK * tasks) + tasks * TASK_SECONDS


def _checkpoints_written(
    config: CheckpointConfig, steps: int, done: int, step_seconds: float, save_seconds: float
) -> int:
    """The number of checkpoints that the run writes after `done` of its steps. The last step has one in any case."""

    def count(schedule: CheckpointSchedule) -> int:
        return sum(schedule.planned(step, steps, model="policy") for step in range(done, steps - 1))

    # those of shares of the run are skipped where they would follow one another too soon
    certain = count(CheckpointSchedule(config.model_copy(update={"frequency": None})))
    shares = count(CheckpointSchedule(config)) - certain
    apart_seconds = max(MIN_SECONDS, SAVES_BETWEEN * save_seconds)
    return certain + min(shares, int((steps - done) * step_seconds / apart_seconds)) + 1


def _value_shape(store: ObjectStore, value_model: ValueModelConfig, policy: ModelShape) -> ModelShape:
    """The shape of the value model, which is by default a copy of the policy. Raises BadSpec, CorruptArtifact."""
    key = value_model.key
    return policy if key is None else _named_shape(store, key)


def _named_shape(store: ObjectStore, key: str) -> ModelShape:
    """The shape of a folder or of a registered model. Raises BadSpec, BadModelFolder, CorruptArtifact."""
    folder = local_folder(key)
    return _shape(store, registered_model(store, key)) if folder is None else read_shape(folder)


def _shape(store: ObjectStore, model: ArtifactRef) -> ModelShape:
    """The shape of a registered model. Of a model that the memory plan does not know, such as a mixture of experts,
    only the number of parameters counts. Raises CorruptArtifact."""
    try:
        return stored_shape(store, model)
    except BadSpec:
        parameters = parameter_count(store, model)
        return ModelShape(model.key, 0, 0, 0, 0, 0, 0, vocabulary=1, context=1, parameters=parameters, tied=True)


def _memory(info: EngineInfo, shape: ModelShape, model: ModelConfig, *, frozen: int = 0, own_base: bool = True) -> int:
    """Bytes of the engine's budget that the model takes, as `ostinato engine plan` counts them."""
    rank, in_4bit = (None, False) if model.adapter is None else (model.adapter.rank, model.adapter.load_in_4bit)
    work = Workload(shape, context=shape.context, lora_rank=rank, load_in_4bit=in_4bit, frozen=frozen)
    device: Literal["cpu", "cuda"] = "cuda" if info.spec.device == "cuda" else "cpu"
    machine = Machine(device, "engine", info.devices, info.memory_bytes, None)
    return budgeted_bytes(info.spec, work, machine, own_base=own_base)


def _checkpoint_bytes(model: ModelConfig, shape: ModelShape) -> int:
    """Bytes of one checkpoint: the trained weights and their moments."""
    trained = shape.parameters if model.adapter is None else shape.lora(model.adapter.rank)
    return trained * MASTER_BYTES * (1 + MOMENTS)


def _checkpoints(config: CheckpointConfig, steps: int) -> int:
    """The largest number of checkpoints that the run keeps at one time."""
    named = 0
    if config.every_steps:
        named = steps // config.every_steps
    elif config.frequency:
        named = int(1 / config.frequency)
    named = min(named, config.keep_named or named)
    # checkpoints by interval are kept besides the named ones
    every_nth = steps // config.keep_every if config.keep_every else 0
    return named + config.keep_last + (config.keep_best or 0) + every_nth


def _mean_row_tokens(store: ObjectStore, data: LoadedDataset) -> int:
    """Approximate mean length in tokens of the first rows of the table or, of a mixture, those that are read first.

    A preference pair counts both of its conversations. Images are not counted.
    """
    indices = list(range(min(SAMPLED_ROWS, data.rows)))
    if data.parts:
        indices, _ = load_order(store, data, seed=0).take(DataCursor(), SAMPLED_ROWS)
    reader = RowReader(store, data.ref)
    try:
        rows = reader.rows(indices)
    finally:
        reader.close()
    # characters instead of tokens, because no tokenizer is loaded here
    tokens = 0.0
    for row in rows:
        for name in THREAD_COLUMNS[data.ref.kind]:
            thread = json.loads(row[name])
            if "tools" in thread:
                tokens += len(canonical_text(thread["tools"])) / CHARACTERS_PER_TOKEN
            for turn in thread["turns"]:
                tokens += _content_characters(turn["content"]) / CHARACTERS_PER_TOKEN + TURN_TOKENS
    return max(1, int(tokens / max(1, len(rows))))


def _content_characters(content: str | list[dict[str, Any]] | None) -> int:
    """Characters of a turn's text or, of fragments, of their JSON without the images."""
    if not isinstance(content, list):
        return len(content or "")
    return sum(len(canonical_text(part)) for part in content if part["kind"] != "image")


def _sum(first: N | None, second: N | None) -> N | None:
    if first is None or second is None:
        return None
    return first + second


def _gib(size: int) -> str:
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / (1 << 20):.0f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
