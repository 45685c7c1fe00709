"""`sft` from end to end: the loss of a repeated conversation falls, its end is learnt, and the run resumes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pandas
import pytest

import flows.training.supervised_loop
from engine.connect import connect
from engine.errors import BadSpec, SampleTooLong
from flows.configs.common import SFTConfig
from flows.sft import SFT, sft
from storage.chain.records import Chain
from storage.store.artifacts import read_manifest
from storage.store.objects import open_store
from storage.store.tables import read_table

STAGE = "0-sft"
ANSWER = "yes"


def config_of(folder: Path, tiny_folder: Path, run: str, **algorithm: Any) -> SFTConfig:
    rows = folder / "rows.jsonl"
    if not rows.exists():
        rows.write_text("".join(json.dumps({"prompt": f"ok{n % 2}?", "completion": ANSWER}) + "\n" for n in range(8)))
    return SFTConfig.model_validate(
        {
            "run": run,
            "model": {"key": str(tiny_folder), "publish_as": "toy-sft"},
            "data": {"train": {"kind": "file", "path": str(rows)}},
            "algorithm": {"samples_per_batch": 4} | algorithm,
            "optimizer": {"lr": 3e-3, "schedule": "constant"},
            "checkpoints": {"frequency": None, "recovery_steps": 2},
            "engine": {"deterministic": True, "threads": 1},
            "storage": {"url": str(folder / "data")},
        }
    )


def chain(folder: Path, run: str) -> Chain:
    return Chain(open_store(str(folder / "data")), run, STAGE, "policy")


def digests(folder: Path, run: str) -> list[str | None]:
    found = chain(folder, run)
    return [record.weights_digest for record in found.records(0, found.head().step)]


def metrics(folder: Path, run: str) -> list[dict[str, Any]]:
    files = sorted((folder / "data" / "runs" / run / "stages" / STAGE / "metrics").glob("*.json"))
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def learnt(
    prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sft")
    return folder, asyncio.run(sft(config_of(folder, tiny_folder, "learnt", steps=20)))


def test_the_loss_of_a_repeated_conversation_falls(learnt: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = learnt
    losses = [line["loss"] for line in metrics(folder, "learnt")]
    assert len(losses) == 20
    assert 4.0 < losses[0] < 7.0  # an untrained model spreads over 261 tokens: ln 261 = 5.56
    assert losses[-1] < 0.1
    assert losses[10] < losses[5] < losses[0]
    lines = metrics(folder, "learnt")
    assert all(line["reward_mean"] is None and line["masked"] == 0 for line in lines)


def test_exactly_the_answer_and_its_end_are_trained(learnt: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoTokenizer

    folder, result = learnt
    name, _, version = result["model"].partition("@")
    tokenizer = AutoTokenizer.from_pretrained(folder / "data" / "models" / name / version)
    (file,) = (folder / "data" / "runs" / "learnt" / "stages" / STAGE / "steps" / "000000" / "batch").glob("*.parquet")
    batch = pandas.read_parquet(file)
    assert len(batch) == 4
    for _, row in batch.iterrows():
        trained = [int(token) for token, weight in zip(row["token_ids"], row["weights"], strict=True) if weight > 0]
        assert trained[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(trained[:-1]) == ANSWER
        assert len(trained) == len(ANSWER) + 1  # bytes are tokens
        # what is trained is one run of tokens, after the prompt
        assert "ok" in tokenizer.decode(row["token_ids"][: list(row["weights"] > 0).index(True)])


def test_the_published_model_says_the_answer_and_stops(learnt: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, result = learnt
    name, _, version = result["model"].partition("@")
    published = folder / "data" / "models" / name / version
    model, tokenizer = AutoModelForCausalLM.from_pretrained(published), AutoTokenizer.from_pretrained(published)
    messages = [{"role": "user", "content": "ok1?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == ANSWER
    assert len(answer) == len(ANSWER) + 1 and int(answer[-1]) == tokenizer.eos_token_id


def first_batch(folder: Path, run: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Its rows, and what its manifest says of them."""
    store = open_store(str(folder / "data"))
    record = chain(folder, run).record(1)
    assert record is not None
    batch = record.request.batch
    return read_table(store, batch).to_pylist(), dict(read_manifest(store, batch.key).extra)


@pytest.mark.parametrize("truncation", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_conversations_that_are_too_long_are_cut(
    learnt: tuple[Path, dict[str, Any]], tiny_folder: Path, truncation: str
) -> None:
    folder, _ = learnt
    whole, said = first_batch(folder, "learnt")
    length = len(whole[0]["token_ids"])
    assert {len(row["token_ids"]) for row in whole} == {length} and "cut" not in said
    limit = length - 2
    config = config_of(folder, tiny_folder, truncation, steps=1, max_tokens=limit, truncation=truncation)
    data = config.data.model_copy(update={"heldout": config.data.train})
    asyncio.run(sft(config.model_copy(update={"data": data})))
    rows, said = first_batch(folder, truncation)
    kept = slice(2, None) if truncation == "left" else slice(limit)
    assert [row["token_ids"] for row in rows] == [row["token_ids"][kept] for row in whole]
    assert [row["weights"] for row in rows] == [row["weights"][kept] for row in whole]
    assert said["cut"] == 4
    losses = sorted((folder / "data" / "runs" / truncation / "stages" / STAGE / "evaluations").glob("*.parquet"))
    trained = sum(rows[0]["weights"])
    assert losses and all(set(pandas.read_parquet(file)["tokens"]) == {trained} for file in losses)


def test_a_conversation_that_is_too_long_fails_the_run_by_its_row(
    prefect_server: str, tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(SampleTooLong, match=r"row [1-9]\d* of .*\.jsonl has \d+ tokens, and at most 9 fit"):
        asyncio.run(sft(config_of(tmp_path, tiny_folder, "long", max_tokens=9)))
    with pytest.raises(BadSpec, match="4 were truncated and 0 dropped"):  # the prompt alone is longer
        asyncio.run(sft(config_of(tmp_path, tiny_folder, "short", max_tokens=9, truncation="right")))


def test_the_lengths_decide_the_result(tiny_folder: Path, tmp_path: Path) -> None:
    plain = config_of(tmp_path, tiny_folder, "a")
    assert (plain.semantic()["algorithm"]["max_tokens"], plain.semantic()["algorithm"]["truncation"]) == (None, "error")
    cut = config_of(tmp_path, tiny_folder, "a", max_tokens=64, truncation="left")
    assert cut.semantic()["algorithm"] == plain.semantic()["algorithm"] | {"max_tokens": 64, "truncation": "left"}


class Interrupted(Exception):
    """Ends a run in the middle of a test."""


@pytest.mark.slow
def test_an_interrupted_run_resumes_and_ends_in_the_same_bytes(
    prefect_server: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, left = flows.training.supervised_loop.take_gradient_step, [3]

    async def raises_once(*args: Any, **kwargs: Any) -> Any:
        if kwargs["step"] in left:
            left.clear()
            raise Interrupted
        return await task(*args, **kwargs)

    monkeypatch.setattr(flows.training.supervised_loop, "take_gradient_step", raises_once)
    interrupted = config_of(tmp_path, tiny_folder, "interrupted", steps=5)
    with pytest.raises(Interrupted):
        asyncio.run(sft(interrupted))
    assert list(chain(tmp_path, "interrupted").steps()) == [1, 2, 3]
    connect.cache_clear()  # what was in memory is gone, as after a crash
    asyncio.run(sft(interrupted))
    asyncio.run(sft(config_of(tmp_path, tiny_folder, "whole", steps=5)))
    assert digests(tmp_path, "interrupted") == digests(tmp_path, "whole")
    assert len(set(digests(tmp_path, "whole")) - {None}) == 5
    assert [line["resumed"] for line in metrics(tmp_path, "interrupted")] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        pytest.param({"epochs": 2}, 4, marks=pytest.mark.slow),  # 16 rows in batches of 4
        pytest.param({"epochs": 1, "samples_per_batch": 3}, 3, marks=pytest.mark.slow),  # 8 rows: and one of the next
        ({}, 2),  # neither: one epoch
        pytest.param({"samples_per_batch": 512}, 1, marks=pytest.mark.slow),  # a batch larger than the dataset is it
        pytest.param({"steps": 3}, 3, marks=pytest.mark.slow),
    ],
)
def test_how_many_steps_a_run_has(
    prefect_server: str, tiny_folder: Path, tmp_path: Path, algorithm: dict[str, Any], steps: int
) -> None:
    asyncio.run(sft(config_of(tmp_path, tiny_folder, "r", **algorithm)))
    assert list(chain(tmp_path, "r").steps()) == list(range(1, steps + 1))


def test_steps_and_epochs_together_are_refused() -> None:
    with pytest.raises(ValueError, match="both max_steps=2 and epochs=1 were given; give one"):
        SFT([], None, epochs=1, max_steps=2)  # type: ignore[arg-type]
