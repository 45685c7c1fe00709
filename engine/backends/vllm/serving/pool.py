"""A pool of vLLM replicas as one runtime: requests are spread over them, weights go to all, each one's are proven.

A replica that ends or hangs during a call is started again, and everything that it was given in this call is drawn by
other replicas, by the same seeds. What it had drawn is not kept, as it cannot be asked for its weights any more. When
it is up again, it takes the last weights if their files are still there; until then it is given nothing. A replica that
says that it is broken (its layers are half reloaded, say) is ended like one that hangs.

The replicas are Ray actors (engine.backends.vllm.serving.replica_actor). Which of them draws what is decided here
(`routing`, `spreading`): Ray's prefix-aware router belongs to Ray Serve, whose proxies and controller would stand
between the pool and the actors, and it knows nothing of the weights that an actor holds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, TypeVar

from engine.backends.protocol import OnToken
from engine.backends.vllm.serving.drawing import Drawing, Heard, distinct_prompts, tell
from engine.backends.vllm.serving.replica import Replica
from engine.backends.vllm.serving.routing import Work, affinity
from engine.backends.vllm.serving.runtime import Manifest, Receipt, Source
from engine.backends.vllm.serving.spreading import spread
from engine.backends.vllm.weight_sync.delivery import BY_FILES, Delivery
from engine.backends.vllm.weight_sync.last_weights import Weights
from engine.backends.vllm.weight_sync.receipts import broken, receipt_of, refuse_wrong, together
from engine.cluster.actors import ActorHandle
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied
from engine.protocol import Completion, SamplingParams, TokenIds

log = logging.getLogger(__name__)

INTERACTIVE = 4
"""A call of so many prompts or fewer is told token by token; a larger one in chunks, which cost less."""
CHUNK_TOKENS = 16
POLL_SECONDS = 0.05

T = TypeVar("T")
OnUp = Callable[[Replica], Awaitable[None]]
Make = Callable[[OnUp], list[Replica]]


class VllmPool:
    """Implements runtime.Runtime. `make` gives the replicas, which are the pool's from then on; it runs in the pool's
    loop, with what each replica is to call when it is up. `on_close` is called once all have ended. `keep`: of the last
    weights, for replicas that are started again; else they take them only while the caller's files are there.

    Raises:
        WorkerDied: a replica did not come up the first time; none is left running.
    """

    def __init__(
        self, make: Make, on_close: Callable[[], None], *, keep: bool = False, delivery: Delivery = BY_FILES
    ) -> None:
        self.replicas: list[Replica] = []
        self._on_close, self._keep, self._delivery = on_close, keep, delivery
        self.takes_tensors = delivery.takes_tensors
        self._weights: Weights | None = None
        self._unproven: set[ActorHandle] = set()
        """The processes that drew completions since the last check that passed."""
        self._asleep = False
        self._keeping: list[asyncio.Task[None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-pool", daemon=True)
        self._thread.start()
        try:
            self._run(self._start(make))
        except BaseException:
            self.close()
            raise

    async def _start(self, make: Make) -> None:
        self.replicas = make(self._bring_up)
        self._keeping = [asyncio.create_task(replica.keep()) for replica in self.replicas]
        while any(replica.phase == "starting" and not replica.failures for replica in self.replicas):
            await asyncio.sleep(POLL_SECONDS)
        for replica in self.replicas:
            if replica.failures:
                raise WorkerDied(replica.error)

    async def _bring_up(self, replica: Replica) -> None:
        """Gives the last weights to a replica in which vLLM has started, if their files are still there. Raises
        WorkerDied when it broke over them."""
        actor, tried = replica.running(), None
        while (weights := self._weights) is not None and weights.still_there and weights.manifest is not tried:
            tried = weights.manifest
            try:
                await self._load_into(replica, weights)
            except SamplerOutOfSync as error:  # its files went away meanwhile, or others were sent
                log.warning("%s", error)
                try:
                    await actor.call("check_health")
                except WorkerDied:
                    raise WorkerDied(f"vLLM {replica.name} broke while it took weights: {error}") from error
        if weights is not None and replica.held is None:
            log.warning("vLLM replica %s is back without weights: it waits for the next sync", replica.name)
        if self._asleep:  # whoever wakes them sends weights to all
            replica.held = None
            await actor.call("sleep")
            if not self._asleep:  # woken meanwhile, and this one not up yet
                await actor.call("wake")

    # -- weights ----------------------------------------------------------------------------------------------

    def load(self, source: Source, manifest: Manifest, state: str, *, full: bool = False) -> Receipt:
        """Into every replica that is up. Raises SamplerOutOfSync when one of them does not prove it; no replica answers
        for any weights then."""
        return self._run(self._load(Weights(self._delivery.paths(source), manifest, state, full), source))

    async def _load(self, weights: Weights, source: Source) -> Receipt:
        self._forget()
        self._unproven.clear()
        for replica in self.replicas:
            replica.held = None
        await self._until(lambda: any(replica.phase == "up" for replica in self.replicas))
        up = self._up()
        self._weights = weights  # who comes up meanwhile takes them too
        found = await self._delivery.deliver(up, weights, source, self._load_into)
        receipts = [receipt for receipt in found if isinstance(receipt, Receipt)]
        errors = [error for error in found if isinstance(error, BaseException)]
        wrong = [error for error in errors if not isinstance(error, WorkerDied)]
        if wrong or not receipts:
            self._forget()
            for replica in up:
                replica.held = None
            raise (wrong or errors)[0]
        receipt = together(receipts, weights.state)
        if self._keep:
            self._weights = weights.kept()
        return receipt

    @property
    def wants_weights(self) -> bool:
        coming = self._weights is not None and self._weights.still_there
        return not coming and any(replica.held is None for replica in self._up())

    def _forget(self) -> None:
        if self._weights is not None:
            self._weights.drop()
        self._weights = None

    async def _load_into(self, replica: Replica, weights: Weights) -> Receipt:
        who, actor = f"vLLM {replica.name}", replica.running()
        try:
            answers = await actor.call("load", weights.source, weights.manifest, weights.state, weights.full)
        except WorkerDied:
            await replica.fail(actor)
            raise
        if broken(answers):
            await replica.fail(actor)
        receipt = receipt_of(answers, weights.state, who=who)
        if self._weights is None or self._weights.manifest is not weights.manifest:
            raise SamplerOutOfSync(f"{who} took {weights.state} while other weights were sent")  # perhaps by that name
        if replica.actor is not actor:
            raise WorkerDied(f"{who} ended after it took {weights.state}")
        replica.workers = [answer["boot"] for answer in answers]
        replica.adapters.clear()
        replica.held = weights.state
        return receipt

    def check(self, state: str, *, full: bool = False) -> None:
        """Asks every replica that holds `state`. A replica that drew since the last check and has ended cannot be asked
        any more: SamplerOutOfSync."""
        self._run(self._check(state, "ostinato_check", state, full))

    async def _check(self, state: str, method: str, *args: Any) -> None:
        holders = [replica for replica in self.replicas if replica.held == state]
        if not holders:
            raise SamplerOutOfSync(f"no replica holds {state}: {self._told()}")
        lost = self._unproven - {replica.actor for replica in holders}
        if lost:
            self._unproven.clear()
            names = ", ".join(sorted(actor.name for actor in lost))
            raise SamplerOutOfSync(f"{names} drew completions and ended before it was asked for its weights")
        await self._all(holders, lambda replica: self._prove(replica, method, *args))
        self._unproven.clear()

    async def _prove(self, replica: Replica, method: str, *args: Any) -> None:
        actor, workers = replica.running(), list(replica.workers)
        has_drawn = actor in self._unproven
        try:
            answers = await actor.call("rpc", method, *args)
            refuse_wrong(answers, workers, who=f"vLLM {replica.name}")
        except WorkerDied as error:
            await replica.fail(actor)
            if has_drawn:
                raise SamplerOutOfSync(f"{error}; what it drew cannot be proven any more") from error
        except SamplerOutOfSync:
            replica.held = None
            raise

    def reset_prefix_cache(self) -> None:
        self._run(self._each(self._up(), lambda replica: replica.running().call("reset_prefix_cache")))

    # -- adapters ---------------------------------------------------------------------------------------------

    def load_adapter(self, folder: Path, name: str, manifest: Manifest) -> None:
        """Into every replica that holds the base. Where one of them does not prove it, none keeps it. The files go
        along with the call, so that the replicas need not see `folder`."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

        async def load(replica: Replica) -> None:
            answers = await replica.running().call("load_adapter", name, files, manifest)
            replica.adapters.add(name)
            refuse_wrong(answers, replica.workers, who=f"vLLM {replica.name}")

        async def load_all() -> None:
            await self._each([replica for replica in self.replicas if replica.held is not None], load)
            if not any(name in replica.adapters for replica in self.replicas):
                raise WorkerDied(f"no replica took adapter {name}: {self._told()}")

        try:
            self._run(load_all())
        except SamplerOutOfSync:
            self.remove_adapter(name)
            raise

    def remove_adapter(self, name: str) -> None:
        async def remove(replica: Replica) -> None:
            replica.adapters.discard(name)
            await replica.running().call("remove_adapter", name)

        self._run(self._each([replica for replica in self.replicas if name in replica.adapters], remove))

    def check_adapter(self, name: str) -> None:
        async def check() -> None:
            holders = [replica for replica in self.replicas if name in replica.adapters]
            if not holders:
                raise SamplerOutOfSync(f"no replica holds adapter {name}: {self._told()}")
            await self._all(holders, lambda replica: self._prove(replica, "ostinato_check_adapter", name))

        self._run(check())

    # -- tokens -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Completion]:
        """`on_token` hears of tokens in this thread, in small chunks when there are many prompts."""
        drawings, heard = [Drawing() for _ in prompts], Heard()
        every = CHUNK_TOKENS if len(prompts) > INTERACTIVE else 1

        async def send(replica: Replica, numbers: list[int]) -> None:
            distinct, prompt_of = distinct_prompts([prompts[number] for number in numbers])
            own_seeds = [seeds[number] for number in numbers]
            items = replica.running().stream(
                "generate", replica.held, distinct, prompt_of, own_seeds, params.model_dump(mode="json"), every, adapter
            )
            for number in numbers:
                drawings[number].begin()
            async with aclosing(items):
                async for chunks in items:
                    for index, tokens, logprobs, stop in chunks:
                        for token, logprob in drawings[numbers[index]].take(tokens, logprobs, stop):
                            heard.put((numbers[index], token, logprob))

        async def draw() -> None:
            self._unproven |= await spread(works, send, lambda: self._ready(adapter))

        works = [Work(affinity(prompt), len(prompt) + params.max_new_tokens) for prompt in prompts]
        tell(draw(), heard, on_token, self._loop)
        return [drawing.completion() for drawing in drawings]

    def score(
        self, sequences: Sequence[TokenIds], *, temperature: float = 1.0, adapter: str | None = None
    ) -> list[list[float]]:
        if temperature != 1.0:
            raise BadSpec(f"vLLM scores at temperature 1 only; {temperature} was asked for")
        found: list[list[float]] = [[] for _ in sequences]

        async def send(replica: Replica, numbers: list[int]) -> None:
            asked = [list(sequences[number]) for number in numbers]
            scored = await replica.running().call("score", replica.held, asked, adapter)
            for number, logprobs in zip(numbers, scored, strict=True):
                found[number] = logprobs

        works = [Work(affinity(sequence), len(sequence)) for sequence in sequences]
        self._run(spread(works, send, lambda: self._ready(adapter)))  # it decides nothing later
        return found

    async def _ready(self, adapter: str | None) -> list[Replica]:
        """The replicas that can draw now; waits for one that is on its way with the weights. Raises SamplerOutOfSync
        when none is."""
        while True:
            weights = self._weights
            replicas = [
                replica
                for replica in self.replicas
                if replica.phase == "up"
                and weights is not None
                and replica.held == weights.state
                and (adapter is None or adapter in replica.adapters)
            ]
            if replicas:
                return replicas
            coming = any(replica.phase in ("starting", "down") for replica in self.replicas)
            if weights is None or adapter is not None or not coming or not weights.still_there:
                raise SamplerOutOfSync(f"no replica holds the weights any more: {self._told()}")
            await self._until(lambda: any(replica.held for replica in self.replicas))

    # -- life -------------------------------------------------------------------------------------------------

    def drain(self, name: str) -> None:
        """The replica gets no new requests, and ends once those it has are done and proven. It is not started again."""

        async def drain() -> None:
            replica = next(replica for replica in self.replicas if replica.name == name)
            replica.enter("draining")
            while replica.needed or replica.actor in self._unproven:
                await asyncio.sleep(POLL_SECONDS)
            await replica.close()

        self._run(drain())

    def sleep(self) -> None:
        """No replica holds weights afterwards; one that is started again meanwhile sleeps too."""
        self._run(self._turn("sleep"))

    def wake(self) -> None:
        self._run(self._turn("wake"))

    async def _turn(self, what: Literal["sleep", "wake"]) -> None:
        self._asleep = what == "sleep"
        await self._each(self._up(), lambda replica: replica.running().call(what))
        for replica in self.replicas:
            replica.held = None
            replica.adapters.clear()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()  # it mends itself as long as it is open

    def close(self) -> None:
        """Ends every replica; no process of theirs is left."""
        if not self._thread.is_alive():
            return
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._on_close()

    async def _close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self.replicas))
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        self._forget()
        self._delivery.close()

    # -- the loop ---------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _all(self, replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[Any]]) -> None:
        """One call to each, at once; raises the first error once all have answered."""
        found = await asyncio.gather(*(call(replica) for replica in replicas), return_exceptions=True)
        if errors := [error for error in found if isinstance(error, BaseException)]:
            raise errors[0]

    async def _each(self, replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[Any]]) -> None:
        """As `_all`, but a replica that is gone is only started again: it holds nothing then, which is what counts."""

        async def one(replica: Replica) -> None:
            actor = replica.actor
            try:
                await call(replica)
            except WorkerDied as error:
                log.warning("%s", error)
                await replica.fail(actor)

        await self._all(replicas, one)

    def _up(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.phase == "up"]

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for what a replica that starts will bring. Raises WorkerDied after the time that a start may take."""
        seconds = max(replica.start_seconds for replica in self.replicas)
        for _ in range(int(seconds / POLL_SECONDS)):
            if condition():
                return
            await asyncio.sleep(POLL_SECONDS)
        raise WorkerDied(f"no replica was ready within {seconds:.0f} s (sampler.start_seconds): {self._told()}")

    def _told(self) -> str:
        """What is known of each replica, for an error message."""
        return "; ".join(f"{replica.name} is {replica.phase} {replica.error}".strip() for replica in self.replicas)
