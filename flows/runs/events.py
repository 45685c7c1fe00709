"""Events that Ostinato sends to the Prefect server, for automations to react to. docs/operations.md has examples.

Each `emit_*` function sends one event and returns. Without a Prefect server it does nothing. The resource of an event
is the model, run or dataset it is about (`ostinato.model.<name>`, `ostinato.run.<key>`, `ostinato.dataset.<name>`).
Prefect adds the flow run that sent the event as a related resource.
"""

from __future__ import annotations

from typing import Any

from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL

from storage.registry.decisions import CHAMPION, Decision
from storage.store import keys
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import DatasetUse, DeclaredDataset

MODEL_PROMOTED = "ostinato.model.promoted"
RUN_STALLED = "ostinato.run.stalled"
RUN_IDLE = "ostinato.run.idle"
EVAL_REGRESSED = "ostinato.eval.regressed"
DATASET_REGISTERED = "ostinato.dataset.registered"


def announce_promotion(decision: Decision) -> None:
    """Sends `ostinato.model.promoted` for a decision that moved the champion, which includes rollbacks.

    A retry may send the event again. Receivers recognise the repetition by the payload's `decision`.
    """
    emit_model_promoted(
        decision.model,
        decision.version,
        alias=CHAMPION,
        number=decision.after + 1,
        previous=decision.champion,
        decision=keys.model_note(decision.model, "decisions", decision.id),
    )


def announce_dataset(data: LoadedDataset, spec: DeclaredDataset, use: DatasetUse) -> None:
    """Sends `ostinato.dataset.registered` if this load committed a new version of the dataset."""
    if not data.new:
        return
    name, version = keys.dataset_of(data.ref.key)
    emit_dataset_registered(name, version, use=use, rows=data.rows, source=spec.source, uri=data.ref.uri)


def emit_model_promoted(
    name: str, version: str, *, alias: str, number: int, previous: str | None = None, decision: str | None = None
) -> None:
    """Sends the event that an alias of a model now refers to `version`.

    `number` counts the entries of the alias's log. `previous` is the version that the alias referred to before.
    `decision` is the logical key of the record with the reasons.
    """
    payload = {
        "name": name,
        "version": version,
        "model": f"{name}@{version}",
        "alias": alias,
        "number": number,
        "previous": previous,
        "decision": decision,
    }
    _emit(MODEL_PROMOTED, "model", name, payload)


def emit_run_stalled(run: str, *, step: int, silent_seconds: float, usual_seconds: float | None) -> None:
    """Sends the event that no step of the run has finished for `silent_seconds`.

    `step` is the step that has not finished, counted from 1. `usual_seconds` is the usual duration of a step, or None
    before the first step has finished.
    """
    payload = {
        "run": run,
        "step": step,
        "silent_seconds": round(silent_seconds, 1),
        "usual_seconds": None if usual_seconds is None else round(usual_seconds, 3),
    }
    _emit(RUN_STALLED, "run", run, payload)


def emit_run_idle(run: str, *, step: int, reason: str) -> None:
    """Sends the event that a step of the run taught the model nothing, once per attempt.

    `step` is counted from 1. `reason` is a clause: why the step had no gradient.
    """
    _emit(RUN_IDLE, "run", run, {"run": run, "step": step, "reason": reason})


def emit_eval_regressed(
    name: str, version: str, *, baseline: str, dataset: str, difference: float, low: float, high: float, n: int
) -> None:
    """Sends the event that a model version is worse than `baseline` on a dataset.

    `difference` is the mean paired difference over `n` prompts. `low` and `high` are the ends of its confidence
    interval.
    """
    # docs/operations.md lists these fields
    payload = {
        "name": name,
        "version": version,
        "model": f"{name}@{version}",
        "baseline": baseline,
        "dataset": dataset,
        "difference": difference,
        "low": low,
        "high": high,
        "n": n,
    }
    _emit(EVAL_REGRESSED, "model", name, payload)


def emit_dataset_registered(name: str, version: str, *, use: str, rows: int, source: str, uri: str) -> None:
    """Sends the event that the store has a new version of a dataset.

    `use` is prompt, completion, preference or rating. `source` is the file that was read, or the code that produced
    the rows.
    """
    payload = {
        "name": name,
        "version": version,
        "dataset": f"{name}@{version}",
        "use": use,
        "rows": rows,
        "source": source,
        "uri": uri,
    }
    _emit(DATASET_REGISTERED, "dataset", name, payload)


def _emit(event: str, kind: str, name: str, payload: dict[str, Any]) -> None:
    # without a configured server Prefect would start a temporary one, and lose the event with it
    if not PREFECT_API_URL.value():
        return
    resource = {"prefect.resource.id": f"ostinato.{kind}.{name}", "prefect.resource.name": name}
    emit_event(event=event, resource=resource, payload=payload)
