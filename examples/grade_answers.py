"""Grades answers that are stored already: an export of two systems, with a grader of its own. No engine is needed.

    python examples/grade_answers.py
"""

import asyncio
import json
import tempfile
from pathlib import Path

from engine.text.threads import StringThread
from flows.configs.evaluation import EvaluationFlowConfig
from flows.evaluation import evaluation
from tasks.graders import Grade

# prompt, capital, answers of the two systems
EXPORT = [
    ("What is the capital of France?", "Paris", ["Paris", "It is Paris.", "Lyon"], ["Paris", "Paris", "Paris"]),
    ("What is the capital of Italy?", "Rome", ["Milan", "Milan", "Rome"], ["Rome", "Naples", "I think Rome"]),
    ("What is the capital of Spain?", "Madrid", ["Madrid", "Seville", "Madrid"], ["Madrid", "Madrid", "Toledo"]),
]


def last_word(thread: StringThread) -> Grade:
    """1.0 if the answer ends with the capital. The last word is what a majority vote compares."""
    word = thread.last_content().rstrip(". ").split(" ")[-1]
    return Grade(value=float(word == thread.metadata["capital"]), grader_key="last_word", answer=word)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "export.jsonl"
        rows = [
            {"prompt": prompt, "metadata": {"capital": capital}, "old": old, "new": new}
            for prompt, capital, old, new in EXPORT
        ]
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"kind": "file", "path": str(table)}
        config = EvaluationFlowConfig.model_validate(
            {
                "answers": [
                    {"name": system, "dataset": "capitals", "source": source, "column": system}
                    for system in ("old", "new")
                ],
                "suite": {
                    "graders": [{"name": "last-word", "path": "grade_answers:last_word"}],
                    "pass_at": [1, 3],
                    "majority_vote": True,
                },
                "storage": {"url": f"{folder}/data"},
            }
        )
        for score in asyncio.run(evaluation(config))["scores"]:
            print(f"{score['model']}  {score['grader']}  {score['mean']:.3f}")


if __name__ == "__main__":
    main()
