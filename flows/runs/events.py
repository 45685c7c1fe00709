"""What Ostinato tells a Prefect server besides states: events that automations answer. docs/operations.md has examples.

Each function sends one event and returns; without a server it does nothing. The resource is what the event is about
(`ostinato.model.<name>`, `ostinato.run.<key>`, `ostinato.dataset.<name>`); the flow run that sends it is a related
resource.
"""

from __future__ import annotations

from typing import Any

from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL

MODEL_PROMOTED = "ostinato.model.promoted"
RUN_STALLED = "ostinato.run.stalled"
EVAL_REGRESSED = "ostinato.eval.regressed"
DATASET_REGISTERED = "ostinato.dataset.registered"


def model_promoted(
    name: str, version: str, *, alias: str, number: int, previous: str | None = None, decision: str | None = None
) -> None:
    """`alias` of the model means `version` now. `number`: of the entry in the alias's log; `previous`: the version it
    meant before; `decision`: logical key of the record that says why."""
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


def run_stalled(run: str, *, step: int, silent_seconds: float, usual_seconds: float | None) -> None:
    """No step of the run has ended for `silent_seconds`, while they usually take `usual_seconds` (None: none has ended
    yet). `step`: the 0-based one that is awaited."""
    payload = {
        "run": run,
        "step": step,
        "silent_seconds": round(silent_seconds, 1),
        "usual_seconds": None if usual_seconds is None else round(usual_seconds, 3),
    }
    _emit(RUN_STALLED, "run", run, payload)


def eval_regressed(
    name: str,
    version: str,
    *,
    baseline: str,
    dataset: str,
    difference: float,
    low: float,
    high: float,
    n: int,
) -> None:
    """The version is worse than `baseline` on a dataset: the paired mean `difference` of `n` prompts and its confidence
    interval."""
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


def dataset_registered(name: str, version: str, *, use: str, rows: int, source: str, uri: str) -> None:
    """The store has a version of a dataset that it did not have. `use`: prompt or completion; `source`: the file it was
    read from, or what made it."""
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
    if not PREFECT_API_URL.value():
        return  # Prefect would start a server of its own, to tell it and to forget it
    resource = {"prefect.resource.id": f"ostinato.{kind}.{name}", "prefect.resource.name": name}
    emit_event(event=event, resource=resource, payload=payload)
