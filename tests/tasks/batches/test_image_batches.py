"""Images on their way from a dataset's file to the rows of a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import SampleTooLong
from engine.handles import Model, TrainingModel
from engine.losses.likelihood import CrossEntropySpec
from engine.models.images import PlacedImage, images_from_rows
from engine.specs.engine import LocalEngineSpec
from engine.text.errors import ThreadError, UnsupportedFragment
from engine.text.fragments import ImageFragment, TextFragment
from engine.text.rendering import Renderer
from engine.text.threads import StringThread
from engine.text.tokenizers import load_tokenizer
from engine.workspace import Workspace
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.tables import read_table
from tasks.batches.pairs import pair_batch, rating_batch
from tasks.batches.rl import completion_batch
from tasks.datasets.errors import BadRow
from tasks.datasets.load import load_dataset
from tasks.datasets.read import read_threads
from tasks.datasets.spec import FileDataset, InlineDataset, InlinePairs
from tasks.evaluation.lm_validation import ValidationLossPlan, validation_loss
from tasks.sampling.completions import Truncation, render_prompts
from tests.fixtures.vision import BLUE, RED, TOKENS, data_url

PROVENANCE = Provenance(code_version="abc", config_digest="0" * 64, seed=7)
IMAGE = ImageFragment(url=data_url(RED))
SEEN = StringThread([("user", [IMAGE, TextFragment(text="which colour?")])])
PLAIN = StringThread([("user", "2+3?")])


# -- files ---------------------------------------------------------------------------------------------------------


def row_of_file(index: int) -> str:
    return f"row {index + 1} of a.jsonl"


def message(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


TEXT = {"type": "text", "text": "which colour?"}


@pytest.mark.parametrize("url", ["red.png", "./red.png", "absolute", "data"])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_files_images_are_read_where_it_lies(tmp_path: Path, url: str, form: str) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    url = {"absolute": str(tmp_path / "red.png"), "data": data_url(RED)}.get(url, url)
    row, path = message({"type": "image", "url": url}, TEXT), tmp_path / f"prompts.{form}"
    if form == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    assert list(read_threads(FileDataset(path=str(path)))) == [SEEN]


@pytest.mark.parametrize(
    ("part", "column", "said"),
    [
        ({"type": "image", "url": "https://example.org/a.png"}, r"content\[1\]\.url", "never fetched"),
        ({"type": "image", "url": "absent.png"}, r"content\[1\]\.url", "cannot be read"),
        ({"type": "image"}, r"content\[1\]", "'url': …"),
        ({"type": "video", "url": "a.mp4"}, r"content\[1\]", "'type': 'image'"),
        ("words", r"content\[1\]", "'type': 'text'"),
    ],
)
def test_a_part_that_is_none_names_its_place(tmp_path: Path, part: Any, column: str, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(message(TEXT, part)) + "\n")
    with pytest.raises(BadRow, match=rf"row 1, column 'messages\[0\]\.{column}'.*{said}"):
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
    assert len(cut.token_ids) == len(cut.weights) == 8
    with pytest.raises(SampleTooLong):
        render_prompts(renderer, rows_of(SEEN), 8, "error", row_of_file)
    assert render_prompts(renderer, rows_of(SEEN), 8, "drop", row_of_file) == []


def test_what_carries_tokens_alone_refuses_a_thread_with_an_image(renderer: Renderer) -> None:
    with pytest.raises(UnsupportedFragment, match="turn 0 holds an image"):
        renderer.prompt_ids(SEEN)
    with pytest.raises(UnsupportedFragment, match="turn 0 holds an image"):
        renderer.serialize(renderer.prompt(SEEN))


# -- batches -------------------------------------------------------------------------------------------------------


class Stand:
    """A vision-language model at policy 0 of a stage."""

    def __init__(self, workspace: Workspace, model: TrainingModel) -> None:
        self.workspace, self.model, self.store = workspace, model, workspace.open_store()

    def images(self, batch: ArtifactRef) -> list[tuple[PlacedImage, ...]]:
        return [images_from_rows(row["images"]) for row in read_table(self.store, batch).to_pylist()]


@pytest.fixture
async def stand(tmp_path: Path, vision_folder: Path) -> Stand:
    engine = LocalEngineSpec(deterministic=True, threads=1)

    class Here:
        workspace = Workspace(store=str(tmp_path / "data"), engine=engine, run="run", provenance=PROVENANCE)

    model = await Model(str(vision_folder)).to_builder(Here()).spawn_train("policy")
    await model.begin_stage("sft")
    return Stand(Here.workspace, model)


async def test_completions_carry_their_images(stand: Stand) -> None:
    spec = InlineDataset.of([SEEN.assistant("red"), PLAIN.assistant("5")])
    dataset = load_dataset(stand.store, spec, kind="completion", provenance=PROVENANCE).ref
    batch = await completion_batch(
        stand.workspace, await stand.model.policy(), stand.model.base, dataset, [0, 1], step=0
    )
    _, images, _ = await stand.model.serialize_thread(SEEN.assistant("red"))
    assert stand.images(batch) == [images, ()]
    plan = ValidationLossPlan(base=stand.model.base, dataset=dataset, loss=CrossEntropySpec())
    losses = await validation_loss(stand.workspace, await stand.model.policy(), plan)
    found = [row["loss"] for row in read_table(stand.store, losses).to_pylist()]
    expected = [-await stand.model.logprobs(thread) for thread in (SEEN.assistant("red"), PLAIN.assistant("5"))]
    assert found == pytest.approx(expected, rel=1e-5)


async def test_pairs_carry_their_images_and_are_compared_with_them(stand: Stand) -> None:
    pair = SEEN.assistant("red"), SEEN.assistant("blue")
    spec = InlinePairs.of([pair, (PLAIN.assistant("5"), PLAIN.assistant("6"))])
    dataset = load_dataset(stand.store, spec, kind="preference", provenance=PROVENANCE).ref
    policy = await stand.model.policy()
    batch = await pair_batch(stand.workspace, policy, stand.model.base, dataset, [0, 1], reference=policy, step=0)
    assert [[image.data for image in images] for images in stand.images(batch)] == [[RED], [RED], [], []]
    table = read_table(stand.store, batch).to_pylist()
    for row, thread in zip(table[:2], pair, strict=True):
        assert sum(row["reference_logprobs"]) == pytest.approx(await stand.model.logprobs(thread), rel=1e-5)
    assert table[0]["images"][0]["tokens"] == TOKENS


async def test_ratings_of_images_are_refused(stand: Stand) -> None:
    rated = SEEN.assistant("red").with_metadata({"res": 1.0})
    dataset = load_dataset(stand.store, InlineDataset.of([rated]), kind="rating", provenance=PROVENANCE).ref
    with pytest.raises(UnsupportedFragment, match="turn 0 holds an image"):
        await rating_batch(stand.workspace, await stand.model.policy(), stand.model.base, dataset, [0], step=0)


def test_a_dataset_holds_the_images_themselves(tmp_path: Path, stand: Stand) -> None:
    (tmp_path / "blue.png").write_bytes(BLUE)
    by_path = StringThread([("user", [ImageFragment(url=str(tmp_path / "blue.png"))])])
    loaded = load_dataset(stand.store, InlineDataset.of([by_path]), kind="prompt", provenance=PROVENANCE)
    (row,) = read_table(stand.store, loaded.ref).to_pylist()
    assert StringThread.from_json(row["thread"]).turns[0].content == (ImageFragment(url=data_url(BLUE)),)
    (tmp_path / "blue.png").unlink()
    with pytest.raises(ThreadError, match="cannot be read"):
        load_dataset(stand.store, InlineDataset.of([by_path]), kind="prompt", provenance=PROVENANCE)
