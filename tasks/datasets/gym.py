"""reasoning-gym as a dataset: rows made on the spot, each with what its verifier needs in the metadata.

Metadata of a row: `dataset`, `index` (reasoning-gym's own), `answer` (may be null), and `reasoning_gym`: the dataset's
name and config and the whole entry, from which graders/gym.py scores without making the row again.
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
"""How many times the expected number of draws is tried before saying that there are not enough questions."""


def rows(spec: ReasoningGymDataset, *, kind: DatasetUse = "prompt") -> Iterator[StringThread]:
    """`spec.size` threads: system prompt if any, the question, and for kind completion the stored answer.

    Raises DatasetError for an unknown name or option, an entry that does not survive JSON, a missing stored answer
    (kind completion), and when the config cannot make so many (distinct) questions of the split.
    """
    budget = _draws(spec)
    source = create_procedural(spec.name, spec.config, size=budget, seed=spec.seed)
    made = 0
    with RepetitionCounter() as seen:
        for index in range(budget):
            entry = _entry(source, spec, index)
            question = entry["question"]
            if not _in_split(question, spec) or (spec.unique and seen.count(_digest(question))):
                continue
            restored = _through_json(spec, entry)
            if made == 0:
                _check_same_verdict(source, spec, entry, restored)
            yield _thread(spec, index, restored, kind)
            made += 1
            if made == spec.size:
                return
    what = ("distinct " if spec.unique else "") + (f"questions of split {spec.split!r}" if _splits(spec) else "rows")
    raise DatasetError(
        f"reasoning-gym {spec.name!r}: given size={spec.size}; only {made} {what} were found in {budget} draws. "
        f"Lower size, widen config, or change heldout_percent."
    )


def create_procedural(name: str, config: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """reasoning-gym's dataset object. Raises DatasetError, ExtraNotInstalled."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ExtraNotInstalled(
            f"the dataset {name!r} needs reasoning-gym, which is not installed here ({error}). "
            f"Install the extra: pip install 'ostinato[gym]'"
        ) from error
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
        raise DatasetError(f"reasoning-gym {name!r} refused config={dict(config)}: {error}") from error


def _splits(spec: ReasoningGymDataset) -> bool:
    return spec.split != "all"


def _draws(spec: ReasoningGymDataset) -> int:
    """How many rows reasoning-gym is asked for. A few of its datasets lay out their rows by their size, so without
    a split this is exactly `size`, and the rows are those that anybody gets from reasoning-gym."""
    if not _splits(spec) and not spec.unique:
        return spec.size
    percent = {"all": 100, "train": 100 - spec.heldout_percent, "heldout": spec.heldout_percent}[spec.split]
    return spec.size * DRAWS_PER_ROW * 100 // percent + 1000


def _entry(source: Any, spec: ReasoningGymDataset, index: int) -> dict[str, Any]:
    try:
        return source[index]
    except Exception as error:
        raise DatasetError(
            f"reasoning-gym {spec.name!r} could not make row {index + 1} under config={spec.config}: {error!r}. "
            f"Lower size, or change config."
        ) from error


def _in_split(question: str, spec: ReasoningGymDataset) -> bool:
    """By the hash of the question alone: no seed, no index, no config."""
    if not _splits(spec):
        return True
    heldout = int(_digest("held-out split\n" + question)[:15], 16) % 100 < spec.heldout_percent
    return heldout == (spec.split == "heldout")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _through_json(spec: ReasoningGymDataset, entry: dict[str, Any]) -> dict[str, Any]:
    """The entry as the verifier will get it from the store: tuples are lists, integer keys are strings."""
    try:
        return json.loads(json.dumps(entry, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise DatasetError(f"reasoning-gym {spec.name!r}: its entries cannot be written as JSON: {error}") from error


def _check_same_verdict(source: Any, spec: ReasoningGymDataset, entry: dict[str, Any], restored: Any) -> None:
    """Where the way through JSON changes the verdict on the stored answer (arc_agi, rearc), rewards would be wrong
    without a word."""
    if entry["answer"] is None:
        return
    before, after = source.score_answer(entry["answer"], entry), source.score_answer(entry["answer"], restored)
    if before != after:
        raise DatasetError(
            f"reasoning-gym {spec.name!r}: its verifier scores the stored answer {before} on the entry and {after} on "
            f"the entry read back from JSON; it cannot be used from a stored dataset. Use another dataset."
        )


def _thread(spec: ReasoningGymDataset, index: int, entry: dict[str, Any], kind: DatasetUse) -> StringThread:
    turns = [("system", spec.system_prompt)] if spec.system_prompt else []
    turns.append(("user", entry["question"]))
    if kind == "completion":
        if not isinstance(entry["answer"], str):
            raise DatasetError(
                f"reasoning-gym {spec.name!r}, row {index + 1}: no stored answer to learn; expected one for kind "
                f"'completion'. Use it as prompts."
            )
        turns.append(("assistant", entry["answer"]))
    metadata = {
        "dataset": spec.name,
        "index": index,
        "answer": entry["answer"],
        "reasoning_gym": {"dataset": spec.name, "config": spec.config, "entry": entry},
    }
    thread = StringThread(turns=turns, metadata=metadata)
    return thread.with_weight_last_assistant_turn() if kind == "completion" else thread
