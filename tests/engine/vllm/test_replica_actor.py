"""The actor of a replica: from which weights it samples, how it streams, and what it does if its workers are broken. A
stand-in replaces vLLM, and the actor is called in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.vllm import vllm_api
from engine.backends.vllm.architecture import EngineOptions
from engine.backends.vllm.replica_actor import ReplicaActor
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied
from engine.protocol import SamplingParams
from engine.text.stops import StopStrings

PARAMS = SamplingParams(max_new_tokens=2).model_dump(mode="json")


class FakeEngine:
    """The part of vLLM's AsyncLLM that the actor uses. Each completion consists of its seed, twice."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.second_reply: dict[str, Any] = {}
        """Values that replace those in the second worker's replies."""
        self.errored = False
        self.running = 0
        """Completions that are sampled now."""
        self.end = asyncio.Event()

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.called.append(method)
        second = {"rank": 1, "worker_id": "x", "error": None} | self.second_reply
        return [{"rank": 0, "worker_id": "w", "error": None}, second]

    async def reset_prefix_cache(self) -> bool:
        return True

    async def generate(
        self, prompt: Any, params: Any, name: str, lora_request: Any, priority: int
    ) -> AsyncIterator[Any]:
        self.running += 1
        try:
            if params.seed < 0:
                raise BadSpec("no such seed")
            await asyncio.sleep(0)
            yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason=None, new=params.seed)], finished=False)
            await self.end.wait()
            yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="length", new=params.seed)], finished=True)
        finally:
            self.running -= 1


@pytest.fixture(autouse=True)
def fake_vllm_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the functions that import vLLM."""
    monkeypatch.setattr(vllm_api, "vllm_params", lambda params, seed, options, stream: SimpleNamespace(seed=seed))
    monkeypatch.setattr(vllm_api, "token_prompt", lambda tokens, salt: tokens)
    monkeypatch.setattr(vllm_api, "output_tokens", lambda output, params: [(output.new, -1.0)])


def run(test: Callable[[ReplicaActor, FakeEngine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        actor, engine = ReplicaActor("replica-0", EngineOptions("float32", 64, 16)), FakeEngine()
        actor._client = engine
        await test(actor, engine)

    asyncio.run(main())


async def load(actor: ReplicaActor, state: str) -> Any:
    return await actor.load(["w.safetensors"], {}, state, False)


def test_it_samples_only_from_weights_proven_in_this_process() -> None:
    async def test(actor: ReplicaActor, engine: FakeEngine) -> None:
        with pytest.raises(SamplerOutOfSync, match="holds None"):
            await actor.score("s", [], None)
        await load(actor, "s")
        assert await actor.score("s", [], None) == []
        with pytest.raises(SamplerOutOfSync, match="holds s"):
            await actor.score("other", [], None)
        with pytest.raises(SamplerOutOfSync, match="holds s"):
            await anext(actor.generate("other", [[1]], [0], [5], PARAMS, 1, None))
        await actor.rpc("ostinato_check", "s")
        assert await actor.score("s", [], None) == []
        engine.second_reply = {"error": "tensor w did not arrive"}
        await load(actor, "t")
        for state in ("s", "t"):
            with pytest.raises(SamplerOutOfSync, match="holds None"):
                await actor.score(state, [], None)

    run(test)


def test_a_completion_is_continued_after_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt of vLLM has them, and the lengths that it is asked for are those of the rest."""
    asked: list[Any] = []
    monkeypatch.setattr(
        vllm_api, "vllm_params",
        lambda params, seed, options, stream: asked.append(params) or SimpleNamespace(seed=seed),
    )  # fmt: skip
    prompts: list[Any] = []
    monkeypatch.setattr(vllm_api, "token_prompt", lambda tokens, salt: prompts.append(tokens) or tokens)
    params = SamplingParams(max_new_tokens=4, min_new_tokens=3).model_dump(mode="json")

    async def test(actor: ReplicaActor, engine: FakeEngine) -> None:
        await load(actor, "s")
        engine.end.set()
        chunks = []
        async for item in actor.generate("s", [[1]], [0, 0], [5, 6], params, 1, None, None, [[8, 9], []]):
            chunks += item
        assert [chunk for chunk in chunks if chunk[0] == 0] == [(0, [5], [-1.0], None), (0, [5], [-1.0], "length")]
        assert prompts == [[1, 8, 9], [1]]
        assert [(rest.max_new_tokens, rest.min_new_tokens) for rest in asked] == [(2, 1), (4, 3)]
        with pytest.raises(BadSpec, match="ended at token 4"):
            await anext(actor.generate("s", [[1]], [0], [5], params, 1, None, None, [[6, 7, 8, 9]]))

    run(test)


def test_an_adapter_that_was_not_loaded_is_refused() -> None:
    async def test(actor: ReplicaActor, engine: FakeEngine) -> None:
        await load(actor, "s")
        with pytest.raises(SamplerOutOfSync, match="holds no adapter a"):
            await actor.score("s", [[1, 2]], "a")

    run(test)


def test_an_actor_with_broken_workers_refuses_calls_and_ends() -> None:
    async def test(actor: ReplicaActor, engine: FakeEngine) -> None:
        ending = asyncio.create_task(actor.wait_for_failure())
        engine.second_reply = {"error": "no room", "broken": False}
        await load(actor, "s")
        await actor.check_health()  # an error, but the next load may succeed
        engine.second_reply = {"error": "no room", "broken": True}
        answers = await load(actor, "s")
        assert answers[1] == {"rank": 1, "worker_id": "x", "error": "no room", "broken": True}
        assert await ending == "its workers are broken"
        for call in (actor.check_health(), load(actor, "s"), actor.score("s", [], None)):
            with pytest.raises(WorkerDied):
                await call

    run(test)


def test_the_end_of_the_engine_is_reported() -> None:
    async def test(actor: ReplicaActor, engine: FakeEngine) -> None:
        ending = asyncio.create_task(actor.wait_for_failure())
        engine.errored = True
        assert await ending == "vLLM's engine ended"

    run(test)


def test_chunks_of_one_step_are_one_item() -> None:
    async def test(actor: ReplicaActor, engine: FakeEngine) -> None:
        await load(actor, "s")
        items = actor.generate("s", [[1], [2]], [0, 0, 1], [5, 6, 7], PARAMS, 1, None)
        assert await anext(items) == [(n, [5 + n], [-1.0], None) for n in range(3)]
        engine.end.set()
        assert await anext(items) == [(n, [5 + n], [-1.0], "length") for n in range(3)]
        with pytest.raises(StopAsyncIteration):
            await anext(items)

    run(test)


def test_a_stop_string_ends_its_completion_alone() -> None:
    async def test(actor: ReplicaActor, engine: FakeEngine) -> None:
        await load(actor, "s")
        params = SamplingParams(max_new_tokens=2, stop=("a",)).model_dump(mode="json")
        items = actor.generate("s", [[1]], [0, 0], [5, 6], params, 1, None, StopStrings((b"a",), {5: b"ba"}))
        assert await anext(items) == [(0, [5], [-1.0], "stop"), (1, [6], [-1.0], None)]
        assert engine.running == 1
        engine.end.set()
        assert await anext(items) == [(1, [6], [-1.0], "length")]

    run(test)


def test_closing_a_stream_ends_its_completions() -> None:
    async def test(actor: ReplicaActor, engine: FakeEngine) -> None:
        await load(actor, "s")
        items = actor.generate("s", [[1]], [0, 0], [5, 6], PARAMS, 1, None)
        await anext(items)
        assert engine.running == 2
        await items.aclose()  # type: ignore[attr-defined]
        assert engine.running == 0

    run(test)


def test_an_error_of_one_completion_ends_the_others() -> None:
    async def test(actor: ReplicaActor, engine: FakeEngine) -> None:
        await load(actor, "s")
        with pytest.raises(BadSpec, match="no such seed"):
            async for _ in actor.generate("s", [[1]], [0, 0], [5, -1], PARAMS, 1, None):
                pass
        assert engine.running == 0

    run(test)
