"""Tests that images are read from a dataset's file, and that prompts and batches carry them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import SampleTooLong, ThreadError, UnsupportedFragment
from engine.handles import TrainingModel
from engine.losses.likelihood import CrossEntropySpec
from engine.text.fragments import ImageFragment, TextFragment
from engine.text.rendering import Renderer
from engine.text.threads import StringThread
from engine.text.tokenizers import load_tokenizer
from tasks.batches.rl import prepare_conversations
from tasks.datasets.errors import BadRow
from tasks.datasets.spec import FileDataset, InlineDataset, InlinePairs
from tasks.evaluation.lm_validation import ValidationLossPlan, validate_loss
from tasks.plans import Truncation
from tasks.sampling.completions import render_prompts
from tasks.task_runs import work_of
from tests.fixtures.dataset_rows import read_threads
from tests.fixtures.runs.batch_workspace import BatchWorkspace, spawned_model
from tests.fixtures.vision import BLUE, RED, TOKENS, data_url

IMAGE = ImageFragment(url=data_url(RED))
SEEN = StringThread([("user", [IMAGE, TextFragment(text="which colour?")])])
PLAIN = StringThread([("user", "2+3?")])


# -- files ---------------------------------------------------------------------------------------------------------


def row_of_file(index: int) -> str:
    return f"row {index + 1} of a.jsonl"


def message_row(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


TEXT = {"type": "text", "text": "which colour?"}


@pytest.mark.parametrize("url", ["red.png", "./red.png", "absolute", "data"])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_files_images_are_read_where_it_lies(tmp_path: Path, url: str, form: str) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    url = {"absolute": str(tmp_path / "red.png"), "data": data_url(RED)}.get(url, url)
    row, path = message_row({"type": "image", "url": url}, TEXT), tmp_path / f"prompts.{form}"
    if form == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    assert list(read_threads(FileDataset(path=str(path)))) == [SEEN]


@pytest.mark.parametrize(
    ("part", "column", "message"),
    [
        ({"type": "image", "url": "https://example.org/a.png"}, r"content\[1\]\.url", "never fetched"),
        ({"type": "image", "url": "absent.png"}, r"content\[1\]\.url", "cannot be read"),
        ({"type": "image"}, r"content\[1\]", "'url': …"),
        ({"type": "video", "url": "a.mp4"}, r"content\[1\]", "'type': 'image'"),
        ("words", r"content\[1\]", "'type': 'text'"),
    ],
)
def test_a_part_that_is_none_names_its_place(tmp_path: Path, part: Any, column: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(message_row(TEXT, part)) + "\n")
    with pytest.raises(BadRow, match=rf"row 1, column 'messages\[0\]\.{column}'.*{message}"):
        list(read_threads(FileDataset(path=str(path))))


# -- prompts -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def renderer(vision_folder: Path) -> Renderer:
    return Renderer(load_tokenizer(vision_folder))


def rows_of(*threads: StringThread) -> list[dict[str, Any]]:
    return [{"id": f"p{n}", "index": n, "thread": thread.to_json()} for n, thread in enumerate(threads)]


@pytest.mark.parametrize("truncation", ["left", "right"])
def test_a_prompt_with_an_image_is_never_cut(renderer: Renderer, truncation: Truncation) -> None:
    whole = [prompt for _, prompt in render_prompts(renderer, rows_of(SEEN, PLAIN), None, "error", row_of_file)]
    assert [len(prompt.images) for prompt in whole] == [1, 0]
    with pytest.raises(UnsupportedFragment, match=r"p0 \(row 1 of a.jsonl\).*cannot be truncated"):
        render_prompts(renderer, rows_of(SEEN), 8, truncation, row_of_file)
    (cut,) = [prompt for _, prompt in render_prompts(renderer, rows_of(PLAIN), 8, truncation, row_of_file)]
    assert len(cut.token_ids) == len(cut.loss_mask) == 8
    with pytest.raises(SampleTooLong):
        render_prompts(renderer, rows_of(SEEN), 8, "error", row_of_file)
    assert render_prompts(renderer, rows_of(SEEN), 8, "drop", row_of_file) == []


def test_what_carries_tokens_alone_refuses_a_thread_with_an_image(renderer: Renderer) -> None:
    with pytest.raises(UnsupportedFragment, match="turn 0 holds an image"):
        renderer.prompt_ids(SEEN)
    with pytest.raises(UnsupportedFragment, match="turn 0 holds an image"):
        renderer.serialize(renderer.prompt(SEEN))


# -- batches -------------------------------------------------------------------------------------------------------


Spawned = tuple[BatchWorkspace, TrainingModel]


@pytest.fixture
async def spawned(tmp_path: Path, vision_folder: Path) -> Spawned:
    """A vision-language model at policy 0 of a stage."""
    return await spawned_model(tmp_path, vision_folder, "sft")


async def test_completions_carry_their_images(spawned: Spawned) -> None:
    batches, model = spawned
    threads = [SEEN.assistant("red"), PLAIN.assistant("5")]
    dataset = batches.load(InlineDataset.of(threads), "completion")
    batch = await work_of(prepare_conversations)(batches.workspace, batches.policy, model.base, dataset, [0, 1], step=0)
    _, images, _ = await model.serialize_thread(threads[0])
    assert batches.images(batch) == [images, ()]
    plan = ValidationLossPlan(base=model.base, dataset=dataset, loss=CrossEntropySpec())
    losses = await work_of(validate_loss)(batches.workspace, batches.policy, plan)
    expected = [-await model.logprobs(thread) for thread in threads]
    assert [row["loss"] for row in batches.rows(losses)] == pytest.approx(expected, rel=1e-5)


async def test_pairs_carry_their_images_and_are_compared_with_them(spawned: Spawned) -> None:
    batches, model = spawned
    pair = SEEN.assistant("red"), SEEN.assistant("blue")
    dataset = batches.load(InlinePairs.of([pair, (PLAIN.assistant("5"), PLAIN.assistant("6"))]), "preference")
    batch = await batches.pairs(dataset, [0, 1])
    data_of_rows = []
    for images in batches.images(batch):
        data_of_rows.append([image.data for image in images])
    assert data_of_rows == [[RED], [RED], [], []]
    rows = batches.rows(batch)
    for row, thread in zip(rows[:2], pair, strict=True):
        assert sum(row["reference_logprobs"]) == pytest.approx(await model.logprobs(thread), rel=1e-5)
    assert rows[0]["images"][0]["tokens"] == TOKENS


async def test_ratings_of_images_are_refused(spawned: Spawned) -> None:
    batches, _ = spawned
    rated = SEEN.assistant("red").with_metadata({"res": 1.0})
    dataset = batches.load(InlineDataset.of([rated]), "rating")
    with pytest.raises(UnsupportedFragment, match="turn 0 holds an image"):
        await batches.ratings(dataset, [0])


def test_a_dataset_holds_the_images_themselves(tmp_path: Path, spawned: Spawned) -> None:
    batches, _ = spawned
    (tmp_path / "blue.png").write_bytes(BLUE)
    by_path = StringThread([("user", [ImageFragment(url=str(tmp_path / "blue.png"))])])
    (row,) = batches.rows(batches.load(InlineDataset.of([by_path]), "prompt"))
    assert StringThread.from_json(row["thread"]).turns[0].content == (ImageFragment(url=data_url(BLUE)),)
    (tmp_path / "blue.png").unlink()
    with pytest.raises(ThreadError, match="cannot be read"):
        batches.load(InlineDataset.of([by_path]), "prompt")
