"""Measures how fast conversations of a dataset become token ids, in units of the tokenizers library's own speed.

    python bench/tokenising.py [--model FOLDER] [--tokens 2000000] [--out FILE]      (default model: SmolLM2-135M)

A run tokenises the rows of its next batch and no others, so it begins at once, and a batch that is committed is not
tokenised again. The bench generates conversations of English-like words, commits them as a dataset, and takes batches
in the shuffled order of a run. It measures CPU-seconds of one thread. For every thousand rows, the library
and ours take turns, and each is first every other time:

    library       `encode_batch` of the tokenizers library on the text that the chat template makes
    tokenise      the same rows from JSON to token ids and loss weights: template, ids, borders of the turns
    read          reading the rows of the batch from the dataset
    batch         the rows as the table of a batch, in Parquet
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.grpo_work import PROVENANCE, SMOLLM, require_model
from engine.text.rendering import Renderer
from engine.text.threads import StringThread
from engine.text.tokenizers import load_tokenizer
from storage.store.objects import open_store
from storage.store.schemas import table_schema
from storage.store.tables import commit_table, read_rows
from tasks.batches.rl import sequence_row
from tasks.datasets.load import load_dataset
from tasks.datasets.order import DataCursor, shuffled
from tasks.datasets.spec import FileDataset

ROWS_PER_TURN = 1000
SYLLABLES = ("ba", "con", "de", "er", "fi", "gra", "ho", "in", "ka", "lo", "ment", "ne", "pre", "qui", "re", "sta")


def write_conversations(path: Path, tokens: int) -> None:
    """Writes conversations of one to three exchanges, of about `tokens` tokens in all."""
    source = random.Random(1)
    vocabulary = ["".join(source.choices(SYLLABLES, k=source.choice((1, 1, 2, 3)))) for _ in range(20_000)]

    def text(words: int) -> str:
        return " ".join(source.choices(vocabulary, k=words)) + source.choice((".", "?", ".\n"))

    written = 0
    with path.open("w") as file:
        while written < tokens:
            messages = []
            for _ in range(source.choice((1, 1, 2, 3))):
                question, answer = source.randrange(10, 60), source.randrange(20, 200)
                messages += [{"role": "user", "content": text(question)}]
                messages += [{"role": "assistant", "content": text(answer)}]
                written += 2 * (question + answer)
            file.write(json.dumps({"messages": messages}) + "\n")


class CpuTimes:
    """Adds up CPU-seconds by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds[name] += time.process_time() - started


def template_text(renderer: Renderer, record: dict[str, Any]) -> str:
    messages = StringThread.from_json(record["thread"]).messages()
    return renderer.tokenizer.apply_chat_template(messages, generation_prompt=False)


def encode(library: Any, texts: list[str], times: CpuTimes) -> None:
    with times.of("library"):
        library.encode_batch(texts, add_special_tokens=False)


def measure(folder: Path, model: Path, tokens: int, batch_rows: int) -> dict[str, Any]:
    write_conversations(folder / "rows.jsonl", tokens)
    store = open_store(str(folder / "store"))
    data = load_dataset(store, FileDataset(path=str(folder / "rows.jsonl")), use="completion", provenance=PROVENANCE)
    renderer = Renderer(load_tokenizer(model))
    # what the bench compares with
    library: Any = renderer.tokenizer._tokenizer.backend_tokenizer
    order = shuffled(data.rows, seed=0)
    times, cursor, counted = CpuTimes(), DataCursor(), 0
    for turn in range(max(1, data.rows // ROWS_PER_TURN)):
        # read the rows of some batches
        batches = []
        for _ in range(0, ROWS_PER_TURN, batch_rows):
            rows, cursor = order.take(cursor, batch_rows)
            with times.of("read"):
                batches.append(read_rows(store, data.ref, rows))
        # the tokenizer remembers words, so the first of the two ways is slower: they take turns
        texts = [template_text(renderer, record) for records in batches for record in records]
        if turn % 2:
            encode(library, texts, times)
        for records in batches:
            with times.of("tokenise"):
                threads = [StringThread.from_json(record["thread"]) for record in records]
                sequences = [renderer.sequence(tokenized) for tokenized in renderer.tokenize_all(threads)]
            with times.of("batch"):
                pairs = zip(records, sequences, strict=True)
                table_rows = [sequence_row(renderer, sequence, record["id"]) for record, sequence in pairs]
                table = pa.Table.from_pylist(table_rows, schema=table_schema("batch"))
                commit_table(store, f"datasets/bench/{counted}", table, kind="batch", provenance=PROVENANCE)
            counted += sum(len(sequence.token_ids) for sequence in sequences)
        if not turn % 2:
            encode(library, texts, times)
    rates = {name: round(counted / seconds) for name, seconds in times.seconds.items()}
    share = times.seconds["library"] / times.seconds["tokenise"]
    return {
        "rows": data.rows,
        "tokens": counted,
        "tokens_per_cpu_second": rates,
        "tokenise_of_library": round(share, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--batch-rows", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as folder:
        result = measure(Path(folder), require_model(options.model), options.tokens, options.batch_rows)
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
