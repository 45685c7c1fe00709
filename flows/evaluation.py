"""The `evaluation` flow: samples k completions of every prompt from every model, grades them and compares the models.
Answers that are stored already are graded and compared in the same way, without an engine.

The completions of one model on one dataset are stored under the model and not under the evaluation, so that a champion
is sampled once on a fixed suite and compared with any number of challengers. All models use the same random seeds.
Stored answers and their grades are kept in the same way, under their table.

    ostinato evaluate --config examples/evaluation.yaml
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.handles import Model
from engine.specs.engine import EngineSpec, HttpEngineSpec
from engine.text.stored_models import context_length_of, tokenizer_folder
from engine.workspace import Workspace
from flows.configs.evaluation import EvaluationFlowConfig, HarnessSuite, StoredAnswers, Suite, semantic
from flows.display.run_log import put_markdown, put_table
from flows.display.terminal import TerminalProgress
from flows.ops.deployment_settings import with_deployment_settings
from flows.ops.run_names import EVALUATION_KEY_PREFIX
from flows.ops.termination import check_attempts, reraise_termination
from flows.recipe import RecipeContext
from flows.runs.checked_flow import checked_flow
from flows.runs.code_version import code_version
from flows.runs.events import emit_eval_regressed
from flows.runs.input_checks import check_inputs, commits_entry
from flows.runs.recorded_config import FLOW
from flows.runs.session import (
    import_model,
    read_result,
    release_engine,
    release_run,
    take_lease,
    with_hub_commits,
    write_result,
)
from storage.chain.listing import EVALUATED
from storage.chain.records import PolicyRef, base_model_of
from storage.chain.run_record import create_or_check_run
from storage.registry.decisions import resolve_model
from storage.registry.models import find_model, registered_key
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, read_manifest
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from storage.temporary import process_folder
from tasks.batches.iteration import async_map
from tasks.compare import compare_models
from tasks.datasets.difficulty import add_column, check_new_column
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.spec import RowsDataset
from tasks.evaluation.harness import HarnessModel, HarnessScore, check_harness, run_harness, stored_scores
from tasks.evaluation.model_comparison import (
    Cell,
    Comparison,
    compare,
    comparison_markdown,
    sample_answers,
    score_table,
)
from tasks.load import load_answers, load_prompts
from tasks.plans import Grading, PromptShard
from tasks.reports.table_cells import table_cells
from tasks.sampling.completions import generate_rollouts
from tasks.sampling.grading import grade_rollouts
from tasks.sampling.shards import SHARDS_AT_ONCE
from tasks.sampling.stored_answers import answers_stage_name


@dataclass(frozen=True)
class LoadedSuite:
    """A suite whose prompts are in the store, and whose graders can be imported."""

    suite: Suite
    datasets: dict[str, LoadedDataset]
    gradings: dict[str, Grading]

    @classmethod
    def load(cls, workspace: Workspace, suite: Suite) -> LoadedSuite:
        """Loads the prompts into the store, and the graders. Raises DatasetError, GraderSpecError."""
        # the suite gets the full versions of registered datasets, so that it is the same wherever it is used next
        store = workspace.open_store()
        resolved = []
        for dataset in suite.datasets:
            source = dataset.source.resolved(store, "prompt", commits=workspace.hub)
            resolved.append(dataset.model_copy(update={"source": source}))
        suite = suite.model_copy(update={"datasets": tuple(resolved)})
        datasets = {dataset.name: load_prompts(workspace, dataset.source, "prompt") for dataset in suite.datasets}
        keep = {"keep_answers": suite.majority_vote}
        gradings = {grader.name: grader.grading().model_copy(update=keep) for grader in suite.graders}
        return cls(suite, datasets, gradings)

    def semantic(self, **inputs: Any) -> dict[str, Any]:
        """What decides the result of an evaluation, besides `inputs`. Equal values mean the same evaluation run."""
        return semantic(
            self.suite,
            datasets={name: loaded.ref.sha256 for name, loaded in self.datasets.items()},
            graders={name: grading.grader.digest() for name, grading in self.gradings.items()},
            **inputs,
        )


@checked_flow()
async def evaluation(config: EvaluationFlowConfig) -> dict[str, Any]:
    """Evaluates models on fixed prompts, and compares them in pairs on the same prompts.

    Args:
        config: the models, and the datasets and graders of the suite.
    """
    with reraise_termination():
        if isinstance(config.suite, HarnessSuite):
            return await _run_harness(config, config.suite)
        return await _run_evaluation(config, config.suite)


async def _run_harness(config: EvaluationFlowConfig, suite: HarnessSuite) -> dict[str, Any]:
    """Evaluates the models on tasks of the lm-evaluation-harness: of an engine that is a server by its OpenAI endpoint,
    which also has the policies of runs, and else by the files of the registered models."""
    check_harness()
    check_attempts(config.run or config.title)
    config, logger = with_deployment_settings(config), TerminalProgress()
    workspace, engine = _workspace(config), config.engine
    store = workspace.open_store()
    models: Mapping[str, ArtifactRef | PolicyRef]
    if isinstance(engine, HttpEngineSpec):
        models = await _find_served(workspace, config.models)
    else:
        workspace = with_hub_commits(workspace, config)
        check_inputs(config, store, workspace.hub)
        models = await _load_models(workspace, config.models)
    inputs = {name: ref.state if isinstance(ref, PolicyRef) else ref.sha256 for name, ref in models.items()}
    body = {"evaluation": suite.model_dump(mode="json"), "inputs": {"models": inputs}}
    config_digest = digest(canonical_json(body))
    run = config.run or f"{EVALUATION_KEY_PREFIX}{config_digest[:12]}"
    provenance = workspace.provenance.model_copy(update={"config_digest": config_digest})
    workspace = workspace.model_copy(update={"run": run, "provenance": provenance})
    create_or_check_run(
        store, run, semantic=body, other=_other(config) | commits_entry(workspace.hub),
        code_version=provenance.code_version,
    )  # fmt: skip
    known = read_result(workspace)
    if known is not None:
        logger.note(f"evaluation {run} is finished already; its result is returned as it was")
        return known
    scores: list[HarnessScore] = []
    for name, ref in models.items():

        async def evaluate(name: str = name, ref: ArtifactRef | PolicyRef = ref) -> list[HarnessScore]:
            logger.note(f"evaluating {name} by lm_eval on {', '.join(suite.tasks)} …")
            return await _score_by_harness(engine, store, suite, name, ref)

        scores += await stored_scores(workspace, name, evaluate, parent=ref.uri)
    rows = [score.model_dump(mode="json") for score in scores]
    for score in scores:
        error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
        value = f"{score.metric} {score.value:.4f}{error}"
        logger.note(f"{score.model} on {score.task}: {value}, {score.questions} questions")
    await put_table("evaluation", [table_cells(row) for row in rows], description=f"Evaluation `{run}` by lm_eval")
    return write_result(workspace, {"run": run, "harness": rows})


async def _score_by_harness(
    engine: EngineSpec, store: ObjectStore, suite: HarnessSuite, name: str, ref: ArtifactRef | PolicyRef
) -> list[HarnessScore]:
    """The scores of one model, by the endpoint of an engine that is a server, or else by the model's files."""
    if isinstance(engine, HttpEngineSpec):
        base = ref if isinstance(ref, ArtifactRef) else base_model_of(store, ref)
        with tokenizer_folder(store, base) as folder:
            served = HarnessModel(
                name=name,
                endpoint=f"{engine.url.rstrip('/')}/v1",
                tokenizer=str(folder),
                max_length=context_length_of(store, base),
                token_env=engine.token_env,
            )
            return await run_harness(served, suite)
    assert isinstance(ref, ArtifactRef)
    with tempfile.TemporaryDirectory(prefix="harness-model-", dir=process_folder()) as folder:
        files = materialise_files(store, ref.key, Path(folder))
        return await run_harness(HarnessModel(name=name, folder=str(files["config.json"].parent)), suite)


async def _find_served(workspace: Workspace, names: Sequence[str]) -> dict[str, ArtifactRef | PolicyRef]:
    """What an engine that is a server would answer with, by the full name: `name@version`, `run/stage/model@step`. A
    name such as `name@champion` may have another meaning at the next request. Raises ValueError for an unknown name."""
    # imported here, since the code of the server is needed for these names only
    from engine.http.openai.models import ApiError
    from engine.http.openai.policies import PolicyResolver

    resolver = PolicyResolver(workspace.connect(), workspace.open_store())
    models: dict[str, ArtifactRef | PolicyRef] = {}
    for name in names:
        try:
            ref = await asyncio.to_thread(resolver.look_up, name)
        except ApiError as error:
            raise ValueError(f"models has {name}: {error}") from error
        full_name = registered_key(ref) if isinstance(ref, ArtifactRef) else ref.full_name
        if full_name in models:
            raise ValueError(f"models has {full_name} more than once (as {name}); give each model once")
        models[full_name] = ref
    return models


async def _run_evaluation(config: EvaluationFlowConfig, suite: Suite) -> dict[str, Any]:
    check_attempts(config.run or config.title)
    config, logger = with_deployment_settings(config), TerminalProgress()
    workspace = with_hub_commits(_workspace(config), config)
    check_inputs(config, workspace.open_store(), workspace.hub)
    # load the inputs, whose digest identifies the run
    loaded = LoadedSuite.load(workspace, suite)
    models = await _load_models(workspace, config.models)
    tables = [_load_table(workspace, answers) for answers in config.answers]
    inputs: dict[str, Any] = {"models": {name: ref.sha256 for name, ref in models.items()}}
    if tables:
        columns = [answers.model_dump(mode="json", exclude={"source"}) for answers in config.answers]
        inputs["answers"] = [
            fields | {"table": table.ref.sha256} for fields, table in zip(columns, tables, strict=True)
        ]
    body = loaded.semantic(**inputs)
    config_digest = digest(canonical_json(body))
    provenance = workspace.provenance.model_copy(update={"config_digest": config_digest})
    run = config.run or f"{EVALUATION_KEY_PREFIX}{config_digest[:12]}"
    # open the run; a finished one returns its result
    workspace = workspace.model_copy(update={"run": run, "provenance": provenance})
    opening = create_or_check_run(
        workspace.open_store(), run, semantic=body, other=_other(config) | commits_entry(workspace.hub),
        code_version=provenance.code_version,
    )  # fmt: skip
    for warning in opening.warnings:
        logger.note(f"warning: {warning}")
    known = read_result(workspace)
    if known is not None:
        logger.note(f"evaluation {run} is finished already; its result is returned as it was")
        return known
    # sample and grade; the lease is released even if a model fails
    workspace = take_lease(workspace)
    try:
        cells: list[Cell] = []
        for base in models.values():
            cells += await _evaluate(workspace, base, loaded, logger)
        for answers, data in zip(config.answers, tables, strict=True):
            cells += await _grade_answers(workspace, answers, data, loaded, logger)
        table = compare_models(workspace, cells, loaded.suite.scores)
    finally:
        # stored answers need no engine, so none may be there
        await release_run(workspace, used_engine=bool(models))
    # publish the comparison
    comparison = read_comparison(workspace, table)
    for score in comparison.scores:
        mean = score.why_no_mean or f"mean {score.mean:.3f}"
        logger.note(f"{score.model} on {score.dataset}, graded by {score.grader}: {mean}, {score.prompts} prompts")
    await put_table("evaluation", score_table(comparison), description=f"Evaluation `{run}`")
    await put_markdown("comparison", comparison_markdown(comparison))
    samples = [sample.model_dump(mode="json") for sample in sample_answers(workspace.open_store(), cells)]
    cells_of_page = [table_cells(sample) for sample in samples]
    await put_table("samples", cells_of_page, description="Answers to the first prompts")
    _announce_regressions(comparison, comparison.scores[0].model)
    result = {"run": run, "table": table.uri} | comparison.model_dump(mode="json") | {"samples": samples}
    return write_result(workspace, result)


async def grade_difficulty(config: EvaluationFlowConfig, column: str) -> dict[str, Any]:
    """Evaluates the one model of the config on its one dataset, and commits the dataset with the pass rate of each
    prompt as `column`. Returns the key of the new version and its counts. Raises DatasetError if the dataset has the
    column already."""
    config = with_deployment_settings(config)
    workspace = _workspace(config)
    store = workspace.open_store()
    suite = config.suite
    assert isinstance(suite, Suite), "a measurement of pass rates has prompts and a grader"
    (dataset,) = (measured.source for measured in suite.datasets)
    data = load_dataset(store, dataset, provenance=workspace.provenance)
    # before the prompts are sampled
    check_new_column(store, data.ref, column)
    result = await evaluation(config)
    table = read_manifest(store, result["table"].partition("#")[0]).ref
    # the pass rate is the score pass@1
    (score,) = suite.scores.names(suite.graders[0].name)
    rates = {}
    for row in read_table(store, table).to_pylist():
        if row["grader"] == score:
            rates[row["prompt_index"]] = row["reward"]
    ref = add_column(store, data.ref, column, rates, measured_in=table, provenance=workspace.provenance)
    values = [rates.get(row) for row in range(data.rows)]
    return {
        "dataset": "@".join(keys.dataset_of(ref.key)), "rows": data.rows, "ungraded": values.count(None),
        "solved": values.count(1.0), "unsolved": values.count(0.0),
    }  # fmt: skip


def read_comparison(workspace: Workspace, table: ArtifactRef) -> Comparison:
    """The comparison of the models in a table of grades."""
    return compare(read_table(workspace.open_store(), table).to_pylist())


def _announce_regressions(comparison: Comparison, baseline: str) -> None:
    """Sends an event for each dataset and grader on which a model is significantly worse than the baseline."""
    for difference in comparison.differences:
        paired = difference.paired
        # without an interval the difference may be due to chance
        if difference.first != baseline or paired is None or paired.low is None or paired.high is None:
            continue
        # the whole 95 % confidence interval is below zero
        if paired.high < 0:
            name, _, version = difference.second.partition("@")
            emit_eval_regressed(
                name, version, baseline=baseline, dataset=difference.cell, difference=paired.difference,
                low=paired.low, high=paired.high, n=paired.n,
            )  # fmt: skip


def _workspace(config: EvaluationFlowConfig) -> Workspace:
    """The workspace in which inputs are loaded. Only datasets and models are written in it."""
    # the config's digest depends on the inputs and is set when they are loaded
    provenance = Provenance(code_version=code_version(), config_digest="0" * 64, seed=config.suite.seed)
    return Workspace(
        store=config.storage.url,
        engine=config.engine,
        run=config.run or EVALUATED,
        seed=config.suite.seed,
        provenance=provenance,
    )


def _other(config: EvaluationFlowConfig) -> dict[str, Any]:
    """Settings that do not change the result, and what names the inputs, so that the config can be read back."""
    named = config.model_dump(mode="json", include={"engine", "storage", "models", "answers", "suite"})
    return named | {FLOW: "evaluation"}


async def _load_models(workspace: Workspace, model_keys: tuple[str, ...]) -> dict[str, ArtifactRef]:
    """Registered models by `name@version`. The engine imports those that are not registered yet."""
    store = workspace.open_store()
    models: dict[str, ArtifactRef] = {}
    for key in model_keys:
        resolved = resolve_model(store, key)
        name, _, version = resolved.partition("@")
        ref = find_model(store, name, version) if version else None
        if ref is None:
            ref = await import_model(workspace, key)
        # two keys, such as name@champion and name@version, may be the same model
        registered = registered_key(ref)
        if registered in models:
            raise ValueError(f"models has {registered} more than once (as {key}); give each model once")
        models[registered] = ref
    return models


def _load_table(workspace: Workspace, answers: StoredAnswers) -> LoadedDataset:
    """Loads a table of stored answers into the store. A column of answers is read as metadata of the prompts."""
    source = answers.source
    if answers.column is None:
        return load_prompts(workspace, source, "completion")
    if isinstance(source, RowsDataset):
        metadata_columns = (*source.metadata_columns, answers.column)
        source = source.model_copy(update={"metadata_columns": tuple(dict.fromkeys(metadata_columns))})
    return load_prompts(workspace, source, "prompt")


async def _grade_answers(
    workspace: Workspace, answers: StoredAnswers, data: LoadedDataset, loaded: LoadedSuite, logger: TerminalProgress
) -> list[Cell]:
    """Grades a table of stored answers with every grader."""
    table_workspace = workspace.model_copy(update={"run": f"{EVALUATED}/{data.ref.sha256[:32]}", "epoch": 0})
    create_or_check_run(
        table_workspace.open_store(), table_workspace.run, semantic={"answers": data.ref.sha256},
        other={"answers": data.ref.key}, code_version=table_workspace.provenance.code_version,
    )  # fmt: skip
    write_result(table_workspace, {"answers": data.ref.key})
    logger.note(f"grading {answers.name} on {answers.dataset}: {data.rows} rows …")
    rows_per_shard = loaded.suite.prompts_per_shard
    shards = load_answers(table_workspace, data, answers.column, rows_per_shard=rows_per_shard)
    stage, cells = answers_stage_name(data, answers.column, rows_per_shard), []
    for grader, grading in loaded.gradings.items():
        graded = await _grade(table_workspace, stage, shards, grading)
        names = {"model": answers.name, "dataset": answers.dataset, "grader": grader}
        cells.append(Cell(**names, rollouts=tuple(shards), graded=tuple(graded)))
    return cells


async def _evaluate(
    workspace: Workspace, base: ArtifactRef, loaded: LoadedSuite, logger: TerminalProgress
) -> list[Cell]:
    """Samples every dataset from one model, and grades every completion with every grader."""
    # No lease is taken on the model's run, so its epoch is 0. Two evaluations that sample the same model at once write
    # equal completions, because completions are a function of their key.
    model_workspace = workspace.model_copy(update={"run": f"{EVALUATED}/{base.sha256[:32]}", "epoch": 0})
    store, name = model_workspace.open_store(), registered_key(base)
    create_or_check_run(
        store, model_workspace.run, semantic={"model": base.sha256}, other={"model": name},
        code_version=model_workspace.provenance.code_version,
    )  # fmt: skip
    write_result(model_workspace, {"model": name})
    cells = []
    try:
        for dataset, data in loaded.datasets.items():
            logger.note(f"evaluating {name} on {dataset}: {data.rows} prompts …")
            # the completions are sampled once and shared by all graders
            stage, rollouts = await _sample(model_workspace, base, loaded.suite, data)
            for grader, grading in loaded.gradings.items():
                graded = await _grade(model_workspace, stage, rollouts, grading)
                cells.append(
                    Cell(model=name, dataset=dataset, grader=grader, rollouts=tuple(rollouts), graded=tuple(graded))
                )
    finally:
        await release_engine(model_workspace)
    return cells


async def _sample(
    workspace: Workspace, base: ArtifactRef, suite: Suite, data: LoadedDataset
) -> tuple[str, list[ArtifactRef]]:
    """Samples one dataset. Returns the name of the stage, a digest of what decides the completions, and its shards."""
    model = await Model(registered_key(base)).to_builder(RecipeContext(workspace)).spawn_train("policy")
    policy = await model.begin_stage(suite.drawn(data.ref.sha256))
    # one task run per shard of prompts
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

    # the shards are sampled concurrently
    def sample(shard: PromptShard) -> Awaitable[ArtifactRef]:
        return generate_rollouts(workspace, policy, shard, suite.sampling, step=0)

    return policy.stage, await async_map(sample, shards, at_once=SHARDS_AT_ONCE)


async def _grade(workspace: Workspace, stage: str, rollouts: list[ArtifactRef], grading: Grading) -> list[ArtifactRef]:
    """Grades the shards of a stage. The grades of each grader are kept in a separate stage."""
    grader = grading.grader.digest()[:12] + ("-answers" if grading.keep_answers else "")

    def grade(shard: tuple[int, ArtifactRef]) -> Awaitable[ArtifactRef]:
        index, ref = shard
        return grade_rollouts(workspace, ref, grading, stage=f"{stage}-{grader}", step=0, shard=index)

    return await async_map(grade, enumerate(rollouts), at_once=SHARDS_AT_ONCE)
