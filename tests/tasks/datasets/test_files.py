"""Tests of JSON Lines and Parquet files: which rows are read, and the error of each kind of bad row."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from tasks.datasets.errors import BadRow, DatasetError, DatasetNotFound
from tasks.datasets.load import MAX_REASONS, SkippedRows
from tasks.datasets.sources import file_formats
from tasks.datasets.spec import FileDataset
from tests.fixtures.dataset_rows import read_threads


def jsonl(tmp_path: Path, *lines: object, name: str = "data.jsonl") -> str:
    file = tmp_path / name
    file.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return str(file)


def parquet(tmp_path: Path, rows_: list[dict[str, Any]], name: str = "data.parquet", **options: Any) -> str:
    file = tmp_path / name
    pq.write_table(pa.Table.from_pylist(rows_), file, **options)
    return str(file)


def turns(spec: FileDataset, **options: Any) -> list[list[tuple[str, str]]]:
    return [[(turn["role"], turn["content"]) for turn in thread.messages()] for thread in read_threads(spec, **options)]


def test_prompt_rows(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "1+1", "metadata": {"answer": 2}}, {"prompt": "2+2"})
    threads = list(read_threads(FileDataset(path=path)))
    assert [thread.last_content() for thread in threads] == ["1+1", "2+2"]
    assert [dict(thread.metadata) for thread in threads] == [{"answer": 2}, {}]


def test_messages_rows_and_system_prompt(tmp_path: Path) -> None:
    own_system_messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}]
    path = jsonl(tmp_path, {"messages": own_system_messages}, {"messages": own_system_messages[1:]})
    assert turns(FileDataset(path=path, system_prompt="T")) == [
        [("system", "S"), ("user", "a")],
        [("system", "T"), ("user", "a")],
    ]


def test_completion_rows_train_the_completion_only(tmp_path: Path) -> None:
    prompt = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    path = jsonl(tmp_path, {"prompt": prompt, "completion": "d"})
    (thread,) = read_threads(FileDataset(path=path, system_prompt="S"), use="completion")
    assert [turn["role"] for turn in thread.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert [weight > 0 for weight in thread.get_turn_weights()] == [False, False, False, False, True]


def test_messages_completions_train_every_assistant_turn(tmp_path: Path) -> None:
    messages = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")]
    (thread,) = read_threads(FileDataset(path=jsonl(tmp_path, {"messages": messages})), use="completion")
    assert [weight > 0 for weight in thread.get_turn_weights()] == [False, True, False, True]


def test_column_mapping_and_metadata_columns(tmp_path: Path) -> None:
    data = [{"question": "q", "reply": "r", "answer": 4, "other": 1}]
    spec = {"columns": {"prompt": "question"}, "metadata_columns": ("answer",)}
    for path in (jsonl(tmp_path, *data), parquet(tmp_path, data)):
        (thread,) = read_threads(FileDataset(path=path, **spec))
        assert thread.last_content() == "q" and dict(thread.metadata) == {"answer": 4}
        (pair,) = read_threads(
            FileDataset(path=path, columns={"prompt": "question", "completion": "reply"}), use="completion"
        )
        assert pair.last_content() == "r"


def test_parquet_and_jsonl_give_the_same_threads(tmp_path: Path) -> None:
    data = [{"messages": [{"role": "user", "content": f"q{i}"}], "metadata": {"n": i}} for i in range(5)]
    from_jsonl = [thread.to_json() for thread in read_threads(FileDataset(path=jsonl(tmp_path, *data)))]
    from_parquet = [thread.to_json() for thread in read_threads(FileDataset(path=parquet(tmp_path, data)))]
    assert from_jsonl == from_parquet and len(from_jsonl) == 5


def test_metadata_as_a_json_text(tmp_path: Path) -> None:
    path = parquet(tmp_path, [{"prompt": "q", "metadata": '{"answer": [1, 2]}'}])
    assert [dict(thread.metadata) for thread in read_threads(FileDataset(path=path))] == [{"answer": [1, 2]}]


def test_blank_lines_byte_order_mark_and_no_last_newline(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n   \n{"prompt": "b"}')
    assert turns(FileDataset(path=str(file))) == [[("user", "a")], [("user", "b")]]


def test_a_pattern_reads_the_files_in_order_and_limit_counts_usable_rows(tmp_path: Path) -> None:
    jsonl(tmp_path, {"prompt": "c"}, name="2.jsonl")
    jsonl(tmp_path, {"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}, name="1.jsonl")
    spec = FileDataset(path=str(tmp_path / "*.jsonl"), on_bad_row="skip", limit=2)
    assert turns(spec) == [[("user", "a")], [("user", "b")]]
    assert len(turns(spec.model_copy(update={"limit": None}))) == 3


def test_further_files_are_read_in_the_order_given_as_if_they_were_one(tmp_path: Path) -> None:
    c, a = jsonl(tmp_path, {"prompt": "c"}, name="c.jsonl"), parquet(tmp_path, [{"prompt": "a"}], name="a.parquet")
    (tmp_path / "more").mkdir()
    for name in ("y", "x"):
        jsonl(tmp_path / "more", {"prompt": name}, {"prompt": name * 2}, name=f"{name}.jsonl")
    spec = FileDataset(path=c, further_paths=(str(tmp_path / "more" / "*.jsonl"), a))
    contents = [thread[0][1] for thread in turns(spec)]
    assert contents == ["c", "x", "xx", "y", "yy", "a"]
    assert [thread[0][1] for thread in turns(spec.model_copy(update={"limit": 3}))] == contents[:3]


def test_a_missing_further_file_is_told_before_a_row_is_read(tmp_path: Path) -> None:
    first = jsonl(tmp_path, {"prompt": "a"})
    with pytest.raises(DatasetNotFound, match="absent"):
        next(read_threads(FileDataset(path=first, further_paths=(str(tmp_path / "absent.jsonl"),))))
    with pytest.raises(ValidationError):
        FileDataset(path=first, further_paths=("",))


def test_a_dataset_of_one_file_is_written_down_as_before() -> None:
    assert "further_paths" not in FileDataset(path="a").model_dump(mode="json")
    several = FileDataset(path="a", further_paths=("b",))
    assert FileDataset.model_validate(several.model_dump(mode="json")) == several


GOOD = {"prompt": "fine"}


@pytest.mark.parametrize(
    ("bad", "column", "parts"),
    [
        (b'{"prompt": "x"', None, ["not JSON", "one whole JSON object on each line"]),
        (b"[1, 2]", None, ["given a list", "one JSON object per line", "must be written one object per line"]),
        (b'{"prompt": "\xff"}', None, ["not UTF-8"]),
        (b'{"prompt": "x", "metadata": {"a": NaN}}', None, ["NaN", "Use null"]),
        (b'{"prompt": "\\ud800"}', "prompt", ["half a surrogate pair"]),
        ({"text": "x"}, None, ["given the columns text", "expected 'messages', 'conv", "columns={"]),
        ({"prompt": None}, None, ["expected 'messages', 'conversations' or 'prompt', and not null"]),
        ({"prompt": ""}, "prompt", ["given ''", "not empty"]),
        ({"prompt": 5}, "prompt", ["given 5 (int)"]),
        ({"prompt": "a", "messages": [GOOD]}, None, ["both 'messages' and 'prompt'", "Choose with columns="]),
        ({"prompt": "a", "metadata": [1]}, "metadata", ["given [1] (list)", "expected an object"]),
        ({"prompt": "a", "metadata": "[1"}, "metadata", ["JSON object"]),
        ({"messages": []}, "messages", ["at least one"]),
        ({"messages": ["hi"]}, "messages[0]", ["'role' and 'content'"]),
        ({"messages": [{"role": "user"}]}, "messages[0].content", ["given null", "expected a text"]),
        ({"messages": [{"role": "human", "content": "x"}]}, "messages[0].role", ["'human'", "system, user"]),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
            "messages[0]",
            ["the fields tool_calls", "lost"],
        ),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            None,
            ["ends with the assistant turn", "Load it as completions"],
        ),
    ],
)
def test_a_bad_row_names_file_row_column_and_what_to_do(
    tmp_path: Path, bad: object, column: str | None, parts: list[str]
) -> None:
    path = jsonl(tmp_path, GOOD, bad, GOOD)
    with pytest.raises(BadRow) as error:
        list(read_threads(FileDataset(path=path)))
    assert error.value.row == 2 and error.value.column == column
    assert f"{path}, row 2" in str(error.value) and "expected" in str(error.value)
    for part in parts:
        assert part in str(error.value)

    skipped = SkippedRows()
    threads = list(read_threads(FileDataset(path=path, on_bad_row="skip"), skipped=skipped))
    assert len(threads) == 2 and skipped.count == 1 and skipped.reasons == [str(error.value)]


def test_a_prompt_without_its_completion(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a"})
    with pytest.raises(BadRow, match="column 'completion'"):
        list(read_threads(FileDataset(path=path), use="completion"))
    with pytest.raises(DatasetError, match="metadata_columns"):
        list(read_threads(FileDataset(path=path, columns={"completion": "gold"}), use="prompt"))


def test_parquet_errors_name_the_row_and_the_column(tmp_path: Path) -> None:
    import datetime

    path = parquet(tmp_path, [{"prompt": f"p{i}" if i != 700 else None} for i in range(900)])
    with pytest.raises(BadRow, match="row 701"):
        list(read_threads(FileDataset(path=path)))
    path = parquet(tmp_path, [{"prompt": "a", "metadata": {"when": datetime.datetime(2026, 1, 1)}}])
    with pytest.raises(BadRow, match=r"row 1, column 'metadata'.*Cast the column"):
        list(read_threads(FileDataset(path=path)))
    path = parquet(tmp_path, [{"text": "a"}])
    with pytest.raises(DatasetError, match=r"no column 'conversations' or 'messages' or 'prompt'; the file has text"):
        list(read_threads(FileDataset(path=path)))
    with pytest.raises(DatasetError, match=r"no column 'gold'"):
        list(read_threads(FileDataset(path=path, columns={"prompt": "text"}, metadata_columns=("gold",))))


def test_files_that_are_not_what_they_are_called(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match="no file at"):
        list(read_threads(FileDataset(path=str(tmp_path / "none.jsonl"))))
    with pytest.raises(DatasetNotFound, match="given the folder"):
        list(read_threads(FileDataset(path=str(tmp_path))))
    text = jsonl(tmp_path, GOOD, name="data.txt")
    with pytest.raises(DatasetError, match=r"suffix '\.txt'"):
        list(read_threads(FileDataset(path=text)))
    assert len(list(read_threads(FileDataset(path=text, format="jsonl")))) == 1
    with pytest.raises(DatasetError, match="not Parquet"):
        list(read_threads(FileDataset(path=text, format="parquet")))
    cut = Path(parquet(tmp_path, [{"prompt": str(i)} for i in range(100)]))
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(DatasetError, match="not Parquet"):
        list(read_threads(FileDataset(path=str(cut))))


def test_only_ten_reasons_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    skipped = SkippedRows()
    path = jsonl(tmp_path, *[{"prompt": ""}] * 25)
    assert list(read_threads(FileDataset(path=path, on_bad_row="skip"), skipped=skipped)) == []
    assert skipped.count == 25 and len(skipped.reasons) == MAX_REASONS


def test_a_line_over_the_limit_is_a_bad_row_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_formats, "MAX_LINE_BYTES", 100)
    path = jsonl(tmp_path, {"prompt": "x" * 1000}, {"prompt": "ok"})
    skipped = SkippedRows()
    (thread,) = read_threads(FileDataset(path=path, on_bad_row="skip"), skipped=skipped)
    assert thread.last_content() == "ok" and "more than 100 bytes" in skipped.reasons[0]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, suffix: str) -> None:
    """20 MB of rows pass through a few hundred kilobytes of Python objects."""
    data = [{"prompt": f"{i} " + "x" * 10_000} for i in range(2_000)]
    path = jsonl(tmp_path, *data) if suffix == "jsonl" else parquet(tmp_path, data, row_group_size=100)
    del data
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_threads(FileDataset(path=path)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 2_000 and peak < 10 * 2**20


def test_two_layouts_at_once_are_refused() -> None:
    with pytest.raises(ValidationError, match="either messages, or prompt and completion"):
        FileDataset(path="x", columns={"messages": "m", "prompt": "p"})


def test_a_row_group_of_a_parquet_file_is_not_read_as_a_whole(tmp_path: Path) -> None:
    data = [{"prompt": f"{number} " + "x" * 20_000} for number in range(4000)]
    path = parquet(tmp_path, data, row_group_size=4000, compression="none", use_dictionary=False)
    del data
    # The row group holds 80 MB, and a batch of 512 rows 10 MB, of which there are a few copies.
    before, most = pa.total_allocated_bytes(), 0
    for _ in read_threads(FileDataset(path=path)):
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < 50 * 10**6


def text_file(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_csv_has_the_columns_of_its_first_line_and_cells_of_several_lines(tmp_path: Path) -> None:
    path = text_file(tmp_path, "sums.csv", '\ufeffquestion,answer,note\n"1 + 1?\nSay, \"\"it\"\"",2,\n\n2+2,4,x\n')
    spec = FileDataset(path=path, columns={"prompt": "question"}, metadata_columns=("answer", "note"))
    assert turns(spec) == [[("user", '1 + 1?\nSay, "it"')], [("user", "2+2")]]
    assert [dict(thread.metadata) for thread in read_threads(spec)] == [
        {"answer": "2", "note": None}, {"answer": "4", "note": "x"}
    ]  # fmt: skip
    assert FileDataset(path=path, columns={"prompt": "question"}).unread_columns("prompt") == ["answer", "note"]


def test_a_rating_in_csv_is_a_number(tmp_path: Path) -> None:
    path = text_file(tmp_path, "ratings.csv", "prompt,completion,label\n1,007,0.5\na,b,true\n")
    threads = list(read_threads(FileDataset(path=path, metadata_columns=()), use="rating"))
    assert [thread.metadata["res"] for thread in threads] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1\n", "row 1: given 1 cells, where the first line names 2 columns"),
        ("a,a\n1,2\n", "expected a name of its own per column"),
        ('prompt\n"never closed\n', "cannot be read as CSV after row 0"),
        ("prompt\n" + "x" * 200 + "\n", "a line of more than 100 bytes"),
    ],
)
def test_a_bad_csv_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setattr(file_formats, "MAX_LINE_BYTES", 100)
    with pytest.raises(DatasetError, match=message):
        turns(FileDataset(path=text_file(tmp_path, "bad.csv", text)))


def test_json_is_an_array_of_objects_or_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "1+1"}, {"prompt": "2+2"}]
    array = text_file(tmp_path, "array.json", json.dumps(rows, indent=1))
    lines = text_file(tmp_path, "lines.json", "\n".join(map(json.dumps, rows)))
    assert turns(FileDataset(path=array)) == turns(FileDataset(path=lines)) == [[("user", "1+1")], [("user", "2+2")]]
    with pytest.raises(BadRow, match="row 2: given a int; expected a dict of columns"):
        turns(FileDataset(path=text_file(tmp_path, "bad.json", '[{"prompt": "a"}, 3]')))
    with pytest.raises(DatasetError, match="a text that is not JSON"):
        turns(FileDataset(path=text_file(tmp_path, "bad.json", '[{"prompt": NaN}]')))
    monkeypatch.setattr(file_formats, "MAX_LINE_BYTES", 10)
    with pytest.raises(DatasetError, match="expected at most 10"):
        turns(FileDataset(path=array))
