"""Tests of a whole run with its artifacts on S3: it ends with the same bytes as on a local folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from storage.chain.records import Chain
from storage.store.objects import open_store
from tests.fixtures.stores.s3 import KEY, SECRET
from tests.fixtures.toy import toy_config

STEPS = 3
MOVING = {"grader__path": "tests.fixtures.grading:even_share"}
"""A reward that an untrained model varies in: every step moves the weights."""


async def run_on(url: str, folder: Path, tiny_folder: Path) -> list[str | None]:
    """The weights digests of a run with its artifacts at `url`."""
    folder.mkdir()
    config = toy_config(folder, tiny_folder, run="s3-run", algorithm__steps=STEPS, storage__url=url, **MOVING)
    result = await grpo(GRPOConfig.model_validate(config))
    assert result["report"].startswith(url.removeprefix("file://"))
    chain = Chain(open_store(url), "s3-run", "0-grpo", "policy")
    records = [chain.record(step) for step in range(1, STEPS + 1)]
    return [record.weights_digest for record in records if record]


@pytest.mark.slow
@pytest.mark.parametrize("server", ["moto", "seaweed"])
async def test_a_run_on_s3_is_the_run_on_a_folder(
    server: str,
    tmp_path: Path,
    tiny_folder: Path,
    prefect_server: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint, bucket = (request.getfixturevalue(f"{server}_{name}") for name in ("endpoint", "bucket"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    on_s3 = await run_on(f"s3://{bucket}/runs", tmp_path / "a", tiny_folder)
    on_disk = await run_on(f"file://{tmp_path}/data", tmp_path / "b", tiny_folder)
    assert len(on_s3) == STEPS
    assert None not in on_s3
    assert len(set(on_s3)) == STEPS
    assert on_s3 == on_disk
