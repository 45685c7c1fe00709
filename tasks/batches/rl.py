"""Builds the batches of reinforcement learning (from graded rollouts) and of SFT (from conversations).

Axes: N segment of a trajectory, a row of the batch · U turn of all trajectories · T trained token of all rows
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue

from engine.errors import BadSpec, PermanentEngineError
from engine.models.images import images_to_rows
from engine.protocol import RowsRequest, TokenSequence
from engine.text.rendering import Renderer
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.records import PolicyRef, StepOldLogprobs
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import SCHEMAS, TableWriter, commit_table, read_rows, read_tables, table_schema
from tasks.batches.advantages import (
    DECOUPLED,
    KL_OF_GAP,
    RewardKL,
    advantages_and_returns,
    reinforce_plus_plus,
    whiten,
)
from tasks.batches.columns import (
    Grades,
    LogprobGap,
    TrainedRows,
    batch_table,
    gap_to_reference,
    read_grades,
    token_values,
    with_token_column,
)
from tasks.batches.teachers import TeacherTerm, teacher_logprobs, with_teacher_top
from tasks.batches.truncation import ANY_LENGTH, LengthPlan, cut
from tasks.committed import commit_once
from tasks.datasets.naming import row_name
from tasks.plans import BatchPlan, ValuePlan
from tasks.reports.clock import timed
from tasks.task_runs import durable_task

ROLLOUT_COLUMNS = (
    "prompt_id", "completion", "token_ids", "loss_mask", "logprobs", "turn_tokens", "images",
)  # fmt: skip
"""The columns of rollouts that a batch needs. `images` exists only for models that take images."""
CHUNK_TOKENS = 1 << 20
"""Tokens that are scored and written together. It bounds this process's memory and the size of one engine call."""


@durable_task("prepare", "batch-{step:06d}")
async def prepare_batch(
    workspace: Workspace,
    policy: PolicyRef,
    rollouts: list[ArtifactRef],
    graded: list[ArtifactRef],
    plan: BatchPlan,
    values: ValuePlan | None = None,
    *,
    step: int,
) -> ArtifactRef:
    """The committed `batch` table of an RL step: one row per segment of a trajectory with a grade.

    With `values`, a value model gives an advantage and a return at every token. The reward of a token is then minus its
    KL penalty (`plan.reward_kl`), plus the turn's grade on the last token of the turn.

    Args:
        graded: the grades of each shard; the rollouts themselves if their environment graded them.

    Raises:
        NotOneGrade: `plan.per_trajectory`, and a trajectory has no grade or several.
    """
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    return await commit_once(
        workspace, key, lambda: _build_batch(workspace, policy, rollouts, graded, plan, values, key, step),
        parent=policy.uri,
    )  # fmt: skip


async def _build_batch(
    workspace: Workspace,
    policy: PolicyRef,
    rollouts: list[ArtifactRef],
    graded: list[ArtifactRef],
    plan: BatchPlan,
    values: ValuePlan | None,
    key: str,
    step: int,
) -> ArtifactRef:
    """Builds the batch of an RL step from graded rollouts and commits it."""
    store = workspace.open_store()
    with timed("storage"):
        grades = read_grades(store, graded, with_parts=plan.advantage_estimator == DECOUPLED)
        apply_rules(store, rollouts, grades, plan)

    # Compute the advantages now, or write zeros and replace them after the rows were scored.
    needs_whole_batch = plan.needs_whole_batch if values is None else values.whiten_advantages or bool(plan.selection)
    advantages_U = np.zeros(len(grades.trajectory_U), np.float32)
    if values is None and not needs_whole_batch:
        advantages_U = grades.advantages(
            plan.advantage_estimator, pass_k=plan.pass_k, per_trajectory=plan.per_trajectory
        )

    # Score the rows chunk by chunk, so that memory does not grow with the number of rollouts.
    # Advantages of a whole batch need all scored tables at once, so these are kept.
    scored: list[tuple[pa.Table, TrainedRows]] = []
    gap, distillation = LogprobGap(), TeacherTerm(plan)
    extra: dict[str, JsonValue] = {}
    with TableWriter("batch") as writer:
        chunk_tokens = CHUNK_TOKENS // (plan.teacher_top_k or 1)
        for rows in trained_chunks(store, rollouts, graded, grades, advantages_U, chunk_tokens):
            table = await score_rows(workspace, policy, rows, plan, step=step)
            gap.add(table)
            if values is not None:
                values_T = await values_before(workspace, values.value, rows)
                table = credited(table, grades, rows, values_T, plan, values)
            if needs_whole_batch:
                scored.append((table, rows._replace(columns={})))
                continue
            table = distillation.add(table)
            with timed("storage"):
                writer.write(table)
        if scored:
            table, extra = with_batch_advantages(scored, grades, plan, values)
            table = distillation.add(table)
            table = with_selection(table, plan, seed=workspace.seed_for("token selection", step))
            with timed("storage"):
                writer.write(table)
        check_batch_rows(writer.rows, grades, step)

        # An environment grades in the rollouts, which are one parent then.
        parents = [policy.uri, *(ref.uri for ref in (*rollouts, *graded))]
        if values is not None:
            parents.insert(1, values.value.uri)
        with timed("storage"):
            extra |= {"prompts": grades.prompts_in_batch(), "logprob_gap": gap.mean, **plan.rules, **distillation.extra}
            return writer.commit(
                store, key, parents=tuple(dict.fromkeys(parents)), provenance=workspace.provenance, extra=extra
            )


def _check_finite(table: pa.Table, policy: PolicyRef, step: int) -> None:
    """Raises PermanentEngineError if the policy's logprobs of its own completions are not finite: a NaN in the loss."""
    for column in ("sampler_logprobs", "old_logprobs"):
        if not np.isfinite(token_values(table, column)).all():
            raise PermanentEngineError(
                f"step {step + 1}: {policy.uri} gives NaN or infinity for the logprobs of its own completions: an "
                "earlier update made its weights overflow. Lower optimizer.lr, and fork the run from a step before that"
            )


def check_batch_rows(rows: int, grades: Grades, step: int) -> None:
    """Raises BadSpec if no row is left to train, unless no completion has a grade: then the batch is empty, and the
    step is skipped."""
    if rows:
        return
    total, finished, graded = grades.counts
    if grades.by_environment:
        raise BadSpec(
            f"step {step + 1} has no graded trajectory: none of the {finished} finished trajectories has a grade; look "
            "at the reasons in the step's rollouts table, and grade episodes that a limit ends in Environment.on_limit"
        )
    if graded:
        raise BadSpec(
            f"step {step + 1} has no completion to train on: of {total} sampled completions {graded} got a grade, and "
            "each of these is empty or left out by a rule of the batch; change rules.mask_truncated, "
            "rules.dynamic_sampling or sampling.max_new_tokens"
        )


def apply_rules(store: ObjectStore, rollouts: list[ArtifactRef], grades: Grades, plan: BatchPlan) -> None:
    """Changes `grades` by the rules that need no logprobs: dropped groups, length penalty, masked truncated answers."""
    # Compare rewards before any penalty, as `count_informative_prompts` does.
    if plan.drop_equal_groups:
        grades.leave_out_equal_groups()
    if not plan.overlong and not plan.mask_truncated:
        return
    turns = pa.concat_tables(read_tables(store, rollouts, ["turn_tokens", "stop_reasons"])).combine_chunks()
    if plan.overlong:
        tokens_U = pc.list_flatten(turns["turn_tokens"]).to_numpy()
        grades.grade_G -= plan.overlong.of(tokens_U)[grades.turn_G]
    if plan.mask_truncated:
        truncated_U = pc.equal(pc.list_flatten(turns["stop_reasons"]), "length").to_numpy()
        grades.left_out_K[grades.trajectory_U[truncated_U]] = True


def with_batch_advantages(
    scored: list[tuple[pa.Table, TrainedRows]], grades: Grades, plan: BatchPlan, values: ValuePlan | None
) -> tuple[pa.Table, dict[str, JsonValue]]:
    """Computes the advantages that depend on the whole batch. Subtracts KL penalties from `grades.grade_G`.

    Returns:
        The batch with its advantages, and what to add to its manifest: `reward_kl`, the mean KL per token in nats, if
        the reward has a KL penalty and there is no value model.
    """
    table = pa.concat_tables([table for table, _ in scored])
    if not table.num_rows:
        return table, {}
    if values is not None:
        if values.whiten_advantages:
            advantages_T = table["advantages"].combine_chunks().flatten().to_numpy()
            table = with_token_column(table, "advantages", whiten(advantages_T))
        return table, {}

    extra: dict[str, JsonValue] = {}
    turns = np.concatenate([rows.turns for _, rows in scored])
    lengths = np.concatenate([rows.turn_tokens for _, rows in scored])
    penalties_T = np.zeros(int(lengths.sum()))
    if plan.reward_kl is not None:
        kl_T = kl_per_token(table, plan.reward_kl, plan.old_logprobs)
        penalties_T = plan.reward_kl.beta * kl_T
        extra = {"reward_kl": float(kl_T.mean())}

    # This estimator credits the penalty of a token to the tokens before it.
    if plan.advantage_estimator == "reinforce_plus_plus":
        rewards = grades.per_turn(grades.grade_G)[turns]
        advantages_T = reinforce_plus_plus(rewards, penalties_T, lengths, gamma=plan.gamma)
        return with_token_column(table, "advantages", advantages_T), extra

    # The others have one advantage per turn: subtract the sum of its penalties from its grade.
    penalties_U = np.zeros(len(grades.trajectory_U))
    penalties_U[turns] = np.add.reduceat(penalties_T, np.cumsum(lengths) - lengths)
    grades.grade_G -= penalties_U[grades.turn_G]
    if plan.advantage_estimator == "reinforce_plus_plus_baseline":
        advantages_T = whiten(np.repeat(grades.centred_advantages()[turns], lengths))
    else:
        advantages_U = grades.advantages(
            plan.advantage_estimator, pass_k=plan.pass_k, per_trajectory=plan.per_trajectory
        )
        advantages_T = np.repeat(advantages_U[turns], lengths)
    return with_token_column(table, "advantages", advantages_T), extra


def with_selection(table: pa.Table, plan: BatchPlan, *, seed: int) -> pa.Table:
    """The batch with the column of the selected tokens, if the plan selects some. It is committed with the batch, so
    that a redo trains the same tokens."""
    if plan.selection is None or not table.num_rows:
        return table
    logprobs_T = token_values(table, _old_column(plan.old_logprobs))
    selected_T = plan.selection.of(logprobs_T, token_values(table, "advantages"), seed=seed)
    return with_token_column(table, "selected", selected_T)


def _old_column(old_logprobs: StepOldLogprobs) -> str:
    return "old_logprobs" if old_logprobs == "trainer" else "sampler_logprobs"


def credited(
    table: pa.Table, grades: Grades, rows: TrainedRows, values_T: np.ndarray, plan: BatchPlan, values: ValuePlan
) -> pa.Table:
    """Adds advantages, returns and old values to the batch, whose rows are whole trajectories.

    GAE runs over the trained tokens of a trajectory in order, across its turns and segments. The environment's tokens
    are skipped: V_{t+1} is the value before the next trained token, in the context in which that token was sampled, and
    0 after the last trained token of the trajectory. Therefore a grade affects every turn at and before it, and `gamma`
    discounts per trained token."""
    # The reward of a turn is on its last trained token, and the KL penalty on every token.
    rewards_T = np.zeros(int(rows.turn_tokens.sum()))
    if plan.reward_kl is not None:
        rewards_T = -plan.reward_kl.beta * kl_per_token(table, plan.reward_kl, plan.old_logprobs)
    rewards_T[np.cumsum(rows.turn_tokens) - 1] += grades.per_turn(grades.grade_G)[rows.turns]

    # Add up the tokens of each trajectory, which may be several rows.
    _, first_turns = np.unique(grades.trajectory_U[rows.turns], return_index=True)
    lengths = np.add.reduceat(rows.turn_tokens, first_turns) if len(first_turns) else rows.turn_tokens
    advantages_T, returns_T = advantages_and_returns(
        rewards_T, values_T, lengths, gamma=values.gamma, lam=values.lam
    )
    if values.returns == "advantages":
        returns_T = advantages_T + values_T
    for name, column_T in (("advantages", advantages_T), ("returns", returns_T), ("old_values", values_T)):
        table = with_token_column(table, name, column_T)
    return table


async def values_before(workspace: Workspace, value: PolicyRef, rows: TrainedRows) -> np.ndarray:
    """(T,) float64: the value before each trained token."""
    with timed("train"):
        request = RowsRequest(value, rows.sources, max_tokens=workspace.max_tokens)
        values_T = await workspace.connect().values_of_rows(request, epoch=workspace.epoch)
    return values_T.astype(np.float64)


def kl_per_token(table: pa.Table, reward_kl: RewardKL, old_logprobs: StepOldLogprobs) -> np.ndarray:
    """(T,) float64: the KL to the reference at each trained token, in nats, by the estimator of `reward_kl`."""
    return KL_OF_GAP[reward_kl.estimator](gap_to_reference(table, _old_column(old_logprobs)))


def has_grades(store: ObjectStore, graded: list[ArtifactRef]) -> bool:
    """Whether a completion of these shards got a grade."""
    tables = read_tables(store, graded, ["status"])
    return any(pc.any(pc.equal(table["status"], "ok")).as_py() for table in tables)


def count_informative_prompts(store: ObjectStore, graded: list[ArtifactRef]) -> int:
    """Number of prompts whose valid rewards differ."""
    return int(read_grades(store, graded).informative_groups().sum())


def trained_chunks(
    store: ObjectStore,
    rollouts: list[ArtifactRef],
    graded: list[ArtifactRef],
    grades: Grades,
    advantages_U: np.ndarray,
    chunk_tokens: int,
) -> Iterator[TrainedRows]:
    """Yields the rows that are trained.

    Each chunk has whole shards, in order, with at least `chunk_tokens` tokens (the last may have fewer). Raises BadSpec
    if a shard and its grades have different rows."""
    tables = read_tables(store, rollouts, ROLLOUT_COLUMNS)
    start, tokens = 0, 0
    chunk: list[TrainedRows] = []
    for ref, grade_ref in zip(rollouts, graded, strict=True):
        # The tables are read ahead; the time waiting for the next one counts as storage.
        with timed("storage"):
            shard = next(tables)
        rows = grades.take_trained_rows(ref, shard, start, advantages_U)
        if rows is None or shard.num_rows != grade_ref.rows:
            raise BadSpec(
                f"the grades in {grade_ref.key} do not match the rows of {ref.key}; expected one grade per row in the "
                "same order: pass each shard's own grades"
            )
        start += shard.num_rows
        chunk.append(rows)
        tokens += len(rows.columns["token_ids"].flatten())
        if tokens >= chunk_tokens:
            yield TrainedRows.concatenate(chunk)
            chunk, tokens = [], 0
    if chunk:
        yield TrainedRows.concatenate(chunk)


async def score_rows(
    workspace: Workspace, policy: PolicyRef, rows: TrainedRows, plan: BatchPlan, *, step: int
) -> pa.Table:
    """Rows of the batch as a table, with the logprobs that the loss needs: the old ones, those of the reference and of
    the teacher. The engine reads the tokens from the committed rollouts.

    Raises PermanentEngineError if logprobs of the policy are NaN or infinite."""

    async def logprobs(scoring_policy: PolicyRef | None) -> np.ndarray | None:
        if scoring_policy is None:
            return None
        if not rows.sources:
            return np.zeros(0)
        with timed("train"):
            request = RowsRequest(scoring_policy, rows.sources, plan.temperature, workspace.max_tokens)
            return await workspace.connect().logprobs_of_rows(request, epoch=workspace.epoch)

    # Score the rows if the loss needs the trainer's or the reference's logprobs.
    old_T = await logprobs(policy if plan.old_logprobs == "trainer" else None)
    reference_T = await logprobs(plan.reference)
    teacher_T = await teacher_logprobs(workspace, rows, plan)
    table = batch_table(
        rows.columns, old_logprobs=old_T, reference_logprobs=reference_T, teacher_logprobs=teacher_T
    )
    _check_finite(table, policy, step)
    return await with_teacher_top(workspace, table, rows, plan)


@durable_task("prepare", "batch-{step:06d}")
async def prepare_conversations(
    workspace: Workspace,
    policy: PolicyRef,
    base: ArtifactRef,
    dataset: ArtifactRef,
    rows: list[int],
    *,
    lengths: LengthPlan = ANY_LENGTH,
    step: int,
) -> ArtifactRef:
    """The committed `batch` table of an SFT step: the tokenised rows of the dataset, with weights on the assistant
    turns. Its manifest counts the conversations that were truncated or dropped.

    Raises:
        SampleTooLong: a conversation is too long and `lengths` does not allow to truncate or drop it.
        BadSpec: no row has a token to train.
    """
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    return await commit_once(
        workspace, key, lambda: _build_sft_batch(workspace, policy, base, dataset, rows, lengths, key, step),
        parent=policy.uri,
    )  # fmt: skip


async def _build_sft_batch(
    workspace: Workspace,
    policy: PolicyRef,
    base: ArtifactRef,
    dataset: ArtifactRef,
    rows: list[int],
    lengths: LengthPlan,
    key: str,
    step: int,
) -> ArtifactRef:
    """Builds the batch of an SFT step and commits it."""
    store = workspace.open_store()
    with timed("storage"):
        records = read_rows(store, dataset, rows)

    # Tokenize the conversations, and apply the limit on their length.
    renderer = renderer_of(store, base)
    limit = lengths.limit(workspace, base)
    table_rows, truncated, dropped = [], 0, 0
    threads = [StringThread.from_json(record["thread"]) for record in records]
    for record, tokenized in zip(records, renderer.tokenize_all(threads), strict=True):
        whole = renderer.sequence(tokenized)
        sequence = cut(whole, lengths, limit, name=partial(row_name, store, dataset, record["index"]))
        if sequence is None:
            dropped += 1
            continue
        truncated += sequence is not whole
        table_rows.append(sequence_row(renderer, sequence, record["id"]))
    if not any(row["loss_mask"].any() for row in table_rows):
        raise BadSpec(
            f"step {step + 1}: none of its {len(rows)} rows, such as {row_name(store, dataset, rows[0])}, has an "
            "assistant turn to train on" + _why_nothing(truncated, dropped)
        )

    schema = table_schema("batch", ["images"] if renderer.tokenizer.images else [])
    # The manifest names only counts above zero.
    lost = {name: count for name, count in (("cut", truncated), ("dropped", dropped)) if count}
    extra: dict[str, JsonValue] = {"prompts": len({row["group"] for row in table_rows}), "logprob_gap": None, **lost}
    with timed("storage"):
        return commit_table(
            store,
            key,
            pa.Table.from_pylist(table_rows, schema=schema),
            kind="batch",
            parents=(policy.uri, dataset.uri),
            provenance=workspace.provenance,
            extra=extra,
        )


def sequence_row(renderer: Renderer, sequence: TokenSequence, group: str, *, completion: int = 0) -> dict[str, Any]:
    """The batch row of a tokenised conversation. If the model takes images, the row has the column `images`, too."""
    row: dict[str, Any] = dict.fromkeys(SCHEMAS["batch"].names)
    row |= {"group": group, "completion": completion}
    row |= {"token_ids": sequence.token_ids, "loss_mask": sequence.loss_mask}
    if renderer.tokenizer.images:
        row["images"] = images_to_rows(sequence.images)
    return row


def _why_nothing(truncated: int, dropped: int) -> str:
    """Ends the error message about a batch without trained tokens with advice."""
    if not truncated and not dropped:
        return "; SFT needs completions"
    return f"; {truncated} were truncated and {dropped} dropped: raise algorithm.max_tokens (max_batch_size)"
