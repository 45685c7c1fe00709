"""The `recurring` flow: fine-tunes a model again when there is new data, and promotes the result if it is better.

One run compares the data with what the champion was trained on. If there is new data, it trains a challenger, evaluates
both models, applies the gate, asks for approval if the config requires it, and commits a decision.

While the name has no champion, the baseline of the comparison is its newest published version that this flow did not
train. (Those that it trained were held.) Without such a version, it is the model that the challenger was trained from.

The id of a decision is a digest of its inputs: data, baseline, training, suite and gate. So a retried flow run resumes
and decides once, and two runs of a schedule decide once. Inputs that were decided on before are not tried again, also
if the challenger was held, or was promoted and later rolled back.

    ostinato recurring --config examples/recurring.yaml
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from prefect import get_client
from prefect.context import FlowRunContext
from prefect.flow_runs import apause_flow_run
from prefect.input import RunInput
from prefect.states import Running
from pydantic import Field, ValidationError

from engine.workspace import Workspace
from flows.catalogue import TRAININGS
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.recurring import RecurringConfig
from flows.display.run_log import put_markdown
from flows.display.terminal import TerminalProgress
from flows.evaluation import LoadedSuite, evaluation
from flows.ops.deployment_settings import with_deployment_settings
from flows.ops.termination import check_attempts, reraise_termination
from flows.promotion.gate import GateVerdict, judge
from flows.promotion.model_card import commit_card, decision_sections, find_card
from flows.runs.checked_flow import checked_flow
from flows.runs.events import announce_promotion
from flows.runs.input_checks import check_inputs
from flows.runs.session import workspace_of
from storage.errors import AliasMoved
from storage.inspect.lineage import training_datasets
from storage.registry.decisions import (
    Action,
    AliasEntry,
    Decision,
    alias_log,
    apply_decision,
    champion_of,
    commit_decision,
    find_decision,
)
from storage.registry.models import LATEST, find_model
from storage.serialization import Frozen, canonical_json, digest
from storage.store import keys
from storage.store.objects import ObjectStore
from tasks.datasets.load import LoadedDataset
from tasks.evaluation.model_comparison import Comparison, comparison_sentences
from tasks.load import load_prompts

FLOW_AUTHOR = "flow recurring"
"""The author of a decision that no person made."""

Outcome = Literal["unchanged", "decided before", "promoted", "held", "overtaken"]
"""unchanged: the champion was trained on this data already. decided before: there is a decision on the same inputs.
overtaken: the champion was changed during the run, and the next run decides."""

GRACE_SECONDS = 3600
"""How much longer than our timeout the server keeps the pause open."""
POLL_SECONDS = 5


@dataclass(frozen=True)
class DecisionInputs:
    """Everything that the decision depends on."""

    config: RecurringConfig
    workspace: Workspace
    champion: AliasEntry | None
    version_to_beat: str | None
    """The champion's version, or, without a champion, the newest one that this flow did not train. None: no such."""
    data: LoadedDataset
    suite: LoadedSuite
    other_datasets: tuple[LoadedDataset, ...] = ()
    """Other datasets of the training, such as the prompts of `sft_to_gspo`."""

    @property
    def training_digest(self) -> str:
        """Identifies the training run. It does not depend on the gate and the suite."""
        body = self.config.training.config.semantic()
        body["model"] = body["model"] | {"key": self.start}
        further = [dataset.ref.sha256 for dataset in self.other_datasets]
        return digest(canonical_json([self.config.training.kind, body, self.data.ref.sha256, *further]))[:16]

    @property
    def key(self) -> str:
        """The id of the decision."""
        suite_and_gate = [self.suite.semantic(), self.config.gate.model_dump(mode="json")]
        return digest(canonical_json([self.training_digest, self.version_to_beat, suite_and_gate]))[:16]

    @property
    def champion_model(self) -> str | None:
        """The champion as `name@version`, or None if the model has no champion."""
        return f"{self.config.model}@{self.champion.version}" if self.champion else None

    @property
    def baseline(self) -> str:
        """The model that the challenger must beat: the version to beat, or the model that it is trained from."""
        return f"{self.config.model}@{self.version_to_beat}" if self.version_to_beat else self.start

    @property
    def start(self) -> str:
        """The key of the model that the challenger is trained from."""
        base = self.config.training.config.model.key
        if self.config.start_from == "base":
            return base
        return self.champion_model or base

    @property
    def run(self) -> str:
        """The key of the training run."""
        return f"{self.config.run_key}/{self.training_digest}"


@checked_flow()
async def recurring(config: RecurringConfig) -> dict[str, Any]:
    """Fine-tunes a model again when there is new data, and promotes the result only if it beats the champion.

    Args:
        config: the model, its training, the evaluation suite and the gate.
    """
    with reraise_termination():
        logger = TerminalProgress()
        training = config.training.model_copy(update={"config": with_deployment_settings(config.training.config)})
        config = config.model_copy(update={"training": training})
        check_attempts(config.run_key)
        # train and evaluate only if the stored decisions do not give the outcome
        inputs = _load_inputs(config)
        outcome = _finish_earlier_work(inputs)
        if outcome is None:
            outcome = await _train_and_commit_decision(inputs, logger)
        # show the outcome
        logger.note(f"{config.model}: {outcome['outcome']}: {'; '.join(outcome['reasons'])}")
        await put_markdown("recurring", _outcome_page(inputs, outcome))
        return outcome


def _load_inputs(config: RecurringConfig) -> DecisionInputs:
    """Loads the datasets, the champion and the suite. Uses the store only, not the engine."""
    workspace = workspace_of(config.place, config.run_key)
    training = config.training.with_full_versions(workspace.open_store())
    config = config.model_copy(update={"training": training})
    champion = champion_of(workspace.open_store(), config.model)
    _check_inputs(config, workspace, champion)
    data, *further = (load_prompts(workspace, *source) for source in training.config.data.inputs.values())
    suite = LoadedSuite.load(workspace, config.suite)
    to_beat = champion.version if champion else _newest_foreign_version(workspace.open_store(), config)
    return DecisionInputs(config, workspace, champion, to_beat, data, suite, tuple(further))


def _newest_foreign_version(store: ObjectStore, config: RecurringConfig) -> str | None:
    """The newest published version of the model that this flow did not train, or None."""
    for entry in reversed(alias_log(store, config.model, LATEST)):
        model = find_model(store, config.model, entry.version)
        if model is None:
            continue
        runs = [keys.run_of_parent(parent) or "" for parent in model.parents]
        if not any(run.startswith(f"{config.run_key}/") for run in runs):
            return entry.version
    return None


def _check_inputs(config: RecurringConfig, workspace: Workspace, champion: AliasEntry | None) -> None:
    """Raises ConfigError for an input that is not there. A training that starts from the champion needs no base
    model."""
    training = config.training.config
    if champion is not None and config.start_from == "champion":
        model = training.model.model_copy(update={"key": f"{config.model}@{champion.version}"})
        training = training.model_copy(update={"model": model})
    changes = {"training": config.training.model_copy(update={"config": training})}
    check_inputs(config.model_copy(update=changes), workspace.open_store())


def _finish_earlier_work(inputs: DecisionInputs) -> dict[str, Any] | None:
    """Completes what an earlier process left undone. Returns the outcome if no training is needed, else None: there is
    no new data, or the same inputs were decided on before."""
    store, data = inputs.workspace.open_store(), inputs.data.ref
    champion = inputs.champion_model
    _finish_last_promotion(inputs)
    # no dataset is new to the champion
    trained_on = set() if champion is None else training_datasets(store, champion)
    if trained_on.issuperset(dataset.ref.sha256 for dataset in (inputs.data, *inputs.other_datasets)):
        reason = f"no new data: the champion {champion} was trained on dataset {data.sha256[:12]} already"
        return _outcome(inputs, "unchanged", [reason])
    # the same inputs were decided on before
    decision = find_decision(store, inputs.config.model, inputs.key)
    if decision is None:
        return None
    try:
        # an earlier process may have stopped between the commit and the move of the alias
        apply_decision(store, decision)
    except AliasMoved as error:
        return _outcome(inputs, "overtaken", [str(error)], decision)
    if champion_of(store, inputs.config.model) != inputs.champion:
        return _complete_promotion(inputs, decision)
    action: str = decision.action
    if decision.moves:
        action += ", and the champion was moved back since"
    reason = (
        f"dataset {data.sha256[:12]} against this champion was decided on {decision.created[:19]} by {decision.who}: "
        f"{action}"
    )
    return _outcome(inputs, "decided before", [reason, *decision.reasons], decision)


async def _train_and_commit_decision(inputs: DecisionInputs, logger: TerminalProgress) -> dict[str, Any]:
    """Trains a challenger, evaluates it, applies the gate and decides. A retry repeats no part that is complete."""
    config, rows = inputs.config, inputs.data.rows
    logger.note(f"{config.model}: new data, {rows} rows; training run {inputs.run} starts from {inputs.start}")
    training_result = await _train(inputs)
    if training_result["model"] is None:
        reason = f"no step of the training run {inputs.run} taught the model anything, so there is no challenger"
        return _outcome(inputs, "held", [reason])
    # Copy the string. Otherwise Prefect records the child run as an input of the evaluation and shows an error on its
    # page.
    challenger = training_result["model"].encode().decode()
    version = challenger.partition("@")[2]
    if challenger == inputs.baseline:
        reason = f"the training gave {challenger} again, byte for byte, which is the model to beat"
        return _commit_decision(inputs, version, "hold", [reason], None)
    place = config.place
    evaluation_result = await evaluation(
        EvaluationFlowConfig(
            models=(inputs.baseline, challenger), suite=inputs.suite.suite, engine=place.engine, storage=place.storage
        )
    )
    comparison = Comparison.model_validate({name: evaluation_result[name] for name in Comparison.model_fields})
    verdict = judge(config.gate, comparison.differences, config.suite.cells())
    action, reasons = _apply_gate(inputs, verdict)
    author = FLOW_AUTHOR
    first_by_approval = inputs.champion is None and config.gate.first_champion == "approval"
    if first_by_approval or (action == "promote" and config.approval.required):
        action, reasons, author = await _ask_for_approval(inputs, challenger, reasons, comparison)
    checks = [check.model_dump(mode="json") for check in verdict.checks]
    # the name in the tables of the evaluation: the baseline may be given as a folder
    evidence = {"checks": checks, "baseline": comparison.scores[0].model}
    table = evaluation_result["table"]
    return _commit_decision(inputs, version, action, reasons, table, author=author, evidence=evidence)


async def _train(inputs: DecisionInputs) -> dict[str, Any]:
    """Runs the training as a child run. Equal inputs resume the same run."""
    training = inputs.config.training
    model = training.config.model.model_copy(update={"key": inputs.start, "publish_as": inputs.config.model})
    config = training.config.model_copy(update={"run": inputs.run, "model": model})
    return await TRAININGS[training.kind].import_flow()(config)


def _apply_gate(inputs: DecisionInputs, verdict: GateVerdict) -> tuple[Action, list[str]]:
    """The action and its reasons."""
    reasons = list(verdict.reasons)
    if inputs.champion is None:
        what = "the newest published version" if inputs.version_to_beat else "the model that it was trained from"
        reasons.insert(0, f"there is no champion yet: the challenger was compared with {inputs.baseline}, {what}")
    if verdict.passed:
        return "promote", reasons
    if inputs.champion is None:
        reasons.append(f"'ostinato models promote {inputs.config.model}@VERSION' makes a version the champion by hand")
    return "hold", reasons


async def _ask_for_approval(
    inputs: DecisionInputs, challenger: str, reasons: list[str], comparison: Comparison
) -> tuple[Action, list[str], str]:
    """Asks a person whether a challenger that may be promoted is promoted. Returns action, reasons and author."""
    # the page that the person reads
    seconds = inputs.config.approval.timeout_seconds
    place = f"over the champion `{inputs.baseline}`" if inputs.champion else "as the first champion"
    title = f"## Promote `{challenger}` {place}?\n\n"
    gate = "\n".join(f"- {reason}" for reason in reasons)
    answer = await request_approval(f"{title}{gate}\n\n{comparison_sentences(comparison)}", timeout_seconds=seconds)
    if answer is None:
        return "hold", [*reasons, f"there was no approval within {seconds:g} s"], FLOW_AUTHOR
    approval_reasons = [answer.reason] if answer.reason else []
    if answer.promote:
        return "promote", [*reasons, *approval_reasons], answer.your_name
    return "hold", [f"{answer.your_name} declined", *approval_reasons], answer.your_name


def _commit_decision(
    inputs: DecisionInputs,
    version: str,
    action: Action,
    reasons: list[str],
    evaluation_uri: str | None,
    *,
    author: str = FLOW_AUTHOR,
    evidence: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Commits the decision and moves the champion if it is a promotion. Returns the outcome."""
    workspace, name = inputs.workspace, inputs.config.model
    origin = {"dataset": inputs.data.ref.uri, "start": inputs.start, "training_run": inputs.run}
    try:
        decision = commit_decision(
            workspace.open_store(), name, version, action, over=inputs.champion, reasons=reasons, who=author,
            provenance=workspace.provenance, decision_id=inputs.key, run=inputs.run, evaluation=evaluation_uri,
            evidence=origin | (evidence or {}),
        )  # fmt: skip
    except AliasMoved as error:
        return _outcome(inputs, "overtaken", [str(error)])
    if decision.moves:
        return _complete_promotion(inputs, decision)
    return _outcome(inputs, "held", list(decision.reasons), decision)


def _complete_promotion(inputs: DecisionInputs, decision: Decision) -> dict[str, Any]:
    """Sends the event of a promotion and writes the model card, if this has not been done. Returns the outcome."""
    store = inputs.workspace.open_store()
    # the card is written last, so its presence means that the event was sent
    if find_card(store, decision) is None:
        announce_promotion(decision)
        commit_card(store, decision, provenance=inputs.workspace.provenance)
    return _outcome(inputs, "promoted", list(decision.reasons), decision)


def _finish_last_promotion(inputs: DecisionInputs) -> None:
    """Completes the champion's promotion if an earlier process stopped after it moved the alias."""
    champion = inputs.champion
    if champion is None or not champion.decision:
        return
    decision = find_decision(inputs.workspace.open_store(), inputs.config.model, champion.decision)
    if decision is not None and decision.action == "promote":
        _complete_promotion(inputs, decision)


def _outcome(
    inputs: DecisionInputs, outcome: Outcome, reasons: list[str], decision: Decision | None = None
) -> dict[str, Any]:
    """The result of the flow run."""
    # read again: this run may have moved the champion
    champion = champion_of(inputs.workspace.open_store(), inputs.config.model)
    return {
        "outcome": outcome,
        "reasons": reasons,
        "champion": f"{inputs.config.model}@{champion.version}" if champion else None,
        "model": f"{decision.model}@{decision.version}" if decision else None,
        "decision": decision.id if decision else None,
        "evaluation": decision.evaluation if decision else None,
    }


def _outcome_page(inputs: DecisionInputs, outcome: dict[str, Any]) -> str:
    """The outcome in Markdown, with the decision and the evaluation on which it rests."""
    store, name = inputs.workspace.open_store(), inputs.config.model
    lines = [f"## {name}: {outcome['outcome']}\n", *(f"- {reason}" for reason in outcome["reasons"])]
    lines += ["", f"Champion: `{outcome['champion'] or 'none'}`"]
    if outcome["model"] and outcome["model"] != outcome["champion"]:
        lines.append(f"Challenger: `{outcome['model']}`")
    decision = find_decision(store, name, outcome["decision"]) if outcome["decision"] else None
    return "\n".join([*lines, "", *decision_sections(store, decision)])


class ApprovalForm(RunInput):
    """The fields of the form in the Prefect UI."""

    promote: bool = Field(False, description="Make the challenger the champion. Off: keep the present champion.")
    your_name: str = Field("", description="Your name. It is stored with the decision.")
    reason: str = Field("", description="The reason for the decision. It is stored with the decision.")


class Approval(Frozen):
    """A valid answer to the form."""

    promote: bool
    your_name: str = Field(min_length=1, max_length=200, pattern=r"\S")
    reason: str = Field("", max_length=10_000)


async def request_approval(comparison: str, *, timeout_seconds: float) -> Approval | None:
    """Pauses the flow run until a person answers. Returns None after the timeout.

    An invalid answer, such as one without a name, is requested again within the same timeout.
    """
    # invalid answers do not extend the deadline
    loop = asyncio.get_running_loop()
    deadline, complaint = loop.time() + timeout_seconds, ""
    while (remaining := deadline - loop.time()) > 0:
        form = await _pause(complaint + comparison, remaining)
        if form is None:
            return None
        try:
            return Approval.model_validate(form.model_dump(include=set(Approval.model_fields)))
        except ValidationError as error:
            problems = "; ".join(f"{each['loc'][0]}: {each['msg']}" for each in error.errors(include_url=False))
            complaint = f"**The last answer is not valid ({problems}). Please answer again.**\n\n"
    return None


async def _pause(description: str, seconds: float) -> ApprovalForm | None:
    """Shows the form and waits for an answer, or None after `seconds`."""
    form = ApprovalForm.with_initial_data(description=description)
    # a new key for each pause, so that a retry of the flow run can ask again
    pause = apause_flow_run(
        wait_for_input=form,
        timeout=math.ceil(seconds) + GRACE_SECONDS,
        poll_interval=POLL_SECONDS,
        key=f"approval-{uuid4().hex}",
    )
    try:
        async with asyncio.timeout(seconds):
            return await pause
    except TimeoutError:
        await _end_pause()
        return None


async def _end_pause() -> None:
    """Sets the paused flow run to Running again."""
    context = FlowRunContext.get()
    # only a flow run can be paused
    assert context is not None and context.flow_run is not None
    async with get_client() as client:
        await client.set_flow_run_state(context.flow_run.id, Running(message="there was no answer in time"))
