"""What a run will take, before it begins: memory of the engine, disk, time. What cannot fit is refused here, and not by
an allocator an hour later.

Sizes follow from counting parameters P. Time is counted in operations: 2P per token that is read or sampled, 6P per
token that is trained (forward and backward; Kaplan et al., arXiv:2001.08361), at the speed the engine measured. It is
the time if every completion is as long as it may be: most runs take less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from engine.models.folder import ModelFolder, local_folder, registered_model
from engine.models.size import folder_parameter_count, parameter_count
from engine.protocol import EngineInfo
from flows.configs.common import CheckpointConfig, GRPOConfig, ModelConfig, TrainingConfig
from flows.configs.env_ppo import ENVPPOConfig
from flows.configs.environments import ENVGRPOConfig
from flows.configs.ppo import PPOConfig
from flows.configs.preferences import DPOConfig, RewardModelConfig
from flows.configs.sft_to_gspo import SFTToGSPOConfig
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import RowReader
from tasks.datasets.load import THREAD_COLUMNS, LoadedDataset

N = TypeVar("N", int, float)

MASTER_BYTES = 4
COMPUTE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
MOMENTS = 2
ADAPTER_SHARE = 0.05
"""An adapter's parameters as a share of its base's: what rank 16 on every linear layer of a small model comes to."""
EFFICIENCY = 0.4
"""Share of the measured matrix speed that packed training and batched decoding reach."""
CHARACTERS_PER_TOKEN = 4
"""Characters of a rendered thread per token, about."""
BYTES_PER_STORED_TOKEN = 16
"""Id, weight and logprobs of one token in the compressed tables of a step."""
ROWS_LOOKED_AT = 64
GIB = 1 << 30


class DoesNotFit(ValueError):
    """The run asks for more than there is."""


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds; None where it cannot be told."""

    memory_bytes: int
    disk_bytes: int | None
    seconds: float | None

    def check(self, info: EngineInfo, *, resumed: bool = False) -> None:
        """Raises DoesNotFit, saying what is there and what to change. A resumed run has written part of what it takes
        on the disk, so that is not held against what is free."""
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

    def then(self, other: Estimate) -> Estimate:
        """Of one stage after the other."""
        return Estimate(
            memory_bytes=max(self.memory_bytes, other.memory_bytes),
            disk_bytes=_sum(self.disk_bytes, other.disk_bytes),
            seconds=_sum(self.seconds, other.seconds),
        )

    def text(self, info: EngineInfo) -> str:
        parts = [f"{_gib(self.memory_bytes)} of the engine's {_gib(info.memory_bytes)} memory"]
        if self.disk_bytes is not None:
            there = "" if info.disk_free_bytes is None else f" of {_gib(info.disk_free_bytes)} free"
            parts.append(f"{_gib(self.disk_bytes)}{there} storage")
        if self.seconds is not None:
            parts.append(f"{_duration(self.seconds)} if every completion is as long as it may be")
        return "estimate: " + ", ".join(parts)


def estimate(
    store: ObjectStore,
    config: TrainingConfig,
    base: ArtifactRef,
    data: LoadedDataset,
    info: EngineInfo,
    further: Mapping[str, LoadedDataset] | None = None,
) -> Estimate:
    """What `config` will take on an engine that says `info` of itself. `further`: what it trains on besides `data`."""
    if isinstance(config, SFTToGSPOConfig):
        first = estimate(store, config.first, base, data, info)
        return first.then(estimate(store, config.second, base, (further or {})["prompts"], info))
    parameters = parameter_count(store, base)
    tokens = _thread_tokens(store, data)
    steps = _steps(config, data.rows)
    if isinstance(config, GRPOConfig | ENVGRPOConfig):
        operations, kept = _grpo_step(config, parameters, tokens)
        frozen = config.algorithm.kl_beta > 0
    else:
        kept = min(config.algorithm.samples_per_batch, data.rows) * tokens
        frozen = isinstance(config, DPOConfig)
        operations = parameters * kept * (6.0 + 2.0 * frozen)
    compute = COMPUTE_BYTES[info.numerics.compute_dtype]
    samples = not isinstance(config, RewardModelConfig)
    memory = _memory(config.model, parameters, compute, frozen=frozen, samples=samples)
    disk = None if steps is None else _disk(config, config.model, parameters, steps)
    if isinstance(config, PPOConfig | ENVPPOConfig):  # reads every token, and trains as the policy does
        value = config.value_model
        there = parameters if value.key is None else _parameters(store, value.key)
        memory += _memory(value, there, compute, frozen=False, samples=False)
        if value.adapter is not None and config.model.adapter is not None and value.key is None:
            memory -= parameters * compute  # one base for both
        disk = None if steps is None or disk is None else disk + _disk(config, value, there, steps)
        operations += there * kept * (2.0 + 6.0 * config.algorithm.mini_epochs_per_batch)
    speed = EFFICIENCY * info.operations_per_second
    return Estimate(
        memory_bytes=memory,
        disk_bytes=None if steps is None or disk is None else disk + steps * kept * BYTES_PER_STORED_TOKEN,
        seconds=None if steps is None else steps * operations / speed,
    )


def _parameters(store: ObjectStore, key: str) -> int:
    """Of a registered model, or a local folder. Raises BadModelFolder."""
    folder = local_folder(key)
    if folder is None:
        return parameter_count(store, registered_model(store, key))
    return folder_parameter_count(ModelFolder.of(folder).files)


def _grpo_step(config: GRPOConfig | ENVGRPOConfig, parameters: int, prompt: int) -> tuple[float, int]:
    """Operations of one step, and the tokens that it stores. A prompt is read once for its whole group."""
    algorithm = config.algorithm
    groups = algorithm.samples_per_batch // algorithm.completions_per_sample
    answers = config.environment.max_turns if isinstance(config, ENVGRPOConfig) else 1
    tokens = groups * prompt + algorithm.samples_per_batch * answers * config.sampling.max_new_tokens
    passes = 2 + 2 * (algorithm.old_logprobs == "trainer") + 2 * (algorithm.kl_beta > 0)
    return parameters * tokens * float(passes + 6 * algorithm.mini_epochs_per_batch), tokens


def _memory(model: ModelConfig, parameters: int, compute_bytes: int, *, frozen: bool, samples: bool) -> int:
    """Weights, gradients and moments of what is trained; where it `samples`, the sampler's copy if that computes in a
    lower precision; and a frozen copy for the reference of a KL term. Of an adapter's base there is one copy, in that
    precision."""
    if model.adapter is not None:
        return int(parameters * (compute_bytes + ADAPTER_SHARE * MASTER_BYTES * (2 + MOMENTS)))
    sampler = compute_bytes if samples and compute_bytes < MASTER_BYTES else 0
    return parameters * (max(MASTER_BYTES, compute_bytes) * (2 + MOMENTS + frozen) + sampler)


def _disk(config: TrainingConfig, model: ModelConfig, parameters: int, steps: int) -> int:
    """Checkpoints that are kept, one on its way, and the published model."""
    saved = parameters * MASTER_BYTES * (1 + MOMENTS)
    if model.adapter is not None:
        saved = int(ADAPTER_SHARE * saved)
    return (_checkpoints(config.checkpoints, steps) + 1) * saved + parameters * MASTER_BYTES


def _checkpoints(config: CheckpointConfig, steps: int) -> int:
    named = steps // config.every_steps if config.every_steps else int(1 / config.frequency) if config.frequency else 0
    named = min(named, config.keep_named or named)
    return named + config.keep_last + (config.keep_best or 0) + (steps // config.keep_every if config.keep_every else 0)


def _steps(config: TrainingConfig, rows: int) -> int | None:
    """Of the whole run; None when it is endless."""
    algorithm = config.algorithm
    if algorithm.steps is not None:
        return algorithm.steps
    if isinstance(config, GRPOConfig | ENVGRPOConfig):
        if algorithm.epochs is None:
            return None
        per_step = config.algorithm.samples_per_batch // config.algorithm.completions_per_sample
    else:
        per_step = min(algorithm.samples_per_batch, rows)
    return -(-(algorithm.epochs or 1) * rows // per_step)


def _thread_tokens(store: ObjectStore, data: LoadedDataset) -> int:
    """Mean length of the first rows, in tokens, about; of pairs, of both together."""
    reader = RowReader(store, data.ref)
    try:
        rows = reader.rows(range(min(ROWS_LOOKED_AT, data.rows)))
    finally:
        reader.close()
    characters = sum(len(str(row[name])) for row in rows for name in THREAD_COLUMNS[data.ref.kind]) / max(1, len(rows))
    return max(1, int(characters / CHARACTERS_PER_TOKEN))


def _sum(one: N | None, other: N | None) -> N | None:
    return None if one is None or other is None else one + other


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
