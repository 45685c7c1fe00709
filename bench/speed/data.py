"""The data of the benches: docstrings of Python's standard library, as conversations, pairs and prompts.

The rows depend on the Python version and on the tokenizer only.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

MODULES = 120
"""Files of the standard library that are read, in the order of their names."""
SHORTEST, LONGEST = 60, 506
"""Tokens of the shortest and of the longest conversation."""
FILE_ROWS, CHOSEN_ROWS = 20_000, 128
"""Rows of the file of the workload "dataset" (300 bytes each), and those that a step takes of it."""

Row = dict[str, Any]
Count = Callable[[Row], int]
"""Number of tokens of a row: of the whole conversation, or of the prompt if there is no completion."""


@lru_cache(maxsize=1)
def docstrings() -> list[tuple[str, str]]:
    """(name, docstring) of the documented functions and classes, in a fixed shuffled order."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:MODULES]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                found.append((f"{path.stem}.{node.name}", text))
    Random(0).shuffle(found)
    return found


def messages_of(row: Row) -> list[dict[str, str]]:
    """The row as a conversation."""
    messages = [{"role": "user", "content": row["prompt"]}]
    if "completion" in row:
        messages.append({"role": "assistant", "content": row["completion"]})
    return messages


def counter(model: str) -> Count:
    """Returns the function that counts tokens as the chat template of this model folder renders them."""
    from transformers import AutoTokenizer

    # longer texts are only counted, so no warning is needed
    tokenizer = AutoTokenizer.from_pretrained(model, model_max_length=1 << 30)

    def count(row: Row) -> int:
        text = tokenizer.apply_chat_template(
            messages_of(row), tokenize=False, add_generation_prompt="completion" not in row
        )
        return len(tokenizer.encode(text, add_special_tokens=False))

    return count


def conversations(count: Count, rows: int) -> Iterator[Row]:
    """Conversations of mixed length: a question about a name, answered by its docstring."""
    taken = 0
    for name, text in docstrings() * 100:
        row = {"prompt": f"Document {name}.", "completion": text}
        if SHORTEST <= count(row) <= LONGEST:
            yield row
            taken += 1
        if taken == rows:
            return


def pairs(count: Count, rows: int) -> Iterator[Row]:
    """Preference pairs: a docstring is preferred to that of another name."""
    every = list(conversations(count, 2 * rows))
    for chosen, rejected in zip(every[::2], every[1::2], strict=True):
        yield {"prompt": chosen["prompt"], "chosen": chosen["completion"], "rejected": rejected["completion"]}


def long_conversations(count: Count, rows: int, *, tokens: int) -> Iterator[Row]:
    """Conversations of exactly `tokens` tokens, or up to three fewer if no text has that length."""
    for index in range(rows):
        text = long_text(index, characters=8 * tokens)
        yield fitted(count, tokens, lambda part: {"prompt": "Document these names.", "completion": part}, text)


def prompts(count: Count, rows: int, *, tokens: int) -> Iterator[Row]:
    """Prompts of exactly `tokens` tokens, or up to three fewer if no text has that length."""
    for index in range(rows):
        yield fitted(count, tokens, lambda part: {"prompt": part}, long_text(index, characters=8 * tokens))


def long_text(index: int, *, characters: int) -> str:
    """Docstrings one after the other, beginning at another one for each index."""
    every = docstrings()
    parts: list[str] = []
    position, length = 7 * index, 0
    while length < characters:
        name, text = every[position % len(every)]
        parts.append(f"{name}: {text}")
        position, length = position + 1, length + len(parts[-1])
    return "\n".join(parts)


def fitted(count: Count, tokens: int, make: Callable[[str], Row], text: str) -> Row:
    """Returns the row of the longest beginning of `text` with at most `tokens` tokens. Raises ValueError if it has
    fewer than `tokens` - 3."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if count(make(text[:middle])) <= tokens:
            low = middle
        else:
            high = middle - 1
    row = make(text[:low])
    if count(row) < tokens - 3:
        raise ValueError(f"no beginning of the text gives {tokens} tokens; give more than the template takes")
    return row


def file_rows(_: Count, rows: int) -> Iterator[Row]:
    """The workload "dataset": the number of rows of the file, and of the rows that are read from it at random."""
    for _step in range(rows):
        yield {"rows": FILE_ROWS, "chosen": CHOSEN_ROWS}
