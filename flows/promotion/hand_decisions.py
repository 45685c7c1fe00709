"""Decisions about champions that a person makes, at the terminal or on the page of Ostinato."""

from __future__ import annotations

import getpass

from flows.promotion.model_card import commit_card, find_card, render_card
from flows.runs.code_version import code_version
from storage.registry.decisions import (
    Decision,
    champion_of,
    check_champion,
    commit_decision,
    decisions_of,
    find_decision,
    roll_back,
)
from storage.serialization import digest
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore


def promote_by_hand(
    store: ObjectStore,
    name: str,
    version: str,
    *,
    why: str,
    who: str,
    evaluation: str | None = None,
    over: int | None = None,
) -> Decision | None:
    """Makes a version the champion, writes its card and announces it. Returns None if it is the champion already; the
    card that a killed call has left out is then written.

    Args:
        evaluation: URI of the evaluation table that supports it.
        over: Number of the champion's log entry that the person saw, 0 for no champion. None: the present one.

    Raises ObjectNotFound, AliasMoved, ModelBeingDeleted.
    """
    champion = champion_of(store, name)
    # promoting the champion again would add an entry without a change
    if champion is not None and champion.version == version:
        decided = find_decision(store, name, champion.decision) if champion.decision else None
        if decided is not None and decided.action == "promote" and find_card(store, decided) is None:
            _publish(store, decided)
        return None
    check_champion(name, champion, over)
    decision = commit_decision(
        store, name, version, "promote", over=champion, reasons=[why], who=who, provenance=by_hand(name, version),
        evaluation=evaluation,
    )  # fmt: skip
    _publish(store, decision)
    return decision


def _publish(store: ObjectStore, decision: Decision) -> None:
    """Writes the card of a promotion and announces it."""
    commit_card(store, decision, provenance=by_hand(decision.model, decision.version))
    _announce(decision)


def roll_back_by_hand(store: ObjectStore, name: str, *, why: str, who: str, over: int | None = None) -> Decision:
    """Makes the previous champion the champion again and announces it. Arguments and errors as `roll_back`."""
    decision = roll_back(store, name, reasons=[why], who=who, provenance=by_hand(name, "rollback"), over=over)
    _announce(decision)
    return decision


def card_text(store: ObjectStore, name: str, version: str) -> str:
    """Returns the card of the version's last decision that has one, else a card made from the present store."""
    for decision in reversed(decisions_of(store, name)):
        if decision.version == version and (text := find_card(store, decision)) is not None:
            return text
    return render_card(store, name, version)


def account_name() -> str:
    """The name of this account. Empty: it has none, as in a container without an entry for its user id."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def by_hand(name: str, version: str) -> Provenance:
    return Provenance(code_version=code_version(), config_digest=digest([name, version]), seed=0)


def _announce(decision: Decision) -> None:
    # imported here, because the import of Prefect takes seconds, and most commands do not need it
    from flows.runs.events import announce_promotion

    announce_promotion(decision)
