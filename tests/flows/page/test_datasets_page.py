"""The section Datasets: uploads of every format, refusals, previews, and the runs that used a dataset."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.chain.run_record import create_or_check_run
from storage.registry.datasets import list_datasets
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.page import HOSTILE, PageClient

ROWS = [{"question": f"{n}+{n}?", "answer": str(2 * n)} for n in range(30)]
COLUMNS = {"columns": "{prompt: question}", "metadata_columns": "[answer]"}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "store")


@pytest.fixture
def page(store: ObjectStore) -> PageClient:
    return PageClient(store.url)


def parquet(rows: list[dict[str, str]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


FORMATS = {
    "sums.jsonl": "\n".join(map(json.dumps, ROWS)).encode(),
    "sums.json": json.dumps(ROWS).encode(),
    "sums.csv": b"question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in ROWS).encode(),
    "sums.PARQUET": parquet(ROWS),
}


def test_every_format_is_the_same_version_and_its_rows_are_shown(page: PageClient, store: ObjectStore) -> None:
    places = {page.done("/datasets", {"file": (name, data)}, use="prompt", **COLUMNS) for name, data in FORMATS.items()}
    assert len(places) == 1 and len(list_datasets(store)) == 1
    (place,) = places
    text = page.text(place)
    assert "Rows 1 to 20" in text and "19+19?" in text and "20+20?" not in text and "{&#34;answer&#34;" in text
    assert "Rows 21 to 30" in page.text(f"{place}?start=20") and page.get(f"{place}?start=-5").status_code == 200
    assert page.get(f"{place}?start=9999999999").status_code == 200
    assert "sums" in page.text("/datasets") and "/tmp" not in text and "ostinato-upload" not in text


def test_a_tool_call_is_shown(page: PageClient) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "assistant", "content": "It is 2."},
    ]
    row = {"messages": messages, "tools": [{"type": "function", "function": {"name": "add"}}]}
    place = page.done("/datasets", {"file": ("calls.jsonl", json.dumps(row).encode())}, use="completion")
    assert "add({&#34;a&#34;: 1})" in page.text(place)


def test_a_training_is_offered_with_the_dataset_filled_in(page: PageClient) -> None:
    place = page.done("/datasets", {"file": ("sums.jsonl", FORMATS["sums.jsonl"])}, use="prompt", **COLUMNS)
    trainings = re.findall(r">Train (\w+)<", page.text(place))
    assert trainings == ["grpo", "gspo", "ppo", "distill", "env_grpo", "env_gspo", "env_ppo", "rft"]
    link = page.text(place).partition('href="/start?training=grpo')[2].partition('"')[0].replace("&amp;", "&")
    key = place.removeprefix("/datasets/").replace("/", "@")
    value = f"{{kind: registered, key: {key}}}"
    assert parse_qs(link.lstrip("&"))["data.train"] == [value]
    assert f'value="{value}"' in page.text(f"/start?training=grpo{link}")


def test_columns_that_were_not_read_are_named_once(page: PageClient) -> None:
    row = json.dumps({"prompt": "1+1?", "completion": "2", "level": "<b>"}).encode()
    place = page.done("/datasets", {"file": ("sums.jsonl", row)}, use="prompt")
    assert "Columns that were not read: completion, level." in page.text(place)
    # later visits and rows do not repeat it
    assert "not read" not in page.text(place.partition("?")[0])
    # a use that reads the column, with the other one kept
    place = page.done("/datasets", {"file": ("sums.jsonl", row)}, use="completion", metadata_columns="[level]")
    assert "?" not in place and "not read" not in page.text(place)
    assert "&lt;b&gt;" in page.text(f"{place}?unread=%3Cb%3E")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("sums.exe", b"MZ", "expected one of .jsonl"),
        ("sums.parquet", b"PAR1 cut off", "is not Parquet, or is cut off"),
        ("sums.parquet", b"PAR1" + b"\xff" * 50 + b"PAR1", "not Parquet, or is damaged"),
        ("sums.jsonl", FORMATS["sums.PARQUET"], "a Parquet file; expected what its suffix"),
        ("sums.jsonl", b"{", "sums.jsonl, row 1: given"),
        ("sums.jsonl", b'{"other": 1}', "row 1"),
        ("sums.jsonl", b"", "given no rows"),
        ("sums.csv", b"\xff\xfe", "cannot be read as CSV"),
    ],
)
def test_a_bad_file_is_refused_and_what_was_typed_stays(
    page: PageClient, store: ObjectStore, name: str, data: bytes, message: str
) -> None:
    refused = page.post("/datasets", {"file": (name, data)}, use="completion", columns="{prompt: question}")
    assert refused.status_code == 422 and message in refused.text, refused.text
    assert 'value="{prompt: question}"' in refused.text and '<option value="completion" selected>' in refused.text
    assert "ostinato-upload" not in refused.text and list_datasets(store) == []


@pytest.mark.parametrize("fields", [
    {"use": "prompt"}, {"use": "nonsense", "path": "a/b"}, {"use": "prompt", "path": "../no/hub"},
    {"use": "prompt", "path": "a/b", "columns": "{nonsense: x}"}, {"use": "prompt", "path": "a/b", "columns": "{"},
])  # fmt: skip
def test_wrong_settings_are_said_before_anything_is_read(page: PageClient, fields: dict[str, str]) -> None:
    refused = page.post("/datasets", {}, **fields)
    assert refused.status_code == 422 and "Nothing was added" in refused.text


@pytest.mark.parametrize("name", ['a"b.jsonl', "x/../y.jsonl", "smörgås.jsonl", "数据.jsonl", "...jsonl", "a\\b.jsonl"])
def test_odd_file_names_are_names_of_datasets(page: PageClient, store: ObjectStore, name: str) -> None:
    page.done("/datasets", {"file": (name, b'{"prompt": "1+1"}')}, use="prompt")
    (dataset,) = list_datasets(store)
    assert page.get(f"/datasets/{dataset.name}/{dataset.version}").status_code == 200


def test_bad_rows_are_left_out_if_asked_and_hostile_rows_are_text(page: PageClient, store: ObjectStore) -> None:
    data = json.dumps({"prompt": HOSTILE}).encode() + b"\n{}\n" + json.dumps({"prompt": "x" * 1_000_000}).encode()
    place = page.done("/datasets", {"file": ("odd.jsonl", data)}, use="prompt", skip="yes")
    text = page.text(place)
    assert "&lt;script&gt;document" in text and "<script>document" not in text
    assert "Why rows were skipped" in text and len(text) < 100_000


def test_pairs_stand_next_to_each_other_and_runs_are_named(page: PageClient, store: ObjectStore) -> None:
    pair = json.dumps({"prompt": "2+2?", "chosen": "4", "rejected": "5"}).encode()
    place = page.done("/datasets", {"file": ("pairs.jsonl", pair)}, use="preference")
    assert "None in this store" in page.text(place)
    (dataset,) = list_datasets(store)
    create_or_check_run(
        store, "tuned", semantic={"inputs": {"dataset": dataset.ref.sha256}}, other={}, code_version="test"
    )
    evaluated = {"inputs": {"models": {"m@1": "a" * 64}, "datasets": {"heldout": dataset.ref.sha256}, "answers": []}}
    create_or_check_run(store, "evaluated", semantic=evaluated, other={}, code_version="test")
    text = page.text(place)
    assert 'href="/runs/evaluated"' in text
    assert "<b>chosen</b>" in text and "<b>rejected</b>" in text and 'href="/runs/tuned"' in text


@pytest.mark.parametrize("name", ["ä", "..%2F..", "%22", "<script>", "absent"])
def test_unknown_datasets_are_refused_in_words(page: PageClient, name: str) -> None:
    for path in (f"/datasets/{name}/1", f"/datasets/absent/{name}"):
        assert page.get(path).status_code == 404
