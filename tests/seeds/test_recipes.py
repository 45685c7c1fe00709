"""Tests of recipes as flows: they train, resume, and do no work once they are finished."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine import workspace as connecting
from engine.handles import InferenceModel, TrainingModel
from engine.text.threads import StringThread
from flows.parameters import Dataset, Grader, Model, dataset_kinds
from flows.recipe import InputConfig, RecipeContext, recipe_main
from storage.chain.leases import is_held
from storage.chain.records import Chain, PolicyRef
from storage.errors import SemanticMismatch
from storage.registry.models import list_models, list_versions
from storage.store.objects import open_store
from tasks.datasets.errors import DatasetError
from tasks.graders.base import FunctionGrader
from tests.fixtures.spawning import context, own_engines
from tests.seeds.recipes import (
    GradedConfig,
    PreferenceConfig,
    TwoStageConfig,
    graded,
    preferred,
    two_stages,
)

pytestmark = pytest.mark.usefixtures("prefect_server")



def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"x": value}
    return value


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    with own_engines():
        yield


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    """Where a recipe works, as the config says it."""
    engine = {"deterministic": True, "threads": 1}
    return {"run": "mine", "engine": engine, "storage": {"url": str(tmp_path / "data")}}


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(folder: Path) -> str:
    return written(folder / "prompts.jsonl", [{"prompt": str(digit)} for digit in range(6)])


def steps(place: dict[str, Any], stage: str, model: str = "policy") -> list[int]:
    return list(Chain(open_store(place["storage"]["url"]), "mine", stage, model).steps())


@pytest.mark.slow
async def test_a_recipe_of_several_graders(tmp_path: Path, tiny_folder: Path, place: dict[str, Any]) -> None:
    body = {
        "model": str(tiny_folder),
        "prompts": prompts(tmp_path),
        "graders": [
            "tests.fixtures.grading:even_share",
            {"path": "tests.fixtures.grading:constant", "arguments": {"value": 0.5}},
        ],
    }
    config = GradedConfig.model_validate(place | body)
    result = await graded(config)
    name, version = result["model"].split("@")
    assert result["step"] == 2 and version in list_versions(open_store(place["storage"]["url"]), name)
    assert not is_held(open_store(place["storage"]["url"]), "mine")

    connecting.connect.cache_clear()
    assert await graded(config) == result and steps(place, "0-grpo") == [1, 2]
    turned = GradedConfig.model_validate(place | body | {"graders": body["graders"][::-1]})
    assert await graded(turned) == result  # a set has no order
    with pytest.raises(SemanticMismatch, match="learning_rate"):
        await graded(config.model_copy(update={"learning_rate": 1e-4}))


@pytest.mark.slow
async def test_preferences_then_ppo(tmp_path: Path, tiny_folder: Path, place: dict[str, Any]) -> None:
    pairs = [{"prompt": str(n), "chosen": str(n), "rejected": "no idea"} for n in range(4)]
    config = {
        "model": str(tiny_folder), "prompts": prompts(tmp_path), "pairs": written(tmp_path / "pairs.jsonl", pairs),
    }  # fmt: skip
    first, second = await preferred(PreferenceConfig.model_validate(place | config))
    assert (first.partition("@")[0], second.partition("@")[0]) == ("preferred", "preferred-2")
    assert steps(place, "0-dpo") == [1, 2] and steps(place, "1-ppo") == [1, 2]
    assert steps(place, "0-ppo", "value") == [1, 2]


@pytest.mark.slow
async def test_fine_tuning_then_gspo_under_a_judge(
    tmp_path: Path, tiny_folder: Path, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge's words are scripted, since an untrained model has none; how it is spawned and asked is not. The run is
    cut off in its second stage, and goes on there."""
    reply, judged_texts = InferenceModel._reply, list[str]()
    set_policy, cut = TrainingModel.set_policy, list[PolicyRef]()

    async def judged(self: InferenceModel, thread: StringThread) -> StringThread:
        if self.name != "judge":
            return await reply(self, thread)
        text = thread.last_content()
        judged_texts.append(text)
        verdict = "PASS" if int(hashlib.sha256(text.encode()).hexdigest(), 16) % 2 else "FAIL"
        return thread.assistant(json.dumps({"reasoning": "so", "result": verdict}))

    def cut_off(self: TrainingModel, policy: PolicyRef) -> None:
        if (policy.stage, policy.step) == ("1-gspo", 1) and not cut:
            cut.append(policy)
            raise RuntimeError("cut")
        set_policy(self, policy)

    monkeypatch.setattr(InferenceModel, "_reply", judged)
    monkeypatch.setattr(TrainingModel, "set_policy", cut_off)
    # The first attempt ends in the second stage.
    demonstrations = [{"prompt": str(n), "completion": str(n) * 3} for n in range(4)]
    config = TwoStageConfig.model_validate(
        place
        | {
            "model_to_train": str(tiny_folder),
            "demonstrations": written(tmp_path / "shown.jsonl", demonstrations),
            "prompts": prompts(tmp_path),
        }
    )
    with pytest.raises(RuntimeError, match="cut"):
        await two_stages(config)
    assert steps(place, "0-sft", "sft_then_gspo") == [1, 2]
    assert steps(place, "1-gspo", "sft_then_gspo") == [1]

    # The second attempt continues there, as in a new process.
    connecting.connect.cache_clear()
    key = await two_stages(config)
    assert key.startswith("two-stages-final@") and "two-stages-final" in list_models(open_store(config.storage.url))
    assert steps(place, "0-sft", "sft_then_gspo") == [1, 2]
    assert steps(place, "1-gspo", "sft_then_gspo") == [1, 2]
    assert any("Is the answer of use?" in text for text in judged_texts)


# -- configs ---------------------------------------------------------------------------------------------------


def test_fields_are_plain_values_outside_and_handles_inside(tiny_folder: Path) -> None:
    config = GradedConfig(model="m@1", prompts="a.jsonl", graders=["tests.fixtures.grading:even_share"])  # type: ignore[arg-type]
    assert config.model == Model("m@1")
    assert config.prompts == Dataset[dataset_kinds.Prompt]('{"columns":{},"format":"auto","kind":"file","limit":null,'
        '"metadata_columns":[],"on_bad_row":"error","path":"a.jsonl","system_prompt":null}')  # fmt: skip
    assert config.graders == {Grader("tests.fixtures.grading:even_share")}
    assert isinstance(next(iter(config.graders)).build(), FunctionGrader)
    assert GradedConfig.model_validate_json(config.model_dump_json()) == config
    dumped = config.model_dump(mode="json")
    assert dumped["model"] == "m@1"
    assert dumped["graders"] == [{"path": "tests.fixtures.grading:even_share", "arguments": {}}]
    form = GradedConfig.model_json_schema()
    assert list(form["properties"])[:5] == ["run", "seed", "model", "prompts", "graders"]
    assert form["properties"]["model"]["type"] == "string"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", 3, "expected the key of a registered model"),
        ("prompts", {"kind": "nowhere"}, "nowhere"),
        ("prompts", {"kind": "file", "path": "a", "odd": 1}, "odd"),
        ("graders", [{"way": "x"}], "expected an import path"),
        ("graders", [{"path": "a:b", "arguments": {"x": {1}}}], "the arguments of a:b cannot be written as JSON"),
        ("graders", [{"path": "a:b", "arguments": nested(5000)}], "the arguments of a:b cannot be written as JSON"),
    ],
)
def test_what_is_no_such_thing_is_refused_with_what_was_given(field: str, value: Any, message: str) -> None:
    config = {"model": "m", "prompts": "a.jsonl", "graders": []} | {field: value}
    with pytest.raises(ValidationError, match=message):
        GradedConfig.model_validate(config)


async def test_datasets_load_as_threads(tmp_path: Path) -> None:
    class Config(InputConfig):
        shown: Dataset[dataset_kinds.Completion]
        pairs: Dataset[dataset_kinds.Preference]

    config = Config.model_validate({
        "shown": written(tmp_path / "shown.jsonl", [{"prompt": "1", "completion": "one"}]),
        "pairs": written(tmp_path / "pairs.jsonl", [{"prompt": "1", "chosen": "one", "rejected": "two"}]),
    })  # fmt: skip
    prompt, ctx = StringThread().user("1"), context(tmp_path)
    assert [thread.get_turns() for thread in await config.shown.load(ctx)] == [prompt.assistant("one").get_turns()]
    ((good, bad),) = await config.pairs.load(ctx)
    assert (good.last_content(), bad.last_content()) == ("one", "two")
    with pytest.raises(DatasetError):
        await Dataset[dataset_kinds.Preference](config.shown.source).load(ctx)
    with pytest.raises(TypeError, match="no training class accepts it"):
        Dataset[dataset_kinds.Mixed]
    with pytest.raises(TypeError, match="has no kind"):
        await Dataset(config.shown.source).load(ctx)


class Nothing(InputConfig):
    """A recipe without anything of its own."""


async def plain(config: Nothing) -> object: ...


def test_a_recipe_is_told_by_its_annotations() -> None:
    assert recipe_main(plain).name == "plain"

    async def odd(config: Nothing, more: int) -> None: ...

    async def unconfigured(ctx: RecipeContext) -> None: ...

    def unsynchronous(config: Nothing) -> None: ...

    with pytest.raises(TypeError, match="more: <class 'int'>"):
        recipe_main(odd)
    with pytest.raises(TypeError, match="takes no config"):
        recipe_main(unconfigured)
    with pytest.raises(TypeError, match="no async function"):
        recipe_main(unsynchronous)  # type: ignore[arg-type]


async def test_a_recipe_returns_what_json_can_say(place: dict[str, Any]) -> None:
    @recipe_main
    async def handle(config: Nothing) -> object:
        return object()

    with pytest.raises(TypeError, match="return what JSON can say"):
        await handle(Nothing.model_validate(place))
