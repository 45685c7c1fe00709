"""Our side: the flows' own settings, batches and requests, and the embedded engine. Without Prefect.

The functions of the Prefect tasks are called in the order of the flows: `generate_rollouts`, `grade_rollouts`,
`prepare_batch` (which asks for logprobs if the flow's plan needs them), `take_gradient_step`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.speed.data import messages_of
from bench.speed.dataset_turns import load_in_turns
from bench.speed.roofline import Sequences, decode_parts, score_parts, shape_of_folder, train_parts
from bench.speed.turns import Setting, Turns
from engine.handles import Model, TrainingModel
from engine.memory_plan.shape import ModelShape
from engine.protocol import GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from engine.specs.engine import LocalEngineSpec
from engine.text.threads import StringThread
from engine.workspace import Workspace
from flows.dpo import DPO
from flows.grpo import GRPO
from flows.sft import SFT
from flows.training.arguments import grading_of
from flows.training.rollout_sources import Completions
from flows.training.schedules import ConstantScheduler
from flows.training.supervised_loop import SupervisedLoop
from storage.chain.records import PolicyRef, StepRequest
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.objects import open_store
from storage.store.tables import read_rows, read_table
from tasks.batches.pairs import prepare_preferences
from tasks.batches.rl import prepare_batch, prepare_conversations
from tasks.datasets.load import load_dataset
from tasks.datasets.order import DataCursor, shuffled
from tasks.datasets.spec import FileDataset, InlineDataset, InlinePairs
from tasks.graders.base import BaseGrader, Grade
from tasks.plans import PromptShard
from tasks.sampling.completions import generate_rollouts
from tasks.sampling.grading import grade_rollouts
from tasks.task_runs import work_of

PROVENANCE = Provenance(code_version="bench", config_digest="0" * 64, seed=0)
CALLS = ("generate", "logprobs_of_rows", "take_gradient_step")
"""The calls of the engine whose CPU time is measured."""
LR = ConstantScheduler(1e-6)


class ShareOfE(BaseGrader):
    """The reward of GRPO: the share of the letter e in the completion, as in peers.py."""

    def __init__(self) -> None:
        super().__init__("share-of-e")

    async def grade(self, thread: StringThread) -> Grade:
        text = thread.turns[-1].content
        return Grade(value=text.count("e") / max(1, len(text)), grader_key=self.grader_key)


Call = tuple[int, dict[str, list[dict[str, float]]]]
"""Tokens of a call of the engine, and the operations and bytes that each phase needs."""


@dataclass
class Run:
    """A workspace with a model, and the CPU time of its engine's calls since the last `phases`."""

    workspace: Workspace
    model: TrainingModel
    cpu: dict[str, float]
    shape: ModelShape

    @classmethod
    async def open(cls, setting: Setting) -> Run:
        spec = LocalEngineSpec(device="cpu", threads=1, compute_dtype="bfloat16")
        store = f"file://{Path(setting.folder, 'store')}"
        workspace = Workspace(store=store, engine=spec, run="bench", provenance=PROVENANCE)
        run = cls(workspace, None, {}, shape_of_folder(setting.model))  # type: ignore[arg-type]  # the builder needs an object with a workspace
        run.model = await Model(setting.model).to_builder(run).spawn_train("policy")
        sampling = SamplingParams(max_new_tokens=max(1, setting.new_tokens), min_new_tokens=setting.new_tokens)
        run.model = run.model.with_sampling(sampling)
        engine = workspace.connect()
        for name in CALLS:
            setattr(engine, name, run._timed(name, getattr(engine, name)))
        return run

    def _timed(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def timed(*positional: Any, **named: Any) -> Any:
            began = time.process_time()
            result = await call(*positional, **named)
            self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - began
            return result

        return timed

    def phases(self, parts: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
        """The CPU time of each call, with the operations and bytes that it needs. Resets the times."""
        phases = {}
        for name, seconds in self.cpu.items():
            phases[name] = {"cpu": seconds, "parts": parts.get(name, [])}
        self.cpu.clear()
        return phases

    async def step(self, request: StepRequest) -> PolicyRef:
        """Takes a gradient step, as tasks.train does."""
        request = request.model_copy(update={"max_tokens": self.workspace.max_tokens})
        record = await self.workspace.connect().take_gradient_step(request, epoch=self.workspace.epoch)
        return record.policy

    def sequences(self, batch: ArtifactRef) -> Sequences:
        """(group, tokens, trained tokens) of each row of a batch."""
        rows = read_table(self.workspace.open_store(), batch).select(["group", "token_ids", "loss_mask"]).to_pylist()
        return [(row["group"], len(row["token_ids"]), sum(w > 0 for w in row["loss_mask"])) for row in rows]


def thread_of(messages: list[dict[str, str]]) -> StringThread:
    """The conversation as a thread."""
    thread = StringThread()
    for message in messages:
        thread = getattr(thread, message["role"])(message["content"])
    return thread


# -- supervised ----------------------------------------------------------------------------------------------------


def sft(setting: Setting, turns: Turns) -> None:
    """Steps of SFT."""
    asyncio.run(_sft(setting, turns))


async def _sft(setting: Setting, turns: Turns) -> None:
    run = await Run.open(setting)
    threads = [thread_of(messages_of(row)) for row in setting.rows]
    loop = SFT(threads, run.model, samples_per_batch=setting.rows_per_step, lr_scheduler=LR)
    data = load_dataset(run.workspace.open_store(), InlineDataset.of(threads), use="completion", provenance=PROVENANCE)

    async def prepare(policy: PolicyRef, rows: list[int], _: PolicyRef) -> ArtifactRef:
        return await work_of(prepare_conversations)(
            run.workspace, policy, run.model.base, data.ref, rows, lengths=loop.lengths, step=policy.step
        )

    await _supervised(setting, turns, run, loop, prepare)


def dpo(setting: Setting, turns: Turns) -> None:
    """Steps of DPO. The reference's logprobs are computed per batch, as in the flow."""
    asyncio.run(_dpo(setting, turns))


async def _dpo(setting: Setting, turns: Turns) -> None:
    run = await Run.open(setting)
    pairs = []
    for row in setting.rows:
        prompt = thread_of(messages_of({"prompt": row["prompt"]}))
        pairs.append((prompt.assistant(row["chosen"]), prompt.assistant(row["rejected"])))
    loop = DPO(pairs, run.model, samples_per_batch=setting.rows_per_step, lr_scheduler=LR)
    data = load_dataset(run.workspace.open_store(), InlinePairs.of(pairs), use="preference", provenance=PROVENANCE)

    async def prepare(policy: PolicyRef, rows: list[int], start: PolicyRef) -> ArtifactRef:
        return await work_of(prepare_preferences)(
            run.workspace, policy, run.model.base, data.ref, rows,
            loss=loop.loss, reference=start, lengths=loop.lengths, step=policy.step,
        )  # fmt: skip

    await _supervised(setting, turns, run, loop, prepare)


async def _supervised(
    setting: Setting,
    turns: Turns,
    run: Run,
    loop: SupervisedLoop,
    prepare: Callable[[PolicyRef, list[int], PolicyRef], Awaitable[ArtifactRef]],
) -> None:
    """Takes a step of SFT or DPO per turn, as flows.training.supervised_loop does. Tokens are all of the sequences."""
    start = policy = await loop.open()
    reference = loop.reference(start)
    while turns.begin():
        first = policy.step * setting.rows_per_step % len(setting.rows)
        batch = await prepare(policy, list(range(first, first + setting.rows_per_step)), start)
        policy = await run.step(
            StepRequest(
                parent=policy,
                batch=batch,
                reference=reference,
                loss=loop.loss.model_dump(),
                optimizer=loop.optimizer.at(policy.step, 1000, loop.schedule),
                nan_policy=loop.nan_policy,
            )
        )
        turns.stop()
        sequences = run.sequences(batch)
        parts = {"logprobs": score_parts(run.shape, sequences), "take_gradient_step": train_parts(run.shape, sequences)}
        tokens = sum(length for _, length, _ in sequences)
        turns.end(tokens, phases=run.phases(parts))


# -- rollouts ------------------------------------------------------------------------------------------------------


@dataclass
class Steps:
    """What RolloutLoop.lookahead reads of the steps of a run."""

    cursor: DataCursor
    total_steps: int | None


class WithoutPrefect(Completions):
    """Samples and grades without task runs, as bench.speed measures the engine."""

    async def sample_and_grade(
        self, workspace: Workspace, policy: PolicyRef, shard: PromptShard, sampling: SamplingParams, *, step: int
    ) -> tuple[ArtifactRef, ArtifactRef]:
        rollouts = await work_of(generate_rollouts)(workspace, policy, shard, sampling, step=step)
        graded = await work_of(grade_rollouts)(
            workspace, rollouts, self.plan, stage=policy.stage, step=step, shard=shard.index
        )
        return rollouts, graded


def grpo(setting: Setting, turns: Turns) -> None:
    """Steps of GRPO without a KL term."""
    asyncio.run(_grpo(setting, turns))


async def _grpo(setting: Setting, turns: Turns) -> None:
    run = await Run.open(setting)
    workspace, shape = run.workspace, run.shape
    threads = [thread_of(messages_of(row)) for row in setting.rows]
    samples = setting.rows_per_step * setting.completions
    source = WithoutPrefect(grading_of(ShareOfE()))
    loop = GRPO(
        threads, run.model, source, samples_per_batch=samples, samples_per_mini_batch=samples,
        completions_per_sample=setting.completions, kl_beta=0.0, lr_scheduler=LR, checkpoint_frequency=None,
    )  # fmt: skip
    data = load_dataset(workspace.open_store(), InlineDataset.of(threads), provenance=PROVENANCE)
    order = loop.prepare_order(data)
    start = policy = await loop.open()

    steps = Steps(DataCursor(), None)
    async with loop.lookahead(data, order, steps) as lookahead:  # type: ignore[arg-type]
        while turns.begin():
            collected = await lookahead.rollouts_for(policy)
            plan = loop.batch_plan(start, 0.0)
            batch = await work_of(prepare_batch)(
                workspace, policy, collected.rollouts, collected.graded, plan, step=policy.step
            )
            request = loop.policy_request(policy, batch, plan, collected, kl_beta=0.0, total_steps=None)
            policy = await run.step(request)
            turns.stop()
            sequences = run.sequences(batch)
            prompts = [length - trained for _, length, trained in sequences]
            parts = {
                "generate": decode_parts(shape, prompts, setting.new_tokens, prompts_once=setting.completions),
                "logprobs": score_parts(shape, sequences),
                "take_gradient_step": train_parts(shape, sequences),
            }
            tokens = sum(trained for _, _, trained in sequences)
            turns.end(tokens, phases=run.phases(parts))


def rollout(setting: Setting, turns: Turns) -> None:
    """`generate` of the engine with the torch sampler."""

    async def generate(run: Run, policy: PolicyRef, threads: list[StringThread], step: int) -> Call:
        prompts = [run.model.renderer.prompt_ids(thread) for thread in threads]
        seeds = [run.workspace.seed_for("rollout", step, n) for n in range(len(prompts))]
        request = GenerateRequest(policy, prompts, seeds, run.model.sampling)
        completions = await run.workspace.connect().generate(request)
        turns.stop()
        parts = decode_parts(run.shape, [len(prompt) for prompt in prompts], setting.new_tokens)
        return sum(len(completion.token_ids) for completion in completions), {"generate": parts}

    asyncio.run(_call_in_turns(setting, turns, generate))


def logprobs(setting: Setting, turns: Turns) -> None:
    """`logprobs` of the engine, of every token but the first."""

    async def score(run: Run, policy: PolicyRef, threads: list[StringThread], step: int) -> Call:
        sequences = []
        for thread in threads:
            ids = run.model.renderer.sequence(run.model.renderer.tokenize(thread)).token_ids
            sequences.append(TokenSequence(ids, [0.0] + [1.0] * (len(ids) - 1)))
        await run.workspace.connect().logprobs(LogprobsRequest(policy, sequences))
        turns.stop()
        lengths = [len(sequence.token_ids) for sequence in sequences]
        scored = [(str(n), length, length - 1) for n, length in enumerate(lengths)]
        return sum(lengths), {"logprobs": score_parts(run.shape, scored)}

    asyncio.run(_call_in_turns(setting, turns, score))


async def _call_in_turns(
    setting: Setting, turns: Turns, call: Callable[[Run, PolicyRef, list[StringThread], int], Awaitable[Call]]
) -> None:
    """Makes one call of the engine per turn, with the conversations of the step and its number."""
    run = await Run.open(setting)
    policy, step = await run.model.policy(), 0
    while turns.begin():
        threads = [thread_of(messages_of(row)) for row in setting.step_rows(step)]
        tokens, parts = await call(run, policy, threads, step)
        turns.end(tokens, phases=run.phases(parts))
        step += 1


# -- data ----------------------------------------------------------------------------------------------------------


def dataset(setting: Setting, turns: Turns) -> None:
    """Loads a JSON lines file into a store that does not know it, and takes rows of a shuffled order."""

    def load(path: Path, folder: Path, chosen: int) -> tuple[int, int]:
        store = open_store(str(folder))
        data = load_dataset(store, FileDataset(path=str(path)), provenance=PROVENANCE)
        rows, _ = shuffled(data.rows, seed=0).take(DataCursor(), chosen)
        return data.rows, len(read_rows(store, data.ref, rows))

    load_in_turns(setting, turns, load)
