"""Votes between two answers of a chat, and the dataset of preferences that is made of them.

Each vote is one object of the store, which is put once and never changes. `register_votes` commits a version of a
dataset, which a config names as `{kind: registered, key: votes}`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

from pydantic import JsonValue, ValidationError

from engine.errors import ThreadError
from engine.text.threads import StringThread
from storage.chain.listing import SERVED
from storage.chain.records import base_model_of
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.inspect.lineage import resolve_policy
from storage.registry.decisions import resolve_model
from storage.registry.models import find_model, registered_key
from storage.serialization import Frozen, canonical_json, digest
from storage.store import keys
from storage.store.artifacts import Provenance, map_files
from storage.store.objects import ObjectStore
from tasks.datasets.convert import RowLocation
from tasks.datasets.errors import BadRow
from tasks.datasets.load import DatasetUse, LoadedDataset, ReadDataset, ReadPosition, SkippedRows, load_dataset
from tasks.datasets.preferences import checked_pair
from tasks.datasets.stored import StoredItem, stored_item

VOTES = "votes"
"""Name of the dataset of the votes of a store."""


class VotedAnswer(Frozen):
    """One of the two answers."""

    model: str
    """Name by which the user chose the model."""
    policy: str
    """URI of the policy that answered."""
    text: str


class Vote(Frozen):
    """A person's choice between two answers to the same conversation."""

    schema_version: int = 1
    id: str
    """Id of the comparison. A second vote on it is not stored."""
    messages: tuple[tuple[str, str], ...]
    """(role, text) of the conversation before the answers."""
    left: VotedAnswer
    right: VotedAnswer
    choice: Literal["left", "right", "tie"]
    blind: bool
    """Whether the names of the models were hidden until the vote."""
    created: str
    """ISO time of the vote, UTC."""


class Tally(Frozen):
    """How often one version was preferred in blind comparisons."""

    model: str
    """`name@version` of a registered model, or a run and its step."""
    won: int
    tied: int
    votes: int


def commit_vote(store: ObjectStore, vote: Vote) -> Vote:
    """Stores the vote if its comparison has none, and returns the stored one. Raises CorruptArtifact."""
    key = keys.vote(vote.id)
    return _parse(store.put_if_absent(key, canonical_json(vote.model_dump(mode="json"))).data, key)


def list_votes(store: ObjectStore) -> list[Vote]:
    """Returns all votes, oldest first. Raises CorruptArtifact."""
    vote_keys = [info.key for info in store.list(keys.votes_prefix())]
    votes = map_files(lambda key: _parse(store.get(key), key), vote_keys) if vote_keys else []
    return sorted(votes, key=lambda vote: (vote.created, vote.id))


class VoteDataset(ReadDataset):
    """The preferences that are expressed by votes. Ties are left out."""

    location_fields: ClassVar = frozenset({"votes"})
    store_name: ClassVar = VOTES  # type: ignore[assignment]
    title: ClassVar = VOTES  # type: ignore[assignment]

    kind: Literal["votes"] = "votes"
    votes: tuple[Vote, ...]

    def items(self, use: DatasetUse, skipped: SkippedRows, position: ReadPosition) -> Iterator[StoredItem]:
        for row, vote in enumerate(self.votes, start=1):
            if vote.choice == "tie":
                continue
            answers = (vote.left, vote.right) if vote.choice == "left" else (vote.right, vote.left)
            location = RowLocation(VOTES, row)
            metadata: dict[str, JsonValue] = {
                "vote": vote.id, "voted": vote.created, "blind": vote.blind,
                "chosen_model": answers[0].model, "chosen_policy": answers[0].policy,
                "rejected_model": answers[1].model, "rejected_policy": answers[1].policy,
            }  # fmt: skip
            # two equal answers, between which no model can learn
            try:
                chosen, rejected = (
                    StringThread(turns=[*vote.messages, ("assistant", answer.text)], metadata=metadata)
                    for answer in answers
                )
                yield stored_item(checked_pair(chosen, rejected, location))
            except BadRow as error:
                skipped.add(error)
            except ThreadError as error:
                skipped.add(location.bad_row(None, given="a vote", expected="a conversation", todo=str(error)))


def register_votes(store: ObjectStore, *, code_version: str) -> LoadedDataset:
    """Commits all votes of the store as a version of the dataset `votes`. The same votes are the same version.

    Raises EmptyDataset if no vote prefers an answer, CorruptArtifact.
    """
    votes = VoteDataset(votes=tuple(list_votes(store)))
    provenance = Provenance(code_version=code_version, config_digest=digest(canonical_json(VOTES)), seed=0)
    return load_dataset(store, votes, use="preference", provenance=provenance)


def preferred_model(store: ObjectStore) -> str | None:
    """Returns `name@version` of the registered model that won the most votes: of several, the one that won last. None:
    no registered model won. Raises CorruptArtifact."""
    wins: Counter[str] = Counter()
    # newest first, because Counter keeps the order of equal counts
    for vote in reversed(list_votes(store)):
        if vote.choice == "tie":
            continue
        winner = _version_name(store, vote.left if vote.choice == "left" else vote.right)
        # a name without a version is that of a run
        if "@" in winner:
            wins[resolve_model(store, winner)] += 1
    registered = [model for model, _ in wins.most_common() if find_model(store, *model.split("@", 1)) is not None]
    return registered[0] if registered else None


def count_wins(store: ObjectStore, votes: Iterable[Vote]) -> list[Tally]:
    """Counts the blind votes by the version that answered, also where it was chosen by an alias. The version that won
    the largest part of its votes comes first. Raises CorruptArtifact."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    names: dict[str, str] = {}
    for vote in votes:
        if not vote.blind:
            continue
        for side, answer in (("left", vote.left), ("right", vote.right)):
            if answer.policy not in names:
                names[answer.policy] = _version_name(store, answer)
            outcome = {"tie": "tied", side: "won"}.get(vote.choice, "lost")
            counts[names[answer.policy]].update((outcome, "votes"))
    tallies = [
        Tally(model=model, won=count["won"], tied=count["tied"], votes=count["votes"])
        for model, count in counts.items()
    ]
    return sorted(tallies, key=lambda tally: (-tally.won / tally.votes, -tally.votes, tally.model))


def _version_name(store: ObjectStore, answer: VotedAnswer) -> str:
    """The version that gave an answer. The name by which it was chosen, if its policy is not in the store any more."""
    try:
        policy = resolve_policy(store, answer.policy)
        is_registered = policy.run.startswith(f"{SERVED}/")
        return registered_key(base_model_of(store, policy)) if is_registered else f"{policy.run}, step {policy.step}"
    except ObjectNotFound:
        return answer.model


def _parse(data: bytes, key: str) -> Vote:
    try:
        return Vote.model_validate_json(data)
    except ValidationError as error:
        raise CorruptArtifact(f"{key} is not a readable vote (or of a newer version): {error}") from error
