"""Compares models by their rewards per prompt: means, differences and confidence intervals.

The reward of a prompt is the mean over its graded completions. Intervals count prompts and not completions, because the
completions of one prompt are not independent samples of the task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from statistics import fmean
from typing import Any

from engine.text.threads import StringThread
from storage.chain.listing import is_auxiliary
from storage.errors import ObjectNotFound
from storage.serialization import Frozen
from storage.store import keys
from storage.store.artifacts import ArtifactRef, map_files
from storage.store.index import run_entries
from storage.store.objects import ObjectInfo, ObjectStore, read_json
from storage.store.tables import read_table
from tasks.evaluation.harness import HarnessScore
from tasks.evaluation.several_answers import PASS_AT, AnswerScores, GradedAnswer
from tasks.evaluation.statistics import PairedDifference, mean_interval, paired_difference

SAMPLE_PROMPTS = 3
"""Number of prompts of each dataset whose answers are shown with a comparison."""
SAMPLE_CHARACTERS = 1000
"""Characters of a prompt, an answer or a reason that are shown."""
RESULTS_CACHED = 10_000
"""Runs whose results are kept in memory."""
NORMAL_QUANTILE = 1.96
"""Standard errors on each side of a mean that a 95 % interval reaches."""


class Cell(Frozen):
    """The rollouts of one model on one dataset, and one grader's grades of them."""

    model: str
    """name@version, or the name of the system that gave stored answers."""
    dataset: str
    grader: str
    rollouts: tuple[ArtifactRef, ...]
    """The sampled completions, or the stored answers."""
    graded: tuple[ArtifactRef, ...]


class Score(Frozen):
    """The mean reward of one model on one dataset by one grader, over prompts, with its 95 % interval."""

    model: str
    dataset: str
    grader: str
    mean: float | None
    """None if no completion could be graded."""
    low: float | None
    high: float | None
    prompts: int
    """Number of prompts with a grade."""
    completions: int
    masked: int
    """Completions without a grade."""

    @property
    def why_no_mean(self) -> str:
        """Why there is no mean. Empty if there is one."""
        if self.mean is not None:
            return ""
        _, is_pass_at_k, k = self.grader.partition(PASS_AT)
        return f"no prompt has {k} graded answers" if is_pass_at_k else "no grade"


class Difference(Frozen):
    """Reward of `second` minus reward of `first`, over the prompts for which both have a grade."""

    dataset: str
    grader: str
    first: str
    second: str
    paired: PairedDifference | None
    """In it, `before` is the first model and `after` the second. None: no prompt has a grade for both."""

    @property
    def cell(self) -> str:
        return f"{self.dataset}/{self.grader}"

    @property
    def verdict(self) -> str:
        if self.paired is None:
            return "no prompt in common"
        if not self.paired.clear:
            return "within chance"
        return "higher, beyond chance" if self.paired.difference > 0 else "lower, beyond chance"


class Comparison(Frozen):
    """All scores of an evaluation, and the differences between its models."""

    scores: tuple[Score, ...]
    differences: tuple[Difference, ...]
    """One per pair of models, in the order of the models."""

    def between(self, first: str, second: str) -> list[Difference]:
        """The differences between two models, one per dataset and grader."""
        models = (first, second)
        return [difference for difference in self.differences if (difference.first, difference.second) == models]


class SampleAnswer(Frozen):
    """An answer of a model to a prompt, with one grader's grade."""

    dataset: str
    prompt: str
    """The last turn of the prompt. The texts are cut after `SAMPLE_CHARACTERS`."""
    model: str
    answer: str
    grader: str
    reward: float | None
    """None if the grade failed."""
    reason: str | None
    """Why the answer has this grade, or none, in the grader's words."""


class StoredEvaluation(Frozen):
    """The result of a finished run of the flow `evaluation`."""

    run: str
    comparison: Comparison
    samples: tuple[SampleAnswer, ...] = ()


def find_evaluations(store: ObjectStore, model: str) -> list[StoredEvaluation]:
    """Returns the finished evaluations of a model, `name@version`. It reads the result of every run once in this
    process."""
    entries = {run: entry for run, entry in sorted(run_entries(store).items()) if not is_auxiliary(run)}
    evaluations = map_files(lambda run: stored_evaluation(store, run, entries[run]), list(entries))
    return [
        evaluation for evaluation in evaluations
        if evaluation is not None and any(score.model == model for score in evaluation.comparison.scores)
    ]  # fmt: skip


def stored_evaluation(store: ObjectStore, run: str, entry: ObjectInfo) -> StoredEvaluation | None:
    """Returns the result of a finished evaluation. None: the run has not finished, or is no evaluation.

    Args:
        entry: That of the run in the index. A run that was deleted and created again has another one, so that its
            result is read again.
    """
    try:
        return _read_evaluation(store, run, entry)
    except ObjectNotFound:
        return None


@lru_cache(maxsize=RESULTS_CACHED)
def _read_evaluation(store: ObjectStore, run: str, _entry: ObjectInfo) -> StoredEvaluation | None:
    """Reads the result of a run, which never changes if it is that of an evaluation. Raises ObjectNotFound, which is
    not cached."""
    result = read_json(store, keys.result_json(run))
    if result is None:
        raise ObjectNotFound(f"run {run!r} has no result yet")
    if "harness" in result:
        scores = tuple(_harness_score(HarnessScore.model_validate(row)) for row in result["harness"])
        return StoredEvaluation(run=run, comparison=Comparison(scores=scores, differences=()))
    if not Comparison.model_fields.keys() <= result.keys():
        return None
    comparison = {name: result[name] for name in Comparison.model_fields}
    return StoredEvaluation.model_validate(
        {"run": run, "comparison": comparison, "samples": result.get("samples", [])}
    )


def _harness_score(score: HarnessScore) -> Score:
    """The value of a metric of a task of lm_eval, with an interval of its standard error."""
    half = None if score.stderr is None else NORMAL_QUANTILE * score.stderr
    low, high = (None, None) if half is None else (score.value - half, score.value + half)
    return Score(
        model=score.model, dataset=score.task, grader=score.metric, mean=score.value, low=low, high=high,
        prompts=score.questions, completions=score.questions, masked=0,
    )  # fmt: skip


def sample_answers(store: ObjectStore, cells: Iterable[Cell], prompts: int = SAMPLE_PROMPTS) -> list[SampleAnswer]:
    """The first answer of each model to the first prompts of each dataset, with its grades."""
    samples = []
    for cell in cells:
        # both tables have the same rows; the first shard has the first prompts
        answers = read_table(store, cell.rollouts[0], ["prompt_index", "thread", "text"]).to_pylist()
        grades = read_table(store, cell.graded[0], ["reward", "reason"]).to_pylist()
        shown: set[int] = set()
        for answer, grade in zip(answers, grades, strict=True):
            if answer["prompt_index"] in shown or len(shown) == prompts:
                continue
            shown.add(answer["prompt_index"])
            texts = {"prompt": StringThread.from_json(answer["thread"]).last_content(), "answer": answer["text"]}
            texts = {name: text[:SAMPLE_CHARACTERS] for name, text in texts.items()}
            names = {"dataset": cell.dataset, "model": cell.model, "grader": cell.grader}
            reason = grade["reason"] and grade["reason"][:SAMPLE_CHARACTERS]
            samples.append(SampleAnswer(**names, **texts, reward=grade["reward"], reason=reason))
    return samples


def prompt_rows(
    store: ObjectStore, cells: Iterable[Cell], scores: AnswerScores = AnswerScores()
) -> list[dict[str, Any]]:
    """The rows of a `comparison` table: one per model, dataset, grader and prompt, and one per score of several
    answers."""
    rows: list[dict[str, Any]] = []
    for cell in cells:
        # Completions without a grade count as completions, and not in the scores.
        for (index, prompt), completions in _answers_by_prompt(store, cell, scores).items():
            graded = [answer for answer in completions if answer is not None]
            mean = fmean(answer.reward for answer in graded) if graded else None
            names = [cell.grader, *scores.names(cell.grader)]
            for name, value in zip(names, [mean, *scores.values(graded)], strict=True):
                row: dict[str, Any] = {"model": cell.model, "dataset": cell.dataset, "grader": name}
                row |= {"prompt_index": index, "prompt_id": prompt, "reward": value}
                rows.append(row | {"graded": len(graded), "completions": len(completions)})
    return rows


def _answers_by_prompt(
    store: ObjectStore, cell: Cell, scores: AnswerScores
) -> dict[tuple[int, str], list[GradedAnswer | None]]:
    """The answers of a cell by (index, id) of their prompt. None: an answer without a grade. A prompt that is twice in
    the dataset has two indices."""
    answers_of: dict[tuple[int, str], list[GradedAnswer | None]] = defaultdict(list)
    for graded, rollouts in zip(cell.graded, cell.rollouts, strict=True):
        grades = read_table(store, graded, ["prompt_index", "prompt_id", "reward", "answer"]).to_pylist()
        # A graded table has the order of its rollouts. Only a vote needs their texts.
        texts = [""] * len(grades)
        if scores.majority_vote:
            texts = read_table(store, rollouts, ["text"]).column("text").to_pylist()
        for grade, text in zip(grades, texts, strict=True):
            reward = grade["reward"]
            answer = None if reward is None else GradedAnswer(reward, grade.get("answer"), text)
            answers_of[grade["prompt_index"], grade["prompt_id"]].append(answer)
    return answers_of


def compare(rows: Sequence[dict[str, Any]]) -> Comparison:
    """The scores and paired differences of a `comparison` table. Models are in the order of their first row."""
    # Group the rows: (dataset, grader) -> model -> rows.
    by_cell: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_cell[row["dataset"], row["grader"]][row["model"]].append(row)

    scores, differences = [], []
    for (dataset, grader), models in by_cell.items():
        # Score each model on the prompts for which it has a grade.
        rewards_of_model: dict[str, dict[str, float]] = {}
        for model, model_rows in models.items():
            graded_rows = [row for row in model_rows if row["reward"] is not None]
            scores.append(_score(model, dataset, grader, model_rows))
            rewards_of_model[model] = {row["prompt_id"]: row["reward"] for row in graded_rows}
        # Compare each pair of models on the prompts that both have in common.
        for first, second in combinations(models, 2):
            paired = _paired(rewards_of_model[first], rewards_of_model[second])
            names = {"dataset": dataset, "grader": grader, "first": first, "second": second}
            differences.append(Difference(**names, paired=paired))
    return Comparison(scores=tuple(scores), differences=tuple(differences))


def _paired(first: dict[str, float], second: dict[str, float]) -> PairedDifference | None:
    """The difference of two models, given their rewards by prompt; None if they have no prompt in common."""
    common = [prompt for prompt in first if prompt in second]
    if not common:
        return None
    first_rewards = [first[prompt] for prompt in common]
    second_rewards = [second[prompt] for prompt in common]
    return paired_difference(first_rewards, second_rewards)


def _score(model: str, dataset: str, grader: str, rows: Sequence[dict[str, Any]]) -> Score:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    mean = mean_interval(rewards) if rewards else None
    completions = sum(row["completions"] for row in rows)
    low, high = (mean.low, mean.high) if mean else (None, None)
    return Score(
        model=model,
        dataset=dataset,
        grader=grader,
        mean=mean.mean if mean else None,
        low=low,
        high=high,
        prompts=len(rewards),
        completions=completions,
        masked=completions - sum(row["graded"] for row in rows),
    )


def score_table(comparison: Comparison) -> list[dict[str, Any]]:
    """The scores as rows of a table artifact."""
    rows: list[dict[str, Any]] = []
    for score in comparison.scores:
        row = {
            "dataset": score.dataset,
            "grader": score.grader,
            "model": score.model,
            "mean": None if score.mean is None else round(score.mean, 4),
            "95 % interval": score.why_no_mean or _interval(score.low, score.high),
            "prompts": score.prompts,
            "completions": score.completions,
            "without a grade": score.masked,
        }
        rows.append(row)
    return rows


def score_changes(comparison: Comparison) -> list[dict[str, Any]]:
    """`score_table` with the change of each model from the first one, on the prompts that both have a grade for."""
    changes: dict[tuple[str, str, str], str] = {}
    for difference in comparison.differences:
        paired = difference.paired
        if difference.first == comparison.scores[0].model and paired is not None:
            change = f"{paired.difference:+.3f} ({_interval(paired.low, paired.high, sign='+')}): {difference.verdict}"
            changes[difference.dataset, difference.grader, difference.second] = change
    rows = score_table(comparison)
    for row in rows:
        row["change"] = changes.get((row["dataset"], row["grader"], row["model"]), "")
    return rows


def comparison_markdown(comparison: Comparison) -> str:
    """Two Markdown tables: the scores of the models, and the differences between models on the same prompts."""
    # The scores.
    lines = ["| dataset | grader | model | mean | 95 % interval | prompts |", "|-|-|-|-:|-|-:|"]
    for row in score_table(comparison):
        mean = "–" if row["mean"] is None else f"{row['mean']:.3f}"
        cells = (row["dataset"], row["grader"], f"`{row['model']}`", mean, row["95 % interval"], row["prompts"])
        lines.append(_line(cells))
    # The differences, which need at least two models.
    if comparison.differences:
        lines += ["", "| dataset | grader | from | to | change | 95 % interval | prompts | |", "|-|-|-|-|-:|-|-:|-|"]
    for difference in comparison.differences:
        change, interval, prompts = "–", "–", 0
        paired = difference.paired
        if paired is not None:
            change, interval = f"{paired.difference:+.3f}", _interval(paired.low, paired.high, sign="+")
            prompts = paired.n
        models = (f"`{difference.first}`", f"`{difference.second}`")
        cell = (difference.dataset, difference.grader, *models, change, interval, prompts, difference.verdict)
        lines.append(_line(cell))
    if comparison.differences:
        lines += ["", "Changes are means over the prompts for which both models have a grade."]
    return "\n".join(lines) + "\n"


def comparison_sentences(comparison: Comparison) -> str:
    """The differences as a list of sentences, for places where a table is too wide."""
    return "\n".join(f"- {_sentence(difference)}" for difference in comparison.differences) + "\n"


def _sentence(difference: Difference) -> str:
    """One difference as a sentence. Its means are over the prompts for which both models have a grade."""
    cell = f"**{difference.dataset}**, graded by **{difference.grader}**"
    first, second, paired = difference.first, difference.second, difference.paired
    if paired is None:
        return f"{cell}: `{first}` and `{second}` have {difference.verdict}."
    models = f"`{first}` {paired.before_mean:.3f}, `{second}` {paired.after_mean:.3f}"
    interval = _interval(paired.low, paired.high, sign="+")
    change = f"change {paired.difference:+.3f} (95 % interval {interval})"
    return f"{cell}: {models}, {change} on {paired.n} prompts: {difference.verdict}."


def _line(cells: Iterable[Any]) -> str:
    escaped = [str(cell).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _interval(low: float | None, high: float | None, sign: str = "") -> str:
    return "–" if low is None or high is None else f"{low:{sign}.3f} to {high:{sign}.3f}"
