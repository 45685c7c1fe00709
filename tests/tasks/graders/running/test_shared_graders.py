"""Tests of graders that configs name: set up once per run, shared, and torn down when they are idle."""

import asyncio
from contextvars import Context

import pytest

from engine.errors import EngineUnreachable
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.errors import StorageUnavailable
from tasks.graders.base import BaseGrader, Grade, GraderError
from tasks.graders.running import shared_graders
from tasks.graders.running.grade_threads import grade_threads
from tasks.graders.running.shared_graders import shared_grader, tear_down_idle_graders
from tasks.graders.setting import grading_in, grading_workspace
from tasks.graders.spec import GraderSpec, in_process_spec
from tests.fixtures.engines import PROVENANCE

PATH = f"{__name__}:Recorded"
events: list[str] = []


class Recorded(BaseGrader):
    """Writes its life into `events`; `fail_setups` of its setups fail."""

    fail_setups = 0

    def __init__(self, grader_key: str = "recorded") -> None:
        super().__init__(grader_key)
        events.append(f"built {grader_key}")

    async def setup(self) -> None:
        await asyncio.sleep(0)
        if Recorded.fail_setups:
            Recorded.fail_setups -= 1
            raise EngineUnreachable("no answer")
        events.append(f"set up {self.grader_key} in {grading_workspace('a test').run}")

    async def teardown(self) -> None:
        events.append(f"torn down {self.grader_key}")

    async def grade(self, thread: StringThread) -> Grade:
        return Grade(value=1.0, grader_key=self.grader_key)


@pytest.fixture(autouse=True)
def no_events() -> None:
    events.clear()
    Recorded.fail_setups = 0


def workspace(run: str = "r") -> Workspace:
    return Workspace(store="memory://owner", run=run, provenance=PROVENANCE)


def spec(key: str = "recorded") -> GraderSpec:
    return GraderSpec(path=PATH, arguments={"grader_key": key})


async def test_shards_share_one_grader() -> None:
    async def shard() -> BaseGrader:
        async with shared_grader(spec(), workspace()) as grader:
            return grader

    first, second = await asyncio.gather(shard(), shard())
    assert first is second is await shard()
    assert events == ["built recorded", "set up recorded in r"]
    await tear_down_idle_graders()
    assert events[2:] == ["torn down recorded"]
    assert await shard() is not first


async def test_another_run_has_its_own() -> None:
    async with shared_grader(spec(), workspace("one")) as first, shared_grader(spec(), workspace("two")) as second:
        assert first is not second
    assert "set up recorded in one" in events and "set up recorded in two" in events


async def test_a_setup_that_failed_is_tried_by_the_next_caller() -> None:
    Recorded.fail_setups = 1
    with pytest.raises(EngineUnreachable):
        async with shared_grader(spec(), workspace()):
            raise AssertionError("a grader that is not set up was given out")
    async with shared_grader(spec(), workspace()) as grader:
        assert (await grader.grade(StringThread())).value == 1.0
    assert events.count("built recorded") == 2


async def test_a_caller_that_is_cancelled_leaves_the_setup_to_the_others() -> None:
    async def use() -> BaseGrader:
        async with shared_grader(spec(), workspace()) as grader:
            return grader

    first, second = asyncio.create_task(use()), asyncio.create_task(use())
    await asyncio.sleep(0)
    first.cancel()
    assert isinstance(await second, BaseGrader) and first.cancelled()
    assert events == ["built recorded", "set up recorded in r"]


async def test_the_longest_idle_go_and_those_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_graders, "MAX_IDLE_GRADERS", 1)
    async with shared_grader(spec("kept"), workspace()):
        for key in ("a", "b"):
            async with shared_grader(spec(key), workspace()):
                pass
        assert [event for event in events if event.startswith("torn")] == ["torn down a"]
    await tear_down_idle_graders()
    assert set(events[-2:]) == {"torn down b", "torn down kept"}


async def test_a_live_grader_belongs_to_its_maker() -> None:
    live = Recorded("live")
    async with shared_grader(in_process_spec(live, version="1"), workspace()) as grader:
        assert grader is live
    await tear_down_idle_graders()
    assert events == ["built live"]


async def test_a_workspace_is_known_only_where_it_was_said() -> None:
    nothing_opened = Context()  # another test of this process may have opened a RecipeContext
    with pytest.raises(GraderError, match="with grading_in"):
        nothing_opened.run(grading_workspace, "a judge")
    with grading_in(workspace("outer")):
        with grading_in(workspace("inner")):
            assert grading_workspace("a judge").run == "inner"
        assert grading_workspace("a judge").run == "outer"


@pytest.mark.parametrize("error", [EngineUnreachable("no answer"), StorageUnavailable("no answer")])
async def test_an_engine_that_is_away_masks_nothing(error: Exception) -> None:
    """The task is retried as a whole: no completion is to blame."""

    async def grade(thread: StringThread) -> float:
        raise error

    threads = [StringThread(turns=[("user", "q"), ("assistant", str(n))]) for n in range(5)]
    with pytest.raises(type(error)):
        await grade_threads(BaseGrader.from_function("judge", grade), threads, retries=0)
