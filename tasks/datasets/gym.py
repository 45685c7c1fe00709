"""Generates a dataset with reasoning-gym. The metadata of each thread holds what the verifier needs.

The metadata of a thread has `dataset`, `index` (the row's number in reasoning-gym), `answer` (may be null) and
`reasoning_gym`: the name and config of the dataset and the whole entry, so that `tasks.graders.gym` can score an answer
without generating the row again.
"""

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.text.threads import StringThread
from tasks.datasets.errors import DatasetError, ExtraNotInstalled
from tasks.datasets.repetition_counter import RepetitionCounter
from tasks.datasets.spec import DatasetUse, ReasoningGymDataset

DRAWS_PER_ROW = 20
"""The draws that are tried before the dataset is declared too small, as a multiple of the expected number of draws."""


def generate_threads(spec: ReasoningGymDataset, *, kind: DatasetUse = "prompt") -> Iterator[StringThread]:
    """Yield `spec.size` threads: the system prompt if any, the question, and for kind completion the stored answer.

    Raises DatasetError for an unknown name or option, an entry that JSON cannot hold, a missing stored answer
    (kind completion), and a config that cannot produce that many (distinct) questions of the split.
    """
    # The dataset object makes each row when it is asked for, so a large number of draws costs nothing here.
    draws = _draws(spec)
    source = create_procedural(spec.name, spec.config, size=draws, seed=spec.seed)
    yielded = 0
    with RepetitionCounter() as questions:
        for index in range(draws):
            entry = _entry(source, spec, index)

            # Leave out questions of the other split, and repeated ones.
            question = entry["question"]
            if not _in_split(question, spec) or (spec.unique and questions.add(_digest(question))):
                continue

            # The verifier sees the entry after a round trip through JSON. Check the first one.
            restored = _through_json(spec, entry)
            if yielded == 0:
                _check_same_score(source, spec, entry, restored)
            yield _thread(spec, index, restored, kind)
            yielded += 1
            if yielded == spec.size:
                return
    rows = f"questions of split {spec.split!r}" if _has_split(spec) else "rows"
    distinct = "distinct " if spec.unique else ""
    raise DatasetError(
        f"reasoning-gym {spec.name!r}: given size={spec.size}; only {yielded} {distinct}{rows} were found in {draws} "
        f"draws. Lower size, widen config, or change heldout_percent."
    )


def create_procedural(name: str, config: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """Create reasoning-gym's dataset object. Raises DatasetError, ExtraNotInstalled."""
    # Import the optional package.
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ExtraNotInstalled(
            f"the dataset {name!r} needs reasoning-gym, which is not installed here ({error}). "
            f"Install the extra: pip install 'ostinato[gym]'"
        ) from error

    # Check the name and the options, and suggest correct ones.
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"It has {len(DATASETS)}, such as chain_sum and gcd."
        raise DatasetError(f"reasoning-gym has no dataset {name!r}. {hint}")
    known = sorted(set(DATASETS[name][1].__dataclass_fields__) - {"seed", "size"})
    unknown = sorted(set(config) - set(known))
    if unknown:
        raise DatasetError(f"reasoning-gym {name!r}: given the options {unknown}; expected any of {', '.join(known)}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise DatasetError(f"reasoning-gym {name!r} rejected config={dict(config)}: {error}") from error


def _has_split(spec: ReasoningGymDataset) -> bool:
    return spec.split != "all"


def _draws(spec: ReasoningGymDataset) -> int:
    """The number of rows to draw from reasoning-gym.

    Without a split this is exactly `size`: the rows of a few datasets depend on the size, and they should be those that
    a direct use of reasoning-gym returns.
    """
    if not _has_split(spec) and not spec.unique:
        return spec.size
    # A split gets only its percentage of the draws. The constant helps small sizes, whose share varies most.
    percent_of_split = {"all": 100, "train": 100 - spec.heldout_percent, "heldout": spec.heldout_percent}[spec.split]
    return spec.size * DRAWS_PER_ROW * 100 // percent_of_split + 1000


def _entry(source: Any, spec: ReasoningGymDataset, index: int) -> dict[str, Any]:
    try:
        return source[index]
    except Exception as error:  # the boundary to reasoning-gym: its generators raise anything
        raise DatasetError(
            f"reasoning-gym {spec.name!r} could not make row {index + 1} under config={spec.config}: {error!r}. "
            f"Lower size, or change config."
        ) from error


def _in_split(question: str, spec: ReasoningGymDataset) -> bool:
    """Whether the question belongs to the split. Only the hash of the question decides: no seed, index or config."""
    if not _has_split(spec):
        return True
    # 15 hex digits of the hash, modulo 100, are a percentile that is the same on every machine.
    heldout = int(_digest("held-out split\n" + question)[:15], 16) % 100 < spec.heldout_percent
    return heldout == (spec.split == "heldout")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _through_json(spec: ReasoningGymDataset, entry: dict[str, Any]) -> dict[str, Any]:
    """The entry as the verifier will read it from the store: tuples become lists, integer keys become strings."""
    try:
        return json.loads(json.dumps(entry, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise DatasetError(f"reasoning-gym {spec.name!r}: its entries cannot be written as JSON: {error}") from error


def _check_same_score(source: Any, spec: ReasoningGymDataset, entry: dict[str, Any], restored: Any) -> None:
    """Raise DatasetError if the round trip through JSON changes the score of the stored answer, as for arc_agi and
    rearc: all rewards would be wrong without an error."""
    if entry["answer"] is None:
        return
    before = source.score_answer(entry["answer"], entry)
    after = source.score_answer(entry["answer"], restored)
    if before != after:
        raise DatasetError(
            f"reasoning-gym {spec.name!r}: its verifier scores the stored answer {before} on the entry and {after} on "
            f"the entry read back from JSON; it cannot be used from a stored dataset. Use another dataset."
        )


def _thread(spec: ReasoningGymDataset, index: int, entry: dict[str, Any], kind: DatasetUse) -> StringThread:
    # The question, and for completions the stored answer.
    turns = [("system", spec.system_prompt)] if spec.system_prompt else []
    turns.append(("user", entry["question"]))
    if kind == "completion":
        if not isinstance(entry["answer"], str):
            raise DatasetError(
                f"reasoning-gym {spec.name!r}, row {index + 1}: no stored answer to learn from; expected one for "
                f"kind 'completion'. Use the dataset for prompts."
            )
        turns.append(("assistant", entry["answer"]))

    # The whole entry is stored, because a verifier may read any of its fields.
    metadata = {
        "dataset": spec.name,
        "index": index,
        "answer": entry["answer"],
        "reasoning_gym": {"dataset": spec.name, "config": spec.config, "entry": entry},
    }
    thread = StringThread(turns=turns, metadata=metadata)
    return thread.with_weight_last_assistant_turn() if kind == "completion" else thread
