"""Measures how long a dataset of a million rows takes to load, and how soon a run on it chooses its first prompts.

    python bench/dataset_loading.py [--rows 1000000] [--row-bytes 300] [--format jsonl] [--folder FOLDER] [--out FILE]

It generates a JSON lines or Parquet file of prompts. Each measurement is a process of its own:

    first         the file is loaded for the first time
    again         the same file, unchanged: it is recognised
    touched       the same file with another modification time: it is recognised by its sha256
    registered    the dataset by its name (kind: registered)

A process imports what a run imports, loads the dataset, reads the rows that the estimate of a run reads, and takes the
first 128 prompts of the shuffled order. "seconds" counts from the load to these prompts, "imports" is before that.
"growth" is the growth of the peak memory after the imports, "peak" is the peak of the whole process. "resumed" is the
peak of a process that finds the dataset loaded and takes prompts in the middle of the second epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

PROMPTS = 128
ROW_BYTES = 300
"""Bytes of a row of prompts."""
WORDS = "the sum of two numbers is asked here and a model answers with one line of text explain how many apples"


def prompts(rows: int, row_bytes: int) -> Iterator[str]:
    """Different prompts of about `row_bytes` bytes, the same for every call."""
    source = random.Random(1)
    passages = [" ".join(source.choices(WORDS.split(), k=row_bytes // 5)) for _ in range(5000)]
    for index in range(rows):
        yield f"{index}: {passages[source.randrange(len(passages))]}"


def write_rows(path: Path, rows: int, row_bytes: int = ROW_BYTES) -> None:
    """Writes a file of prompts in the format of its suffix."""
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            for index, prompt in enumerate(prompts(rows, row_bytes)):
                file.write(json.dumps({"prompt": prompt, "id": index}) + "\n")
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = prompts(rows, row_bytes)
    with pq.ParquetWriter(path, pa.schema([("prompt", pa.string())]), compression="none") as writer:
        while block := list(islice(source, 10_000)):
            writer.write_table(pa.table({"prompt": block}))


def measure(spec: dict[str, Any], store_url: str, *, resumed: bool = False) -> dict[str, Any]:
    """Loads the dataset in this process and takes the first prompts."""
    started = time.time()
    from pydantic import TypeAdapter

    from flows.runs.estimate import _mean_row_tokens
    from flows.training.rollout_loop import RolloutLoop  # noqa: F401 - what a run imports
    from storage.store.artifacts import Provenance
    from storage.store.objects import open_store
    from storage.store.tables import read_rows
    from tasks.datasets.load import load_dataset
    from tasks.datasets.order import DataCursor, shuffled
    from tasks.datasets.spec import DatasetSource

    imported, imported_kib = time.time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = time.process_time()
    store = open_store(store_url)
    provenance = Provenance(code_version="bench", config_digest="0" * 64, seed=0)
    source: Any = TypeAdapter(DatasetSource).validate_python(spec)
    data = load_dataset(store, source, provenance=provenance)
    loaded = time.time()
    _mean_row_tokens(store, data)
    # a new run begins with the first rows, a resumed one continues where its last step ended
    cursor = DataCursor(epoch=1, index=data.rows // 2) if resumed else DataCursor()
    rows, _ = shuffled(data.rows, seed=0).take(cursor, PROMPTS)
    first_prompts = read_rows(store, data.ref, rows)
    finished, peak_kib = time.time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(first_prompts) == PROMPTS
    return {
        "rows": data.rows,
        "new": data.new,
        "imports": round(imported - started, 2),
        "load": round(loaded - imported, 2),
        "seconds": round(finished - imported, 2),
        "cpu": round(time.process_time() - cpu, 2),
        "rows_per_second": round(data.rows / (loaded - imported)),
        "growth_mib": round((peak_kib - imported_kib) / 1024),
        "peak_mib": round(peak_kib / 1024),
        "dataset": data.ref.key,
    }


def in_a_process(spec: dict[str, Any], store_url: str, *, resumed: bool = False) -> dict[str, Any]:
    """Runs `measure` in a new process."""
    # A process that aborts at its exit fails the bench, and prints the stacks of its threads.
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        __file__,
        "--worker",
        json.dumps(spec),
        store_url,
        str(int(resumed)),
    ]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--row-bytes", type=int, default=ROW_BYTES)
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--folder", help="folder of the file and the store; default: a temporary one")
    parser.add_argument("--out", help="JSON file for the figures")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        spec, store_url, resumed = arguments.worker
        print(json.dumps(measure(json.loads(spec), store_url, resumed=resumed == "1")), flush=True)
        return

    with tempfile.TemporaryDirectory(prefix="ostinato-bench-", dir=arguments.folder) as folder:
        path, store_url = Path(folder, f"big.{arguments.format}"), str(Path(folder, "store"))
        write_rows(path, arguments.rows, arguments.row_bytes)
        print(f"{arguments.rows:,} rows, {path.stat().st_size / 1e6:.0f} MB; load average {os.getloadavg()[0]:.1f}")
        file_spec = {"kind": "file", "path": str(path)}
        # the times of a file that was just written are not trusted
        time.sleep(3)
        results = {"first": in_a_process(file_spec, store_url), "again": in_a_process(file_spec, store_url)}
        results["resumed"] = in_a_process(file_spec, store_url, resumed=True)
        os.utime(path, (1, 1))
        results["touched"] = in_a_process(file_spec, store_url)
        results["registered"] = in_a_process({"kind": "registered", "key": "big"}, store_url)
    for name, result in results.items():
        print(name, json.dumps(result))
    assert len({result["dataset"] for result in results.values()}) == 1
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
