"""Writes the demo's prompts, examples/data/sums-{train,heldout}.jsonl: one-digit additions in twelve wordings,
sums-completions.jsonl, the training prompts with their answers, for SFT, and sums-preferences.jsonl, with a right and a
wrong answer each, for DPO and reward models, and sums-labels.jsonl, with one of the two each and its label, for KTO.
Also products-train.jsonl, products of two digits, for a mixture.

The held-out file has sums (unordered pairs of digits) that no training prompt has, in every wording:
what it measures is the skill, not the memory of answers.

    python examples/make_sums.py
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

WORDINGS = (
    "What is {a}+{b}?",
    "What is {a} plus {b}?",
    "{a} + {b} = ?",
    "Calculate {a} + {b}.",
    "Add {a} and {b}.",
    "Find the sum of {a} and {b}.",
    "How much is {a} + {b}?",
    "Tell me the total of {a} and {b}.",
    "Compute {a}+{b} and give the result.",
    "If you add {b} to {a}, what is the result?",
    "What number do you get when you add {a} to {b}?",
    "I have {a} apples and get {b} more. How many apples do I have?",
)
HELDOUT_PAIRS = 15
"""Of the 45 unordered pairs of 1..9; both orders of each are held out."""
DESIRABLE = 0.5
"""Fraction of the labelled answers that are right."""


def main() -> None:
    pairs = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    Random(0).shuffle(pairs)
    folder = Path(__file__).parent / "data"
    for name, part in (("heldout", pairs[:HELDOUT_PAIRS]), ("train", pairs[HELDOUT_PAIRS:])):
        ordered = sorted({order for a, b in part for order in ((a, b), (b, a))})
        rows = [
            {"prompt": wording.format(a=a, b=b), "metadata": {"answer": a + b}}
            for a, b in ordered
            for wording in WORDINGS
        ]
        if name == "heldout":
            Random(1).shuffle(rows)  # so that the report's first samples are of many sums and wordings
        write(folder / f"sums-{name}.jsonl", rows)
        if name == "train":
            answered = [{"prompt": row["prompt"], "completion": str(row["metadata"]["answer"])} for row in rows]
            write(folder / "sums-completions.jsonl", answered)
            preferences = [preference(row, Random(n)) for n, row in enumerate(rows)]
            write(folder / "sums-preferences.jsonl", preferences)
            write(folder / "sums-labels.jsonl", [labelled(row, Random(n)) for n, row in enumerate(preferences)])
    digits = range(1, 10)
    products = [{"prompt": f"What is {a}*{b}?", "metadata": {"answer": a * b}} for a in digits for b in digits]
    write(folder / "products-train.jsonl", products)


def preference(row: dict[str, Any], source: Random) -> dict[str, str]:
    """The right sum, and one that is off by 1 to 3."""
    answer = row["metadata"]["answer"]
    wrong = answer + source.choice([-3, -2, -1, 1, 2, 3])
    return {"prompt": row["prompt"], "chosen": str(answer), "rejected": str(wrong)}


def labelled(pair: dict[str, str], source: Random) -> dict[str, Any]:
    """One of the two answers of a preference, with its label."""
    label = source.random() < DESIRABLE
    return {"prompt": pair["prompt"], "completion": pair["chosen" if label else "rejected"], "label": label}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
