"""Models x datasets x graders: k completions of every prompt, and how sure the differences between models are.

Completions of one model on one dataset are kept under the model, not under the evaluation: what a champion answered on
a fixed suite is sampled once, however many challengers it meets. All models draw with the same random streams.

    ostinato evaluate --config examples/evaluation.yaml
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from prefect import flow

from engine.handles import Model
from engine.workspace import Workspace
from flows.configs.evaluation import EvaluationFlowConfig, Suite, semantic
from flows.display.artifacts import put_markdown, put_table
from flows.display.terminal import TerminalProgress
from flows.ops.attempts import check_attempts
from flows.ops.deployment_settings import with_deployment_settings
from flows.ops.hooks import ON_END
from flows.ops.run_keys import EVALUATION_KEY_PREFIX
from flows.ops.termination import reraise_termination
from flows.recipe import RecipeContext
from flows.runs.code_version import code_version
from flows.runs.events import emit_eval_regressed
from flows.runs.session import read_result, release_engine, release_run, take_lease, write_result
from storage.chain.listing import EVALUATED
from storage.chain.run_record import create_or_check_run
from storage.registry.decisions import resolve_model
from storage.registry.models import find_model, registered_key
from storage.serialization import canonical_json, digest
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.tables import read_table
from tasks.compare import compare_models
from tasks.datasets.load import LoadedDataset
from tasks.evaluation.model_comparison import Cell, Comparison, compare, comparison_markdown, score_table
from tasks.grade import grade_rollouts
from tasks.load import load_prompts
from tasks.rollout import generate_rollouts
from tasks.sampling.completions import PromptShard
from tasks.sampling.grading import Grading


@dataclass(frozen=True)
class LoadedSuite:
    """A suite whose prompts are in the store, and whose graders were found."""

    suite: Suite
    datasets: dict[str, LoadedDataset]
    gradings: dict[str, Grading]

    @classmethod
    def load(cls, workspace: Workspace, suite: Suite) -> LoadedSuite:
        """Raises DatasetError, GraderSpecError."""
        datasets = {dataset.name: load_prompts(workspace, dataset.source, "prompt") for dataset in suite.datasets}
        return cls(suite, datasets, {grader.name: grader.grading() for grader in suite.graders})

    def semantic(self, **inputs: Any) -> dict[str, Any]:
        """What decides what this suite says: a run of an equal one is the same run."""
        return semantic(
            self.suite,
            datasets={name: loaded.ref.sha256 for name, loaded in self.datasets.items()},
            graders={name: grading.grader.digest() for name, grading in self.gradings.items()},
            **inputs,
        )


@flow(name="evaluation", flow_run_name="{config.title}", **ON_END)
async def evaluation(config: EvaluationFlowConfig) -> dict[str, Any]:
    """Evaluates models on fixed prompts, and compares them in pairs on the same prompts.

    Args:
        config: which models, on which datasets, graded by whom.
    """
    with reraise_termination():
        return await _compared(config)


async def _compared(config: EvaluationFlowConfig) -> dict[str, Any]:
    check_attempts(config.run or config.title)
    config, logger = with_deployment_settings(config), TerminalProgress()
    workspace = _workspace(config)
    loaded = LoadedSuite.load(workspace, config.suite)
    models = await _models(workspace, config.models)
    body = loaded.semantic(models={name: ref.sha256 for name, ref in models.items()})
    config_digest = digest(canonical_json(body))
    provenance = workspace.provenance.model_copy(update={"config_digest": config_digest})
    run = config.run or f"{EVALUATION_KEY_PREFIX}{config_digest[:12]}"
    workspace = workspace.model_copy(update={"run": run, "provenance": provenance})
    opening = create_or_check_run(
        workspace.open_store(), run, semantic=body, other=_other(config), code_version=provenance.code_version
    )
    for warning in opening.warnings:
        logger.note(f"warning: {warning}")
    if (known := read_result(workspace)) is not None:
        logger.note(f"evaluation {run} is finished already; its result is returned as it was")
        return known
    workspace = take_lease(workspace)
    try:
        cells = [cell for base in models.values() for cell in await _evaluate(workspace, base, loaded, logger)]
        table = compare_models(workspace, cells)
    finally:
        await release_run(workspace)
    comparison = read_comparison(workspace, table)
    await put_table("evaluation", score_table(comparison), description=f"Evaluation `{run}`")
    await put_markdown("comparison", comparison_markdown(comparison))
    _tell_regressions(comparison, next(iter(models)))
    return write_result(workspace, {"run": run, "table": table.uri} | comparison.model_dump(mode="json"))


def read_comparison(workspace: Workspace, table: ArtifactRef) -> Comparison:
    """What the table says."""
    return compare(read_table(workspace.open_store(), table).to_pylist())


def _tell_regressions(comparison: Comparison, baseline: str) -> None:
    """An event for each model that is worse than the first one beyond chance, per dataset and grader."""
    for difference in comparison.differences:
        paired = difference.paired
        if difference.first != baseline or paired is None or paired.low is None or paired.high is None:
            continue
        if paired.high < 0:
            name, _, version = difference.second.partition("@")
            emit_eval_regressed(
                name, version, baseline=baseline, dataset=difference.cell, difference=paired.difference,
                low=paired.low, high=paired.high, n=paired.n,
            )  # fmt: skip


def _workspace(config: EvaluationFlowConfig) -> Workspace:
    """Before it is known what is evaluated: nothing is written but datasets."""
    provenance = Provenance(code_version=code_version(), config_digest="0" * 64, seed=config.suite.seed)
    return Workspace(
        store=config.storage.url,
        engine=config.engine,
        run=config.run or EVALUATED,
        seed=config.suite.seed,
        provenance=provenance,
    )


def _other(config: EvaluationFlowConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", include={"engine", "storage", "models"})


async def _models(workspace: Workspace, given: tuple[str, ...]) -> dict[str, ArtifactRef]:
    """name@version -> model. The engine is asked for what is not registered yet."""
    store, found = workspace.open_store(), {}
    for key in given:
        resolved = resolve_model(store, key)
        name, _, version = resolved.partition("@")
        ref = find_model(store, name, version) if version else None
        if ref is None:
            ref = await workspace.connect().import_model(key, provenance=workspace.provenance)
        if registered_key(ref) in found:
            raise ValueError(f"models has {registered_key(ref)} more than once (as {key}); give each model once")
        found[registered_key(ref)] = ref
    return found


async def _evaluate(
    workspace: Workspace, base: ArtifactRef, loaded: LoadedSuite, logger: TerminalProgress
) -> list[Cell]:
    """Every dataset sampled by one model, every sample graded by every grader."""
    # epoch 0, as nobody holds a lease there: samples are a function of their key, and whoever makes them makes the same
    own = workspace.model_copy(update={"run": f"{EVALUATED}/{base.sha256[:32]}", "epoch": 0})
    store, name = own.open_store(), registered_key(base)
    create_or_check_run(
        store, own.run, semantic={"model": base.sha256}, other={"model": name},
        code_version=own.provenance.code_version,
    )  # fmt: skip
    write_result(own, {"model": name})
    cells = []
    try:
        for dataset, data in loaded.datasets.items():
            stage, rollouts = await _sample(own, base, loaded.suite, data)
            for grader, grading in loaded.gradings.items():
                graded = await _grade(own, stage, rollouts, grading)
                cells.append(
                    Cell(model=name, dataset=dataset, grader=grader, rollouts=tuple(rollouts), graded=tuple(graded))
                )
            logger.note(f"{name} is evaluated on {dataset}: {data.rows} prompts, {len(rollouts)} shards")
    finally:
        await release_engine(own)
    return cells


async def _sample(
    own: Workspace, base: ArtifactRef, suite: Suite, data: LoadedDataset
) -> tuple[str, list[ArtifactRef]]:
    """The stage, named by what decides the samples of one dataset, and its shards."""
    model = await Model(registered_key(base)).to_builder(RecipeContext(own)).spawn_train("policy")
    policy = await model.begin_stage(suite.drawn(data.ref.sha256))
    size = suite.prompts_per_shard
    shards = [
        PromptShard(
            base=base,
            dataset=data.ref,
            index=index,
            rows=tuple(range(start, min(start + size, data.rows))),
            completions=suite.samples_per_prompt,
            max_prompt_tokens=suite.max_prompt_tokens,
            truncation=suite.truncation,
        )
        for index, start in enumerate(range(0, data.rows, size))
    ]
    jobs = (generate_rollouts(own, policy, shard, suite.sampling, step=0) for shard in shards)
    return policy.stage, list(await asyncio.gather(*jobs))


async def _grade(own: Workspace, stage: str, rollouts: list[ArtifactRef], grading: Grading) -> list[ArtifactRef]:
    """The grades of those shards: a stage of their own per grader, so that each grader's are kept."""
    grader = grading.grader.digest()[:12]
    jobs = (
        grade_rollouts(own, ref, grading, stage=f"{stage}-{grader}", step=0, shard=shard)
        for shard, ref in enumerate(rollouts)
    )
    return list(await asyncio.gather(*jobs))
