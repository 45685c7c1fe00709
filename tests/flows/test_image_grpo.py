"""`grpo` over prompts with images: what its tables carry, and that an interrupted run ends in the same bytes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pandas
import pytest

import flows.grpo
import flows.ops.hooks
import flows.runs.session
from engine.connect import connect
from engine.text.threads import StringThread
from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from storage.chain.records import Chain
from storage.store.objects import open_store
from tasks.datasets.errors import BadRow
from tests.fixtures.toy import toy_config
from tests.fixtures.vision import RED, TOKENS, data_url, picture
from tests.flows.test_grpo_flow import Interrupted, interrupt_at, leave_without_a_word


def write_image_prompts(folder: Path) -> Path:
    """Four prompts: two name files beside the data, one holds its image, one has none."""
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


class Run:
    def __init__(self, folder: Path, vision_folder: Path) -> None:
        self.folder, self.vision_folder, self.path = folder, vision_folder, write_image_prompts(folder)

    def __call__(self, run: str) -> dict[str, Any]:
        config = toy_config(
            self.folder, self.vision_folder, run=run, grader__path="tests.fixtures.grading:even_share",
            data__train={"kind": "file", "path": str(self.path)},
            algorithm__steps=2, algorithm__prompts_per_shard=2,
            checkpoints={"frequency": None, "recovery_steps": 1, "keep_last": 9},
        )  # fmt: skip
        return asyncio.run(grpo(GRPOConfig.model_validate(config)))

    def chain(self, run: str) -> Chain:
        return Chain(open_store(str(self.folder / "data")), run, "0-grpo", "policy")

    def digests(self, run: str) -> list[str | None]:
        return [record.weights_digest for record in self.chain(run).records(0, 2)]

    def tables(self, run: str, kind: str) -> pandas.DataFrame:
        found = sorted((self.folder / "data" / "runs" / run).glob(f"stages/0-grpo/steps/*/{kind}/**/*.parquet"))
        return pandas.concat(map(pandas.read_parquet, found))


@pytest.fixture
def run(prefect_server: str, tmp_path: Path, vision_folder: Path) -> Run:
    return Run(tmp_path, vision_folder)


@pytest.mark.slow
def test_an_interrupted_run_over_images_ends_in_the_same_bytes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, "take_gradient_step", step=1)
    for module in (flows.runs.session, flows.ops.hooks):  # as who is killed does
        monkeypatch.setattr(module, "release_run", leave_without_a_word)
    with pytest.raises(Interrupted):
        run("interrupted")
    assert list(run.chain("interrupted").steps()) == [1]
    connect.cache_clear()  # what was in memory is gone, as after a crash
    run("interrupted")
    run("whole")
    assert run.digests("interrupted") == run.digests("whole")
    assert None not in run.digests("whole") and len(set(run.digests("whole"))) == 2

    rollouts, batch = run.tables("whole", "rollouts"), run.tables("whole", "batch")
    assert sorted(len(images) if images is not None else 0 for images in rollouts["images"]) == [0] * 8 + [1] * 24
    pictures = {images[0]["data"] for images in batch["images"] if images is not None}
    assert pictures == {picture(20, 200, 30), picture(20, 30, 220), RED}
    for row in rollouts.itertuples():
        thread = StringThread.from_json(row.thread)
        assert "pictures/" not in row.thread  # a path would mean nothing on another machine
        assert (row.images is not None) == (len(thread.turns[0].content) == 2)
    for images in batch["images"].dropna():
        assert [int(image["tokens"]) for image in images] == [TOKENS]


def test_a_prompt_with_an_image_that_cannot_be_read_names_its_row(run: Run) -> None:
    rows = [json.loads(line) for line in run.path.read_text().splitlines()]
    rows[1]["messages"][0]["content"][0]["url"] = "https://example.org/blue.png"
    run.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadRow, match=r"row 2.*messages\[0\]\.content\[0\]\.url(.|\n)*never fetched"):
        run("refused")
