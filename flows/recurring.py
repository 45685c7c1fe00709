"""Is there new data since the champion? Then train a challenger, evaluate both, judge, and promote or hold.

Every decision has a key made of what it rests on: the data, the champion, the training, the suite, the gate. So a flow
run that is retried goes on where it stood and decides once, a schedule that fires twice decides once, and what was
decided (also: held back, or rolled back by a person) is not tried again until something of that changes.

    ostinato recurring --config examples/recurring.yaml
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from prefect import flow

from engine.workspace import Workspace
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.recurring import RecurringConfig
from flows.display.artifacts import put_markdown
from flows.display.terminal import TerminalProgress
from flows.evaluation import LoadedSuite, evaluation
from flows.ops.attempts import check_attempts
from flows.ops.deployment_settings import with_deployment_settings
from flows.ops.hooks import ON_END
from flows.ops.termination import reraise_termination
from flows.promotion.approval import request_approval
from flows.promotion.gate import GateVerdict, judge
from flows.promotion.model_card import commit_card, find_card
from flows.runs.events import announce_promotion
from flows.runs.session import workspace_of
from flows.training.child_runs import flow_of, inputs_of
from storage.errors import AliasMoved
from storage.inspect.lineage import training_datasets
from storage.registry.decisions import (
    Action,
    AliasEntry,
    Decision,
    apply_decision,
    champion_of,
    commit_decision,
    find_decision,
)
from storage.serialization import canonical_json, digest
from tasks.datasets.load import LoadedDataset
from tasks.evaluation.model_comparison import Comparison, comparison_sentences
from tasks.load import load_prompts

Outcome = Literal["unchanged", "decided before", "promoted", "held", "overtaken"]
"""unchanged: the champion knows the data. decided before: this very question was. overtaken: somebody moved the
champion meanwhile, and the next run judges anew."""


@dataclass(frozen=True)
class Question:
    """What is to be decided: all that the decision's key is made of."""

    config: RecurringConfig
    workspace: Workspace
    champion: AliasEntry | None
    data: LoadedDataset
    suite: LoadedSuite
    further: tuple[LoadedDataset, ...] = ()
    """What it trains on besides `data`."""

    @property
    def training_key(self) -> str:
        """Of the training run: what the gate and the suite say does not make another one."""
        body = self.config.training.config.semantic()
        body["model"] = body["model"] | {"key": self.start}
        further = [one.ref.sha256 for one in self.further]
        return digest(canonical_json([self.config.training.kind, body, self.data.ref.sha256, *further]))[:16]

    @property
    def key(self) -> str:
        """Of the decision, and its id."""
        judged = [self.suite.semantic(), self.config.gate.model_dump(mode="json")]
        champion = self.champion.version if self.champion else None
        return digest(canonical_json([self.training_key, champion, judged]))[:16]

    @property
    def champion_key(self) -> str | None:
        return f"{self.config.model}@{self.champion.version}" if self.champion else None

    @property
    def start(self) -> str:
        """What a challenger is trained from."""
        base = self.config.training.config.model.key
        return base if self.config.start_from == "base" else (self.champion_key or base)

    @property
    def run(self) -> str:
        return f"recurring-{self.config.model}/{self.training_key}"


@flow(name="recurring", flow_run_name="recurring {config.model}", **ON_END)
async def recurring(config: RecurringConfig) -> dict[str, Any]:
    """Fine-tunes a model again when there is new data, and promotes the result only if it beats the champion.

    Args:
        config: which model, trained how, judged by what.
    """
    with reraise_termination():
        logger = TerminalProgress()
        training = config.training.model_copy(update={"config": with_deployment_settings(config.training.config)})
        config = config.model_copy(update={"training": training})
        check_attempts(f"recurring-{config.model}")
        question = _question(config)
        known = _known(question)
        if known is None:
            known = await _answer(question, logger)
        logger.note(f"{config.model}: {known['outcome']}: {'; '.join(known['reasons'])}")
        await put_markdown("recurring", _page(config.model, known))
        return known


def _question(config: RecurringConfig) -> Question:
    """Loads data and graders: storage only, no engine."""
    workspace = workspace_of(config.place, f"recurring-{config.model}")
    data, *further = (load_prompts(workspace, *source) for source in inputs_of(config.training).values())
    champion = champion_of(workspace.open_store(), config.model)
    return Question(config, workspace, champion, data, LoadedSuite.load(workspace, config.suite), tuple(further))


def _known(question: Question) -> dict[str, Any] | None:
    """The outcome when there is nothing to do, or None."""
    store, data = question.workspace.open_store(), question.data.ref
    champion = question.champion_key
    _finish_promotion(question)
    known_data = set() if champion is None else training_datasets(store, champion)
    if known_data.issuperset(one.ref.sha256 for one in (question.data, *question.further)):
        said = f"no new data: the champion {champion} was trained on dataset {data.sha256[:12]} already"
        return _outcome(question, "unchanged", [said])
    decision = find_decision(store, question.config.model, question.key)
    if decision is None:
        return None
    try:
        apply_decision(store, decision)  # if the process ended between the decision and the move
    except AliasMoved as error:
        return _outcome(question, "overtaken", [str(error)], decision)
    if champion_of(store, question.config.model) != question.champion:
        return _promoted(question, decision)
    said = f"dataset {data.sha256[:12]} against this champion was decided on {decision.created[:19]} by {decision.who}"
    what = f"{decision.action}{', and the champion was moved back since' if decision.moves else ''}"
    return _outcome(question, "decided before", [f"{said}: {what}", *decision.reasons], decision)


async def _answer(question: Question, logger: TerminalProgress) -> dict[str, Any]:
    """Trains, evaluates, judges, asks, decides. Every part is kept under its key: a retry repeats none."""
    config, rows = question.config, question.data.rows
    logger.note(f"{config.model}: new data, {rows} rows; training run {question.run} starts from {question.start}")
    trained = await _train(question)
    # a new string: Prefect would note the child run as an input of the evaluation, and its page takes that for an error
    challenger = trained["model"].encode().decode()
    version = challenger.partition("@")[2]
    if challenger == question.champion_key:
        return _decide(question, version, "hold", ["the training gave the champion again, byte for byte"], None)
    against = question.champion_key or question.start
    evaluated = await evaluation(
        EvaluationFlowConfig(
            models=(against, challenger), suite=config.suite, engine=config.place.engine, storage=config.place.storage
        )
    )
    comparison = Comparison.model_validate({name: evaluated[name] for name in Comparison.model_fields})
    verdict = judge(config.gate, comparison.differences, config.suite.cells())
    action, reasons, who = _first(question, verdict)
    if action == "promote" and config.approval.required:
        action, reasons, who = await _approved(question, challenger, reasons, comparison)
    evidence = {"checks": [check.model_dump(mode="json") for check in verdict.checks]}
    return _decide(question, version, action, reasons, evaluated["table"], who=who, evidence=evidence)


async def _train(question: Question) -> dict[str, Any]:
    """The training run, as a child run of this one: the same question again resumes it."""
    training = question.config.training
    model = training.config.model.model_copy(update={"key": question.start, "publish_as": question.config.model})
    changes = {"run": question.run, "model": model}
    return await flow_of(training.kind)(training.config.model_copy(update=changes))  # type: ignore[no-any-return]


def _first(question: Question, verdict: GateVerdict) -> tuple[Action, list[str], str]:
    """What the gate says, and that a first model has nobody to beat."""
    who = "flow recurring"
    if question.champion is None and not question.config.gate.first_must_pass:
        return "promote", ["there is no champion yet"], who
    return ("promote" if verdict.passed else "hold"), list(verdict.reasons), who


async def _approved(
    question: Question, challenger: str, reasons: list[str], comparison: Comparison
) -> tuple[Action, list[str], str]:
    """What a person says to a challenger that passed the gate."""
    seconds = question.config.approval.timeout_seconds
    title = f"## Promote `{challenger}` over `{question.champion_key or 'no champion'}`?\n\n"
    gate = "\n".join(f"- {reason}" for reason in reasons)
    answer = await request_approval(f"{title}{gate}\n\n{comparison_sentences(comparison)}", timeout_seconds=seconds)
    if answer is None:
        return "hold", [*reasons, f"nobody approved within {seconds:g} s"], "flow recurring"
    said = [answer.reason] if answer.reason else []
    if answer.promote:
        return "promote", [*reasons, *said], answer.your_name
    return "hold", [f"{answer.your_name} declined", *said], answer.your_name


def _decide(
    question: Question,
    version: str,
    action: Action,
    reasons: list[str],
    evaluation_uri: str | None,
    *,
    who: str = "flow recurring",
    evidence: dict[str, Any] | None = None,
) -> dict[str, Any]:
    workspace, name = question.workspace, question.config.model
    found = {"dataset": question.data.ref.uri, "start": question.start, "training_run": question.run}
    try:
        decision = commit_decision(
            workspace.open_store(), name, version, action, over=question.champion, reasons=reasons, who=who,
            provenance=workspace.provenance, decision_id=question.key, run=question.run, evaluation=evaluation_uri,
            evidence=found | (evidence or {}),
        )  # fmt: skip
    except AliasMoved as error:
        return _outcome(question, "overtaken", [str(error)])
    if decision.moves:
        return _promoted(question, decision)
    return _outcome(question, "held", list(decision.reasons), decision)


def _promoted(question: Question, decision: Decision) -> dict[str, Any]:
    """What follows a promotion: the event, then the card, whose presence says that both are done."""
    store = question.workspace.open_store()
    if find_card(store, decision) is None:
        announce_promotion(decision)
        commit_card(store, decision, provenance=question.workspace.provenance)
    return _outcome(question, "promoted", list(decision.reasons), decision)


def _finish_promotion(question: Question) -> None:
    """If a process ended right after it moved the champion."""
    champion = question.champion
    made_by = champion.decision if champion else None
    decision = find_decision(question.workspace.open_store(), question.config.model, made_by) if made_by else None
    if decision is not None and decision.action == "promote":
        _promoted(question, decision)


def _outcome(
    question: Question, outcome: Outcome, reasons: list[str], decision: Decision | None = None
) -> dict[str, Any]:
    champion = champion_of(question.workspace.open_store(), question.config.model)
    return {
        "outcome": outcome,
        "reasons": reasons,
        "champion": f"{question.config.model}@{champion.version}" if champion else None,
        "model": f"{decision.model}@{decision.version}" if decision else None,
        "decision": decision.id if decision else None,
        "evaluation": decision.evaluation if decision else None,
    }


def _page(model: str, known: dict[str, Any]) -> str:
    lines = [f"## {model}: {known['outcome']}\n", *(f"- {reason}" for reason in known["reasons"])]
    lines += ["", f"Champion: `{known['champion'] or 'none'}`"]
    if known["model"] and known["model"] != known["champion"]:
        lines.append(f"Challenger: `{known['model']}`")
    return "\n".join(lines) + "\n"
