"""Damaged and hostile Parquet files, as datasets and as tables of stored answers, for the fuzz campaign."""

from __future__ import annotations

import datetime
import decimal
import functools
import io
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import StorageError
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import load_dataset
from tasks.datasets.spec import FileDataset
from tests.fuzz.inputs import Input

PROVENANCE = Provenance(code_version="fuzz", config_digest="0" * 64, seed=0)
EXTREMES = (0, 1, 2, 127, 128, 255, 1 << 15, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
COMPRESSIONS = ("none", "snappy", "gzip", "zstd", "lz4", "brotli")
SUM = [{"role": "user", "content": "1+1"}]


def _nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def _odd_columns() -> list[pa.Array]:
    """Columns of types that are no text, number or list of text."""
    day = datetime.datetime(9999, 12, 31)
    return [
        pa.array([datetime.timedelta(days=1), None]),
        pa.array([2**62, -(2**62)], pa.duration("s")),
        pa.array([2**62, -(2**62)], pa.timestamp("ns")),
        pa.array([2**62, -(2**62)], pa.timestamp("s", tz="UTC")),
        pa.array([2**31 - 1, -(2**31)], pa.date32()),
        pa.array([day, None], pa.timestamp("us", tz="Mars/Olympus")),
        pa.array([datetime.time(1, 2, 3), None]),
        pa.array([decimal.Decimal("1.5"), decimal.Decimal("-99999999999999999999999999.9")]),
        pa.array([b"\xff\xfe", b"\0"]),
        pa.array(["x" * 70_000, None]),
        pa.array([float("nan"), float("inf")]),
        pa.array([{"a": 1, "b": [{"c": b"x"}]}, None]),
        pa.array([[("k", 1), ("k", 2)], []], pa.map_(pa.string(), pa.int64())),
        pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)),
        pa.array(["a", "b"]).dictionary_encode(),
        pa.array(["a", "b"], pa.string_view()),
        pa.array([None, None], pa.null()),
        pa.array([2**64 - 1, 0], pa.uint64()),
        pa.array([1, 2], pa.float16()) if hasattr(pa, "float16") else pa.array([1, 2]),
        pa.array([True, None]),
    ]


def _repeated(offsets: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(offsets, pa.array(np.zeros(offsets[-1].as_py(), np.int64)))


@functools.cache
def _odd() -> list[pa.Array]:
    return _odd_columns()


def _table(draw: random.Random, kind: str) -> pa.Table:
    """A table of a dataset, or one with a column of an odd type, deep lists, long lists, or many equal large values."""
    rows = draw.choice((1, 2, 20, 600))
    columns: dict[str, Any] = {"prompt": pa.array([f"{number}+1" for number in range(rows)])}
    shape = draw.randrange(8)
    if shape == 1:
        columns = {"prompt": draw.choice(_odd())}
    elif shape == 2:
        columns = {"prompt": pa.array(["a", "b"]), "metadata": draw.choice(_odd()), "completion": draw.choice(_odd())}
    elif shape == 3:
        deep = _nested(draw.choice((1, 3, 20, 90, 250)), 1)
        columns = {draw.choice(("prompt", "messages", "metadata")): pa.array([deep]), "x": pa.array([1])}
    elif shape == 4:
        # few bytes in the file, and many in memory
        text = draw.choice("ab") * draw.choice((10_000, 1 << 20, 8 << 20, 70 << 20))
        indices = pa.array([0] * min(draw.choice((5, 60, 600, 3000)), (200 << 20) // len(text)), pa.int32())
        columns = {"prompt": pa.DictionaryArray.from_arrays(indices, [text])}
        if draw.random() < 0.3:
            columns = {"messages": pa.array([[{"role": "user", "content": text}] * draw.choice((1, 9))])}
    elif shape == 5:
        columns = {"messages": pa.array([SUM] * rows), "score": pa.array([1.0] * rows)}
    elif shape == 6:
        return pa.table({})
    elif shape == 7:
        # lists of equal numbers, of which few bytes can be any number
        offsets = pa.array([0, draw.choice((5, 10**5, 10**7))], pa.int32())
        columns = {"prompt": pa.array(["a"]), "metadata": _repeated(offsets)}
    if kind == "stored answers" and draw.random() < 0.7:
        count = len(next(iter(columns.values())))
        columns |= {"completion": pa.array(["2"] * count), "answer": pa.array(["2"] * count)}
    if "prompt" in columns and draw.random() < 0.3:
        name = draw.choice(("answer", "messages", "a" * 5000, "", "\u202e", "metadata.x"))
        columns[name] = pa.array(["1"] * len(columns["prompt"]))
    return pa.table(columns)


def case(kind: str, seed: int, number: int) -> bytes:
    draw = random.Random(f"{seed}/{kind}/{number}")
    sink = io.BytesIO()
    table = _table(draw, kind)
    try:
        pq.write_table(
            table, sink, compression=draw.choice(COMPRESSIONS), data_page_version=draw.choice(("1.0", "2.0")),
            use_dictionary=draw.random() < 0.7, row_group_size=draw.choice((1, 100,
            10_000)) if len(table) < 100 else None,
            write_page_checksum=draw.random() < 0.3,
        )  # fmt: skip
    except (pa.ArrowException, OSError):
        return case(kind, seed, number + 10**9)  # Parquet does not have the type
    data = bytearray(sink.getvalue())
    for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
        _damage(data, draw)
    return bytes(data)


def _damage(data: bytearray, draw: random.Random) -> None:
    """Changes bytes of the footer (where the thrift metadata is), of the pages, or anywhere."""
    if len(data) < 16:
        return
    footer = min(struct.unpack_from("<I", data, len(data) - 8)[0], len(data) - 12)
    start, end = draw.choice(
        ((len(data) - 8 - footer, len(data) - 8), (4, 60), (0, len(data)), (len(data) - 8, len(data)))
    )
    start, end = max(start, 0), min(max(end, 1), len(data))
    place = draw.randrange(start, max(end, start + 1)) if start < len(data) else len(data) - 1
    action = draw.randrange(6)
    if action <= 1:
        data[place] ^= 1 << draw.randrange(8)
    elif action == 2:
        data[place] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    elif action == 3 and place + 4 <= len(data):
        struct.pack_into("<I", data, place, draw.choice(EXTREMES))
    elif action == 4:
        # a varint of thrift that announces a large number
        data[place : place + draw.randint(1, 5)] = b"\xff\xff\xff\xff\x0f"[: draw.randint(1, 5)]
    elif draw.random() < 0.5:
        del data[place : place + draw.randint(1, 40)]
    else:
        data[place:place] = draw.randbytes(draw.randint(1, 40))


def use_dataset(data: bytes, folder: Path) -> None:
    file = folder / "x.parquet"
    file.write_bytes(data)
    load_dataset(open_store(folder / "store"), FileDataset(path=str(file)), provenance=PROVENANCE)


def use_answers(data: bytes, folder: Path) -> None:
    file = folder / "x.parquet"
    file.write_bytes(data)
    source = FileDataset(path=str(file), columns={"metadata": "answer"} if len(data) % 2 else {})
    load_dataset(open_store(folder / "store"), source, use="completion", provenance=PROVENANCE)


INPUTS = {
    "parquet": Input(functools.partial(case, "parquet"), use_dataset, (StorageError, DatasetError)),
    "stored answers": Input(functools.partial(case, "stored answers"), use_answers, (StorageError, DatasetError)),
}
