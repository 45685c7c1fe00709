"""The tasks of the bench: what is trained on what, and what is measured on held-out prompts.

Rows are those of data files (docs/data.md). All seeds of a task have the same rows; the seed decides their order and
what is sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

from bench.learning import calculator
from tasks.datasets.gym import ReasoningGymDataset, generate_threads
from tasks.environments.base import EnvironmentFactory
from tasks.graders.base import BaseGrader
from tasks.graders.gym import ReasoningGymGrader
from tasks.graders.rules import AnswerFrom, ExactMatch, LastNumber, RegexMatch

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
HELDOUT_PERCENT = 30
"""Percentage of the questions of a reasoning-gym dataset that are held out. The easiest ones have few questions."""
SEEDS = (0, 1, 2)
CLIP, BETA_OF_PAIRS = 0.2, 0.1
"""The clip range of GRPO, and beta of DPO and KTO."""

Row = dict[str, Any]
Side = Literal["base", "ours", "trl"]


@dataclass(frozen=True)
class Data:
    """The rows of a task."""

    train: list[Row]
    heldout: list[Row]
    """Prompts, with the metadata that the grader reads."""


@dataclass(frozen=True)
class Task:
    """One training on one set of rows. Both sides have the same settings."""

    name: str
    training: Literal["grpo", "rft", "distill", "sft", "dpo", "kto", "env_grpo"]
    data: Callable[[], Data]
    grader: Callable[[], BaseGrader | EnvironmentFactory]
    """Grades held-out answers, and rewards completions where the training samples. Or an environment, in which held-out
    episodes are played."""
    rows: str
    """What the rows are, as a sentence for the page of results."""
    measures: str
    """What a held-out score is, for the same page."""
    steps: int = 15
    every: int = 5
    """Steps between two models that are measured. For RFT, rounds of `steps` are measured."""
    samples: int = 32
    """Completions, conversations, pairs or labelled answers in a step."""
    completions: int = 8
    """Completions per prompt."""
    lr: float = 3e-5
    new_tokens: int = 20
    pools: bool = False
    """Whether the prompts of a step are drawn by their pass rates."""
    teacher: str = ""
    """The task whose last model, of our side with seed 0, is the teacher."""
    start: str = ""
    """The task whose last model, of our side with seed 0, the training starts from. Empty: the bench's model."""
    sides: tuple[Side, ...] = ("base", "ours", "trl")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a run depends on. A result with other settings does not count."""
        names = ("steps", "every", "samples", "completions", "lr", "new_tokens", "pools")
        return {name: getattr(self, name) for name in names}

    @property
    def samples_completions(self) -> bool:
        """Whether the training samples, so that sampled tokens can be counted."""
        return self.training in ("grpo", "rft", "distill", "env_grpo")

    def __post_init__(self) -> None:
        if self.steps % self.every:
            raise ValueError(f"{self.name}: given steps={self.steps}, every={self.every}; expected a divisor of steps")


# -- rows ----------------------------------------------------------------------------------------------------------


def read_rows(name: str) -> list[Row]:
    """Reads one of the demo's data files."""
    return [json.loads(line) for line in (EXAMPLES / f"sums-{name}.jsonl").read_text().splitlines()]


def gym_rows(name: str, config: dict[str, Any], split: Literal["train", "heldout"], size: int) -> list[Row]:
    """Distinct questions of one reasoning-gym dataset, without those of the other split."""
    spec = ReasoningGymDataset(
        name=name, config=config, size=size, seed=1, split=split, heldout_percent=HELDOUT_PERCENT, unique=True
    )
    return [{"prompt": t.turns[0].content, "metadata": t.metadata} for t in generate_threads(spec)]


def gym_data(name: str, config: dict[str, Any], *, train: int, heldout: int) -> Data:
    return Data(gym_rows(name, config, "train", train), gym_rows(name, config, "heldout", heldout))


def sums(train: str = "train", heldout: int = 112) -> Data:
    """The demo's sums. The held-out rows are shuffled in the file, so the first ones are of all sums and wordings."""
    return Data(read_rows(train), read_rows("heldout")[:heldout])


def tagged_sums() -> Data:
    """The demo's sums with an instruction for the format of the answer."""

    def tagged(row: Row) -> Row:
        answer = str(row["metadata"]["answer"])
        prompt = f"{row['prompt']} Write the result between <answer> and </answer>."
        return {"prompt": prompt, "metadata": {"answer": answer}, "completion": f"<answer>{answer}</answer>"}

    data = sums()
    heldout = [{name: tagged(row)[name] for name in ("prompt", "metadata")} for row in data.heldout]
    return Data([tagged(row) for row in data.train], heldout)


def brief_pairs() -> Data:
    """The demo's sums with a right answer that is only the number, which is preferred, and one that is a sentence."""
    train = []
    for row in read_rows("train"):
        answer = row["metadata"]["answer"]
        train.append({"prompt": row["prompt"], "chosen": f"{answer}", "rejected": f"The result is {answer}."})
    return Data(train, sums().heldout)


def brief_labels() -> Data:
    """One of the two answers of each pair, in turn the preferred one with the label true and the other with false."""
    train = []
    for number, row in enumerate(brief_pairs().train):
        label = number % 2 == 0
        completion = row["chosen" if label else "rejected"]
        train.append({"prompt": row["prompt"], "completion": completion, "label": label})
    return Data(train, sums().heldout)


def tool_data(*, shown: bool) -> Data:
    """Products for the tool environment: questions, or whole episodes that are `shown` to be fine-tuned on."""
    rows = calculator.products(384, Random(0))
    heldout, train = rows[:64], rows[64:]
    return Data([calculator.shown_episode(row) for row in train] if shown else train, heldout)


# -- the table -----------------------------------------------------------------------------------------------------

GYM: dict[str, tuple[dict[str, Any], AnswerFrom]] = {
    "chain_sum": ({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, "last_number"),
    "products": ({"min_digits": 1, "max_digits": 2}, "last_number"),
    "gcd": ({"min_value": 1, "max_value": 30}, "last_number"),
    "lcm": ({"min_value": 1, "max_value": 20}, "last_number"),
    "simple_equations": ({"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9}, "last_number"),
    "count_bits": ({"min_n": 1, "max_n": 255}, "last_number"),
    "letter_counting": ({"min_words": 2, "max_words": 3}, "last_number"),
    "leg_counting": ({"min_animals": 1, "max_animals": 1, "min_instances": 1, "max_instances": 9}, "last_number"),
    "number_format": ({"max_num_candidates": 2, "max_n": 100, "min_n": 1}, "last_number"),
    "spell_backward": ({"min_word_len": 3, "max_word_len": 3}, "whole"),
    "needle_haystack": ({"min_num_statements": 2, "max_num_statements": 3}, "whole"),
    "family_relationships": ({}, "whole"),
    "syllogism": ({}, "whole"),
}
"""The reasoning-gym datasets whose base pass rates are measured, at their easiest settings that give enough distinct
questions, and how their answers are read."""


def gym_grader(name: str) -> BaseGrader:
    return ReasoningGymGrader(answer_from=GYM[name][1], exact=True)


def gym_task(name: str, *, heldout: int = 96) -> Task:
    """GRPO on a reasoning-gym dataset."""
    config, answer_from = GYM[name]
    return Task(
        name=name.replace("_", "-"), training="grpo", data=partial(gym_data, name, config, train=256, heldout=heldout),
        grader=partial(gym_grader, name), rows=f"reasoning-gym's `{name}`, `{json.dumps(config)}`",
        measures=f"right answers ({answer_from.replace('_', ' ')})", new_tokens=24,
    )  # fmt: skip


SUMS = "the demo's one-digit sums in twelve wordings (`examples/make_sums.py`)"
RIGHT_SUMS = "right answers to sums that no training prompt has (last number)"
EPISODES = "episodes whose last answer is the right product"
SUMS_TASKS = (
    Task("sums-grpo", "grpo", sums, LastNumber, SUMS, RIGHT_SUMS, steps=21, every=7),
    Task("sums-pools", "grpo", sums, LastNumber, SUMS, RIGHT_SUMS, steps=21, every=7, pools=True, sides=("ours",)),
    Task(
        "sums-rft", "rft", sums, LastNumber, SUMS, RIGHT_SUMS, steps=3, every=1, samples=216, sides=("ours",)
    ),
    Task(
        "sums-distill", "distill", sums, LastNumber, f"{SUMS}; the teacher is the last model of sums-grpo with seed 0",
        RIGHT_SUMS, steps=21, every=7, completions=1, teacher="sums-grpo", sides=("ours", "trl"),
    ),
)
"""The trainings that docs/algorithms.md compares, all from the same model on the same prompts."""
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        gym_task("chain_sum"),
        *SUMS_TASKS,
        gym_task("gcd"),
        gym_task("products"),
        Task(
            "format-sft", "sft", tagged_sums, partial(ExactMatch, answer_from="answer_tag"),
            "the demo's sums, with the instruction to write the result between `<answer>` and `</answer>`",
            "answers with the right sum in the format", samples=16,
        ),
        Task(
            "brief-dpo", "dpo", brief_pairs, partial(RegexMatch, pattern=r"\d+\.?", full=True),
            "two right answers to each of the demo's sums: the rule prefers the number alone to a sentence",
            "answers that are only a number", samples=8, lr=5e-6,
        ),
        Task(
            "brief-kto", "kto", brief_labels, partial(RegexMatch, pattern=r"\d+\.?", full=True),
            "one answer to each of the demo's sums: by rule, the number alone is desirable and a sentence is not",
            "answers that are only a number", samples=16, lr=5e-6,
        ),
        Task(
            "tool-sft", "sft", partial(tool_data, shown=True), calculator.CalculatorFactory,
            "episodes in which the tool of `bench/learning/calculator.py` is called for a product of two numbers",
            EPISODES, steps=6, every=3, samples=8, new_tokens=48, sides=("base", "ours"),
        ),
        Task(
            "tool-env", "env_grpo", partial(tool_data, shown=False), calculator.CalculatorFactory,
            "products of two numbers, with a tool that multiplies, from the last model of tool-sft (seed 0)",
            EPISODES, steps=12, every=4, samples=16, new_tokens=48, start="tool-sft", sides=("base", "ours"),
        ),
    )
}  # fmt: skip
