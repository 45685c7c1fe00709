"""Tests of reasoning-gym rows: seeded, split by question, with an error where a question cannot be made."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from engine.text.threads import StringThread
from tasks.datasets import gym
from tasks.datasets.errors import DatasetError, ExtraNotInstalled
from tasks.datasets.gym import generate_threads
from tasks.datasets.spec import ReasoningGymDataset

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sums(**fields: Any) -> ReasoningGymDataset:
    return ReasoningGymDataset(**({"name": "chain_sum", "size": 20, "config": SUMS} | fields))


def questions(spec: ReasoningGymDataset) -> list[str]:
    return [thread.last_content() for thread in generate_threads(spec)]


def test_rows_are_reasoning_gyms_own() -> None:
    import reasoning_gym

    theirs = reasoning_gym.create_dataset("chain_sum", size=5, seed=3, **SUMS)
    ours = list(generate_threads(sums(size=5, seed=3)))
    assert [thread.last_content() for thread in ours] == [entry["question"] for entry in theirs]
    first = dict(ours[0].metadata)
    assert (first["dataset"], first["index"], first["answer"]) == ("chain_sum", 0, theirs[0]["answer"])
    assert first["reasoning_gym"]["config"] == SUMS


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_in_another_process() -> None:
    code = (
        "from tasks.datasets.gym import generate_threads; from tasks.datasets.spec import ReasoningGymDataset as D\n"
        "for name in ('chain_sum', 'gcd', 'products', 'count_bits', 'basic_arithmetic'):\n"
        "    print(*[t.to_json() for t in generate_threads(D(name=name, size=3, seed=5))], sep='\\n')"
    )

    def run(hash_seed: str) -> bytes:
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout

    assert len(run("1").splitlines()) == 15 and run("1") == run("2")


def test_system_prompt_and_completions() -> None:
    (prompt,) = generate_threads(sums(size=1, system_prompt="Answer with a number."))
    assert prompt.messages()[0]["content"] == "Answer with a number." and len(prompt.messages()) == 2
    (pair,) = generate_threads(sums(size=1), use="completion")
    assert pair.last_content() == pair.metadata["answer"] and int(pair.last_content()) in range(-9, 19)
    assert [weight > 0 for weight in pair.get_turn_weights()] == [False, True]


@pytest.mark.parametrize("unique", [False, True])
def test_held_out_questions_never_occur_in_training(unique: bool) -> None:
    """Over seeds that overlap: seed 1 is seed 0 moved by one row."""
    train = sums(split="train", heldout_percent=20, unique=unique, size=100)
    seen = {question for seed in range(3) for question in questions(train.model_copy(update={"seed": seed}))}
    held = {
        question for seed in range(3) for question in questions(train.held_out(16).model_copy(update={"seed": seed}))
    }
    assert len(seen) > 60 and len(held) >= 10 and not seen & held


def test_the_share_held_out_is_the_percent() -> None:
    spec = ReasoningGymDataset(name="chain_sum", size=2000, seed=0, config={"min_digits": 4, "max_digits": 4})
    held = sum(gym._in_split(question, spec.model_copy(update={"split": "heldout"})) for question in questions(spec))
    assert 150 < held < 250  # 200 expected, standard deviation 13


def test_unique_drops_repeated_questions() -> None:
    assert len(set(questions(sums(size=120)))) < 120
    unique = questions(sums(size=120, unique=True))
    assert len(unique) == len(set(unique)) == 120


def test_not_enough_questions_is_an_error() -> None:
    """There are 200 sums and differences of two digits."""
    with pytest.raises(DatasetError, match=r"given size=300; only 200 distinct rows were found.*Lower size"):
        list(generate_threads(sums(size=300, unique=True)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "chain_sums"}, "no dataset 'chain_sums'. Did you mean chain_sum"),
        ({"name": "zzzz"}, "It has"),
        ({"config": {"terms": 2}}, r"given the options \['terms'\]; expected any of .*max_terms"),
        ({"config": {"min_terms": 0}}, "rejected config.*min_terms must be positive"),
        ({"name": "decimal_arithmetic", "config": {"max_num_decimal_places": 2}}, "could not make row 1.*empty range"),
        ({"name": "arc_agi", "config": {}}, "read back from JSON"),
    ],
)
def test_what_cannot_be_made_says_why(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        list(generate_threads(sums(**fields)))


def test_no_stored_answer_is_no_completion() -> None:
    spec = ReasoningGymDataset(name="rubiks_cube", size=1)
    assert len(list(generate_threads(spec))) == 1
    with pytest.raises(DatasetError, match="row [1-9][0-9]*: no stored answer"):
        list(generate_threads(spec, use="completion"))


def test_without_the_extra_the_error_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ExtraNotInstalled, match=r"ostinato\[gym\]"):
        list(generate_threads(sums()))


def test_specs_refuse_what_would_have_no_effect() -> None:
    with pytest.raises(ValidationError, match="expected it as a field of its own"):
        sums(config={"seed": 1})
    with pytest.raises(ValueError, match="expected 'train'"):
        sums(split="all").held_out(5)


def test_importing_the_adapter_does_not_import_reasoning_gym() -> None:
    code = "import tasks.datasets.gym, tasks.graders.gym, sys; assert 'reasoning_gym' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


def test_threads_hold_their_metadata_as_json() -> None:
    (thread,) = generate_threads(sums(size=1))
    assert StringThread.from_json(thread.to_json()).metadata["answer"] == thread.metadata["answer"]
