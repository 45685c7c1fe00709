"""The event of a champion that was moved, whoever moved it."""

from __future__ import annotations

from flows.runs.events import model_promoted
from storage.registry.decisions import CHAMPION, Decision
from storage.store import keys


def announce(decision: Decision) -> None:
    """Sends `ostinato.model.promoted`, also for a rollback: automations act on what the champion is now. A retry may
    send it again; `decision` tells. Without a Prefect server nothing is sent."""
    model_promoted(
        decision.model,
        decision.version,
        alias=CHAMPION,
        number=decision.after + 1,
        previous=decision.champion,
        decision=keys.model_note(decision.model, "decisions", decision.id),
    )
