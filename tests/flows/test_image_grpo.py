"""Tests of `grpo` over prompts with images: its tables, and that an interrupted run ends in the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest

import flows.grpo
import flows.ops.hooks
import flows.runs.session
from engine.text.threads import StringThread
from engine.workspace import connect
from tasks.datasets.errors import BadRow
from tests.fixtures.runs.flow_runs import FlowRuns, grpo_runs
from tests.fixtures.runs.interruption import Interrupted, interrupt_at, keep_leases
from tests.fixtures.vision import RED, TOKENS, data_url, picture


def write_image_prompts(folder: Path) -> Path:
    """Four prompts: two name image files next to the dataset, one embeds its image, and one has no image."""
    (folder / "pictures").mkdir()
    for name, colour in (("green", (20, 200, 30)), ("blue", (20, 30, 220))):
        (folder / "pictures" / f"{name}.png").write_bytes(picture(*colour))
    urls = ["pictures/green.png", "pictures/blue.png", data_url(RED), None]
    parts = [[{"type": "image", "url": url}] if url else [] for url in urls]
    rows = [
        {"messages": [{"role": "user", "content": [*part, {"type": "text", "text": f"Which colour? {n}"}]}]}
        for n, part in enumerate(parts)
    ]
    path = folder / "images.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, vision_folder: Path) -> FlowRuns:
    return grpo_runs(
        tmp_path, vision_folder, data__train={"kind": "file", "path": str(write_image_prompts(tmp_path))},
        algorithm__steps=2, algorithm__prompts_per_shard=2,
        checkpoints={"frequency": None, "recovery_steps": 1, "keep_last": 9},
    )  # fmt: skip


@pytest.mark.slow
def test_an_interrupted_run_over_images_ends_in_the_same_bytes(runs: FlowRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, flows.grpo, "take_gradient_step", step=1)
    keep_leases(monkeypatch)
    with pytest.raises(Interrupted):
        runs.run("interrupted")
    assert list(runs.chain("interrupted").steps()) == [1]
    connect.cache_clear()  # after a crash nothing is in memory
    runs.run("interrupted")
    runs.run("whole")
    assert runs.digests("interrupted") == runs.digests("whole")
    assert None not in runs.digests("whole") and len(set(runs.digests("whole"))) == 2

    rollouts = pandas.concat(runs.tables("whole", "rollouts"))
    batch = pandas.concat(runs.tables("whole", "batch"))
    image_counts = rollouts["images"].map(lambda images: 0 if images is None else len(images))
    assert sorted(image_counts) == [0] * 8 + [1] * 24
    pictures = {images[0]["data"] for images in batch["images"].dropna()}
    assert pictures == {picture(20, 200, 30), picture(20, 30, 220), RED}
    for row in rollouts.itertuples():
        thread = StringThread.from_json(row.thread)
        assert "pictures/" not in row.thread  # a path would mean nothing on another machine
        assert (row.images is not None) == (len(thread.turns[0].content) == 2)
    for images in batch["images"].dropna():
        assert [int(image["tokens"]) for image in images] == [TOKENS]


def test_a_prompt_with_an_image_that_cannot_be_read_names_its_row(runs: FlowRuns) -> None:
    path = runs.folder / "images.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["messages"][0]["content"][0]["url"] = "https://example.org/blue.png"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadRow, match=r"row 2.*messages\[0\]\.content\[0\]\.url(.|\n)*never fetched"):
        runs.run("refused")
