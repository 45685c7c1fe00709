"""Rounds of rejection sampling (RFT, arXiv:2308.01825; RAFT, arXiv:2304.06767; ReST, arXiv:2308.08998).

A round samples several completions of each prompt, grades them, keeps the best ones by a rule, and fine-tunes on them
(SFT). The next round samples from the result. Choose it as the simplest way to learn from a grader: no advantages, no
reference, no clipping, and a whole round can be looked at before it is trained on. It uses only what was good, so it
learns less from a sample than GRPO, which also lowers what was bad.

Each round is a stage of the run with a chain of its own. Its kept completions are a dataset, `RUN-round-N`, of which
each row names its rollout.

    ostinato run rft --config examples/rft.yaml
"""

from __future__ import annotations

import asyncio
from typing import Any, Unpack

from engine.handles import Model, TrainingModel
from engine.text.threads import StringThread
from flows.callbacks import Cadence
from flows.configs.inputs import PromptDataConfig, default_model_name
from flows.configs.reinforcement import ENDING_RULES, SamplingRules
from flows.configs.rejection import RFTAlgorithm, RFTConfig
from flows.display.terminal import TerminalProgress
from flows.runs.checked_flow import checked_flow
from flows.runs.session import open_run
from flows.sft import SFT
from flows.training.arguments import grading_of, whole_number
from flows.training.checkpointing import CheckpointSchedule
from flows.training.endings import Ending, UseMeter, budget_ending, use_after
from flows.training.finish import publish_and_report
from flows.training.held_out import HeldoutEvaluator
from flows.training.options import LoopOptions, RFTOptions, check_names, read_options
from flows.training.rollout_collection import PromptShards, RolloutCollector
from flows.training.rollout_sources import Completions
from storage.chain.listing import run_chains
from storage.chain.records import PolicyRef
from storage.registry.models import registered_key
from storage.serialization import default_of
from storage.store import keys
from storage.store.artifacts import read_manifest
from tasks.datasets.load import LoadedDataset
from tasks.datasets.load_order import RunOrder, load_order
from tasks.datasets.order import DataCursor
from tasks.datasets.spec import InlineDataset
from tasks.graders.base import BaseGrader
from tasks.graders.spec import GraderSpec
from tasks.load import load_prompts
from tasks.plans import Grading
from tasks.sampling.selection import NothingKept, keep_completions
from tasks.sampling.shards import rows_that_fit


class Round(SFT):
    """The fine-tuning of one round, whose dataset is known when the round has sampled."""

    start: PolicyRef | None = None
    """The policy that the round fine-tunes. None: the one that the model starts with."""

    async def open(self) -> PolicyRef:
        if self._start is None:
            checkpoint = self.restart_from if self.start is None else None
            self._start = await self.model.begin_stage(
                self.stage, checkpoint=checkpoint, start=self.start, exclusive=True
            )
        return self._start


class RFT:
    """Trains `model` in place in rounds: samples completions of `dataset`, keeps the best by the grades of `grader`,
    and fine-tunes on them. `await RFT(...).run()` continues an interrupted run.

    `dataset`: threads, or a loaded prompt dataset. `grader`: a BaseGrader (in-process), or the spec of an importable
    one. Sampling follows the model's view. The other arguments are those of flows.training.options.RFTOptions; their
    defaults are in flows.configs.rejection.RFTAlgorithm and flows.configs.optimizer.SFTOptimizer.
    """

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        grader: BaseGrader | GraderSpec | Grading,
        **options: Unpack[RFTOptions],
    ) -> None:
        check_names(type(self).__name__, options, RFTOptions.__annotations__)
        counts = ("rounds", "prompts_per_round", "completions_per_sample", "keep_per_prompt", "epochs")
        whole = {name: whole_number(name, options[name]) for name in counts if name in options}  # type: ignore[literal-required]
        self.algorithm = read_options(RFTAlgorithm, options, options.get("algorithm"), **whole)
        self.rules = read_options(SamplingRules, options, options.get("rules"))
        self.dataset, self.model = dataset, model
        # an answer that the grader extracts tells which completions are distinct
        grading = grading_of(grader).model_copy(update={"keep_answers": True})
        self.source = Completions(grading)
        self.max_prompt_tokens = options.get("max_prompt_tokens")
        self.truncation = options.get("truncation", default_of(PromptDataConfig, "truncation"))
        self.ending: Ending | None = None
        # a round has the other options, and a schedule of checkpoints of its own
        algorithm = self.algorithm
        shared: dict[str, Any] = {"epochs": algorithm.epochs, "samples_per_batch": algorithm.samples_per_batch}
        for name, value in options.items():
            if name in LoopOptions.__annotations__ or name == "lr":
                shared[name] = value
        self.rounds: list[Round] = []
        for number in range(1, self.algorithm.rounds + 1):
            # a later round that begins at the base is better than the round before only when it is complete
            is_whole = number > 1 and algorithm.start_from == "base"
            shared["rules"] = self.rules.model_copy(update=dict.fromkeys(ENDING_RULES)) if is_whole else self.rules
            schedule = options.get("checkpoints")
            if schedule is not None:
                shared["checkpoints"] = CheckpointSchedule(schedule.config)
            one_round = Round([], model, **shared)
            one_round.stage = f"rft-{number}"  # type: ignore[misc]  # each round has its own
            self.rounds.append(one_round)

    async def open(self) -> PolicyRef:
        """Opens the first round, once. Returns the policy that it starts from."""
        return await self.rounds[0].open()

    async def run(self) -> PolicyRef:
        """The rounds. What each line returns is committed before the next line begins, so a crash repeats one line."""
        start = policy = await self.open()
        data = self._load_dataset()
        order = await asyncio.to_thread(self._prepare_order, data)
        cursor, info = DataCursor(), await self.model.workspace.connect().info()
        for number, one_round in enumerate(self.rounds, start=1):
            # a budget that the round before used up ends the run after that round
            used = await asyncio.to_thread(use_after, self.model.workspace.open_store(), policy)
            self.ending = budget_ending(self.rules, used, policy.step) if number > 1 else None
            if self.ending is not None and not await asyncio.to_thread(self._has_steps, one_round):
                one_round.logger.note(f"the run ends after round {number - 1}: {self.ending.reason}")
                return policy
            # sample from the policy of the round before, and keep the best
            meter = UseMeter(used, info)
            rows, cursor = order.take(cursor, self.algorithm.prompts_per_round or order.rows)
            try:
                one_round.dataset = await self._sample_and_keep(policy, data, order, rows, number, meter)
            except NothingKept as error:
                if number == 1:
                    raise
                one_round.logger.note(f"the run ends after round {number - 1}: {error}")
                return policy
            # fine-tune on them
            one_round.earlier_use = meter.read()
            if number > 1:
                one_round.start = start if self.algorithm.start_from == "base" else policy
            policy = await one_round.run()
            self.ending = one_round.ending
            if self.ending is not None:
                return policy
        return policy

    def _has_steps(self, one_round: Round) -> bool:
        """Whether a round has committed steps. It then ends where it is, and not the round before."""
        for chain in run_chains(self.model.workspace.open_store(), self.model.workspace.run):
            is_of_round = keys.stage_kind(chain.stage) == one_round.stage and chain.model == self.model.name
            if is_of_round and next(chain.steps(), None) is not None:
                return True
        return False

    async def _sample_and_keep(
        self, policy: PolicyRef, data: LoadedDataset, order: RunOrder, rows: list[int], number: int, meter: UseMeter
    ) -> LoadedDataset:
        """The dataset of a round: the completions of `policy` that the rule keeps."""
        workspace, algorithm = self.model.workspace, self.algorithm
        prompts = PromptShards(
            model=self.model,
            data=data,
            prompts_per_step=len(rows),
            completions_per_prompt=algorithm.completions_per_sample,
            prompts_per_shard=algorithm.prompts_per_shard,
            order=order,
            max_prompt_tokens=self.max_prompt_tokens,
            truncation=self.truncation,
        )
        shards = prompts.shards(rows, earlier_rows=[], first_index=0, step=0)
        collector = RolloutCollector(prompts, self.source)
        rollouts, graded = await collector.sample_and_grade(policy, shards, step=policy.step)
        name = f"{default_model_name(workspace.run)}-round-{number}"
        kept = await asyncio.to_thread(
            keep_completions, workspace, name, data.ref, rollouts, graded, algorithm.rule
        )
        sampled, tokens = await asyncio.to_thread(self._count, rollouts)
        meter.add_tokens(tokens)
        self.rounds[0].logger.note(
            f"round {number} of {algorithm.rounds}: kept {kept.rows} of {sampled} completions of {len(rows)} prompts"
        )
        return kept

    def _count(self, rollouts: list[Any]) -> tuple[int, int]:
        """The number of completions in these tables, and of their tokens."""
        store, tokens = self.model.workspace.open_store(), 0
        for ref in rollouts:
            count = read_manifest(store, ref.key).extra["completion_tokens"]
            assert isinstance(count, int)
            tokens += count
        return sum(ref.rows or 0 for ref in rollouts), tokens

    def _load_dataset(self) -> LoadedDataset:
        if isinstance(self.dataset, LoadedDataset):
            return self.dataset
        return load_prompts(self.model.workspace, InlineDataset.of(self.dataset), "prompt")

    def _prepare_order(self, data: LoadedDataset) -> RunOrder:
        """The order of the prompts, without those that are dropped for their length."""
        workspace = self.model.workspace
        order = load_order(workspace.open_store(), data, seed=self.rounds[0].data_seed)
        if self.truncation != "drop":
            return order
        limit = self.max_prompt_tokens
        rows = rows_that_fit(workspace, data, self.model.base, max_prompt_tokens=limit, sampling=self.model.sampling)
        return order.only(rows)


@checked_flow()
async def rft(config: RFTConfig) -> dict[str, Any]:
    """Trains a model in rounds of rejection sampling, evaluates it before and after each on held-out prompts, publishes
    it and reports.

    Args:
        config: what to train, on what, graded how.
    """
    logger = TerminalProgress()
    async with open_run(config, logger) as session:
        if session.result is not None:
            return session.result
        source = Completions.of_config(config.grader)
        builder = Model(registered_key(session.base)).to_builder(session).training(config.model.trainable)
        model = await builder.spawn_train(config.model.name)
        trainer = RFT(
            session.data, model.with_sampling(config.sampling), source.plan,
            logger=logger, optimizer=config.optimizer, checkpoints=CheckpointSchedule(config.checkpoints),
            data_seed=config.seed, algorithm=config.algorithm, rules=config.rules,
            max_prompt_tokens=config.data.max_prompt_tokens, truncation=config.data.truncation,
        )  # fmt: skip
        heldout = HeldoutEvaluator.of_config(session.workspace, config, session.base, source)
        for number, one_round in enumerate(trainer.rounds):
            one_round.callbacks += heldout.callbacks(Cadence(at_start=config.evaluation.before and number == 0))
        # training
        start = await trainer.open()
        policy = await trainer.run()
        # these return what the rounds have committed
        before = await heldout.evaluate(start) if config.evaluation.before else None
        after = await heldout.evaluate(policy)
        further = heldout.result(before, after)
        if trainer.ending is not None:
            further["ending"] = trainer.ending.model_dump()
        return await publish_and_report(
            session, logger, config.model, policy,
            before=before, after=after, further=further, samples_shown=config.evaluation.samples_shown,
        )  # fmt: skip
