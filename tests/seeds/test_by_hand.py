"""Tests of a hand-written GRPO: it learns, and an interrupted run ends as one without interruption."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine import workspace as connecting
from engine.handles import Model, TrainingModel
from engine.local.engine import LocalEngine
from engine.specs.engine import EngineSpec
from flows.recipe import RecipeContext
from storage.chain.fork import fork_run
from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.inspect.audit import audit_store
from storage.store import keys
from storage.store.objects import open_store
from tasks.batches.iteration import async_map
from tasks.graders.base import BaseGrader
from tests.chaos.proxy import proxied
from tests.fixtures.engines import DETERMINISTIC
from tests.fixtures.servers.http_engine import running_server
from tests.fixtures.spawning import language_model, own_engines
from tests.seeds.by_hand import ITERATIONS, MINI_BATCHES, PROMPTS, HandGRPO, recipe, reward

ROOT = Path(__file__).resolve().parents[2]
STEPS = ITERATIONS * MINI_BATCHES
PLACES = [
    "1:before_step_0", *(pytest.param(place, marks=pytest.mark.slow) for place in ("1:after_step_0", "1:after_step_1")),
]  # fmt: skip


class Cut(BaseException):
    """The process is gone, as far as the recipe can tell."""


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    with own_engines():
        yield


def dying_at(place: str) -> Callable[[str], None]:
    def visit(here: str) -> None:
        if here == place:
            raise Cut(place)

    return visit


def nowhere(place: str) -> None: ...


def opened(store: Path, engine: EngineSpec = DETERMINISTIC, run: str = "by-hand") -> RecipeContext:
    connecting.connect.cache_clear()  # as another process
    return RecipeContext.open(run, store=str(store), engine=engine)


def records(store: Path, run: str = "by-hand") -> list[CommitRecord]:
    chain = Chain(open_store(store), run, "0-recipe", "policy")
    return list(chain.records(0, chain.head().step))


@dataclass(frozen=True)
class Whole:
    """A run that nothing happened to."""

    states: list[str]
    digests: list[str | None]
    store: Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Whole:
    store = tmp_path_factory.mktemp("whole")
    with own_engines():
        asyncio.run(recipe(opened(store), str(tiny_folder), nowhere))
    chain_records = records(store)
    assert len(chain_records) == STEPS
    return Whole([record.state for record in chain_records], [record.weights_digest for record in chain_records], store)


async def test_the_listing_learns(tmp_path: Path, tiny_folder: Path) -> None:
    """The plain loop: eight iterations over two prompts raise the mean reward of what the model draws."""
    ctx = opened(tmp_path)
    model: TrainingModel = await Model(str(tiny_folder)).to_builder(ctx, tokens_to_generate=6).spawn_train("policy")
    algorithm = HandGRPO(model, BaseGrader.from_function("even", reward), group=8, lr=3e-3)
    await algorithm.start()
    first = await mean_reward(algorithm)
    await algorithm.run(8)
    assert (await model.policy()).step == 8 * MINI_BATCHES
    last = await mean_reward(algorithm)
    assert last > first + 0.1
    assert algorithm.reference is not model and (await algorithm.reference.policy()).step == 0


async def mean_reward(algorithm: HandGRPO) -> float:
    seeded = algorithm.model.seed(5)
    drawn = await async_map(seeded.generate, PROMPTS * 4)
    return sum([await reward(thread) for thread in drawn]) / len(drawn)


@pytest.mark.parametrize("place", PLACES)
async def test_a_recipe_that_is_cut_off_ends_as_one_that_was_not(
    tmp_path: Path, tiny_folder: Path, whole: Whole, place: str
) -> None:
    with pytest.raises(Cut):
        await recipe(opened(tmp_path), str(tiny_folder), dying_at(place))
    committed = records(tmp_path)
    assert len(committed) == MINI_BATCHES + {"b": 0, "a": 1 + int(place[-1])}[place.partition(":")[2][0]]

    passed: list[str] = []
    await recipe(opened(tmp_path), str(tiny_folder), passed.append)
    assert passed[0] == "1:before_step_0"  # the first iteration was not gone through again
    chain_records = records(tmp_path)
    assert [record.attempt for record in chain_records[: len(committed)]] == [record.attempt for record in committed]
    assert [record.state for record in chain_records] == whole.states
    assert [record.weights_digest for record in chain_records] == whole.digests

    passed.clear()
    await recipe(opened(tmp_path), str(tiny_folder), passed.append)
    assert passed == [] and len(records(tmp_path)) == STEPS  # nothing is left to do


@pytest.mark.parametrize(("step", "begins"), [(2, "1:before_step_0"), (3, "1:before_step_0"), (4, "2:before_step_0")])
async def test_a_fork_goes_on_in_its_loop(
    tmp_path: Path, tiny_folder: Path, whole: Whole, step: int, begins: str
) -> None:
    """At the first iteration that is not shared as a whole; what is shared of it stands."""
    store = shutil.copytree(whole.store, tmp_path / "data")
    fork_run(open_store(store), "by-hand", "forked", step=step, code_version="test")
    shared = [record.attempt for record in records(store, "forked")]
    assert len(shared) == step
    passed: list[str] = []
    await recipe(opened(store, run="forked"), str(tiny_folder), passed.append)
    assert passed[0] == begins
    chain_records = records(store, "forked")
    assert [record.attempt for record in chain_records[:step]] == shared
    assert [record.state for record in chain_records] == whole.states
    assert [record.weights_digest for record in chain_records] == whole.digests
    assert audit_store(open_store(store)).problems == ()


async def test_the_reference_of_a_resumed_recipe_is_that_of_the_first_attempt(
    tmp_path: Path, tiny_folder: Path
) -> None:
    with pytest.raises(Cut):
        await recipe(opened(tmp_path), str(tiny_folder), dying_at("2:before_step_0"))
    model = await Model(str(tiny_folder)).to_builder(opened(tmp_path)).spawn_train("policy")
    frozen = await model.clone_inf()
    assert (await frozen.policy()).step == 0
    assert (await model.policy()).step == 0  # until the loop brings it to where it was


async def test_a_loop_after_a_loop_begins_where_that_ended(tmp_path: Path, tiny_folder: Path) -> None:
    async def two_loops(cut_at: int | None) -> list[tuple[int, int]]:
        ctx, went = opened(tmp_path), []
        model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy")
        for loop in range(2):
            async for step in ctx.steps(2):
                model.train_language_modelling(await model.max_gen_len(3).generate(PROMPTS[0]))
                if len(went) == cut_at:
                    raise Cut
                await model.optim_step(1e-4)
                went.append((loop, step))
        return went

    with pytest.raises(Cut):
        await two_loops(3)
    assert await two_loops(None) == [(1, 1)]
    assert len(records(tmp_path)) == 4


async def test_two_models_that_were_cut_off_between_their_steps_take_one_each(
    tmp_path: Path, tiny_folder: Path
) -> None:
    async def both(cut: bool) -> dict[str, list[str]]:
        ctx = opened(tmp_path)
        models = [await language_model(ctx, tiny_folder, name) for name in ("actor", "critic")]
        async for step in ctx.steps(2):
            for model in models:
                model.train_language_modelling(PROMPTS[step].assistant(str(step)))
                await model.optim_step(1e-3)
                if cut and step == 1:
                    raise Cut
        heads = [await model.policy() for model in models]
        return {head.model: [r.attempt for r in chain_of(tmp_path, head).records(0, head.step)] for head in heads}

    with pytest.raises(Cut):
        await both(cut=True)
    actor = Chain(open_store(tmp_path), "by-hand", "0-recipe", "actor")
    committed = [record.attempt for record in actor.records(0, 2)]
    committed_again = await both(cut=False)
    assert committed_again["actor"] == committed and len(committed_again["critic"]) == 2


def chain_of(store: Path, policy: PolicyRef) -> Chain:
    return Chain.of(open_store(store), policy)


async def test_a_committed_step_stands_whatever_the_next_attempt_would_train(
    tmp_path: Path, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on an engine that does not draw the same tokens again."""

    async def attempt(answer: str, cut: bool) -> float:
        ctx = opened(tmp_path)
        model, tokens = await language_model(ctx, tiny_folder), 0.0
        async for _ in ctx.steps(1):
            model.train_language_modelling(PROMPTS[0].assistant(answer))
            tokens = (await model.optim_step(1e-3))["tokens"]
            if cut:
                raise Cut
        return tokens

    with pytest.raises(Cut):
        await attempt("1", True)
    with caplog.at_level("INFO"):
        assert await attempt("12345", False) == 2  # "1" and the end of the turn
    assert "was committed by an earlier attempt and is used" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_killed_for_real(tmp_path: Path, tiny_folder: Path, whole: Whole, place: str) -> None:
    command = [sys.executable, "-m", "tests.seeds.by_hand", str(tmp_path), str(tiny_folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([*command, place], env=environment, cwd=ROOT, timeout=300, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    again = subprocess.run(command, env=environment, cwd=ROOT, timeout=300, capture_output=True)
    assert again.returncode == 0, again.stderr.decode()
    assert [record.weights_digest for record in records(tmp_path)] == whole.digests


@pytest.mark.slow
async def test_every_answer_of_the_engine_may_be_lost_once(tmp_path: Path, tiny_folder: Path, whole: Whole) -> None:
    """Over HTTP: each call is done at most once, and the chain is that of a line that loses nothing."""
    url = f"file://{tmp_path}/store"
    with running_server(LocalEngine(url, DETERMINISTIC)) as spec:
        port = int(spec.url.rpartition(":")[2])
        with proxied("engine", port) as line:
            line.line.lose_each_once = True
            through = spec.model_copy(update={"url": line.endpoint})
            await recipe(opened(tmp_path / "store", through), str(tiny_folder), nowhere)
        lost = {name for name, times in line.lost.items() if times}
    chain_records = records(tmp_path / "store")
    assert [record.weights_digest for record in chain_records] == whole.digests
    assert any("steps" in name or "step" in name for name in lost), lost
    batches = list(open_store(tmp_path / "store").list(keys.step_prefix("by-hand", "0-recipe", 0)))
    assert sum(info.key.endswith(".json") for info in batches) == 1  # the batch of a step was committed once
