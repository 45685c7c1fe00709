"""A pool of vLLM servers as one runtime: requests are spread over them, weights go to all, each one's are proven.

A server that ends or hangs during a call is started again, and everything that it was given in this call is drawn by
other servers, by the same seeds; what it had drawn is not kept, as nobody can ask it for its weights any more. Started
again, it takes the last weights when their files are still there; until then it is given nothing. A server that says
that it is broken (its layers are half reloaded, say) is ended like one that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from engine.backends.protocol import OnToken
from engine.backends.vllm.answers import broken, receipt_of, refuse_wrong, together
from engine.backends.vllm.delivery import BY_FILES, Delivery
from engine.backends.vllm.drawing import Drawing, Heard, once, tell
from engine.backends.vllm.last_weights import Weights
from engine.backends.vllm.routing import Work, affinity
from engine.backends.vllm.runtime import Manifest, Receipt, Source
from engine.backends.vllm.server import Server
from engine.backends.vllm.spreading import Send, spread
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied
from engine.protocol import Completion, SamplingParams, TokenIds

log = logging.getLogger(__name__)

INTERACTIVE = 4
"""A call of so many prompts or fewer is told token by token; a larger one in chunks, which cost less."""
CHUNK_TOKENS = 16
DRAIN_SECONDS = 10.0
"""How long a server that has drained may take to end."""
POLL_SECONDS = 0.05

T = TypeVar("T")
OnUp = Callable[[Server], Awaitable[None]]
Make = Callable[[OnUp], list[Server]]


class VllmPool:
    """Implements runtime.Runtime. `make` gives the servers, which are the pool's from then on; it runs in the pool's
    loop, with what each server is to call when it is up. `on_close` is called once all have ended. `keep`: of the last
    weights, for servers that are started again; else they take them only while the caller's files are there.

    Raises:
        WorkerDied: a server did not come up the first time; none is left running.
    """

    def __init__(
        self, make: Make, on_close: Callable[[], Awaitable[None]], *, keep: bool = False, delivery: Delivery = BY_FILES
    ) -> None:
        self.servers: list[Server] = []
        self._on_close, self._keep, self._delivery = on_close, keep, delivery
        self.takes_tensors = delivery.takes_tensors
        self._weights: Weights | None = None
        self._unproven: set[tuple[str, str]] = set()
        """(server, boot) of what drew completions since the last check that passed."""
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
        self.servers = make(self._bring_up)
        self._keeping = [asyncio.create_task(server.keep()) for server in self.servers]
        while any(server.phase == "starting" and not server.failures for server in self.servers):
            await asyncio.sleep(POLL_SECONDS)
        for server in self.servers:
            if server.failures:
                raise WorkerDied(server.error)

    async def _bring_up(self, server: Server) -> None:
        """A server is healthy, with no weights or, started by others, with those it held before. Raises WorkerDied when
        it is not healthy any more once they were sent."""
        tried: Manifest | None = None
        while (weights := self._weights) is not None and weights.still_there and weights.manifest is not tried:
            tried = weights.manifest
            try:
                await self._load_into(server, weights)
            except SamplerOutOfSync as error:  # its files went away meanwhile, or others were sent
                log.warning("%s", error)
                if not await server.remote.healthy():
                    raise WorkerDied(f"vLLM server {server.name} broke while it took weights: {error}") from error
        if weights is not None and server.held is None:
            log.warning("vLLM server %s is back without weights: it waits for the next sync", server.name)
        if self._asleep:  # whoever wakes them sends weights to all
            server.held = None
            await server.remote.post("do", what="sleep")
            if not self._asleep:  # woken meanwhile, and this one not up yet
                await server.remote.post("do", what="wake")

    # -- weights ----------------------------------------------------------------------------------------------

    def load(self, source: Source, manifest: Manifest, state: str, *, full: bool = False) -> Receipt:
        """Into every server that is up. Raises SamplerOutOfSync when one of them does not prove it; no server answers
        for any weights then."""
        return self._run(self._load(Weights(self._delivery.paths(source), manifest, state, full), source))

    async def _load(self, weights: Weights, source: Source) -> Receipt:
        self._forget()
        self._unproven.clear()
        for server in self.servers:
            server.held = None
        await self._until(lambda: any(server.phase == "up" for server in self.servers))
        up = self._up()
        self._weights = weights  # who comes up meanwhile takes them too
        found = await self._delivery.deliver(up, weights, source, self._load_into)
        receipts = [receipt for receipt in found if isinstance(receipt, Receipt)]
        errors = [error for error in found if isinstance(error, BaseException)]
        wrong = [error for error in errors if not isinstance(error, WorkerDied)]
        if wrong or not receipts:
            self._forget()
            for server in up:
                server.held = None
            raise (wrong or errors)[0]
        receipt = together(receipts, weights.state)
        if self._keep:
            self._weights = weights.kept()
        return receipt

    @property
    def wants_weights(self) -> bool:
        coming = self._weights is not None and self._weights.still_there
        return not coming and any(server.held is None for server in self._up())

    def _forget(self) -> None:
        if self._weights is not None:
            self._weights.drop()
        self._weights = None

    async def _load_into(self, server: Server, weights: Weights) -> Receipt:
        who, process = f"vLLM server {server.name}", server.process
        try:
            given = (weights.source, weights.manifest, weights.state, weights.full)
            answers, boot = await server.remote.rpc("ostinato_load", *given)
            if broken(answers):
                await server.fail(process)
            receipt = receipt_of(answers, weights.state, who=who)
            await server.remote.reset_prefix_cache()
            await server.remote.post("holds", state=weights.state, boot=boot)
        except WorkerDied:
            await server.fail(process)
            raise
        if self._weights is None or self._weights.manifest is not weights.manifest:
            raise SamplerOutOfSync(f"{who} took {weights.state} while other weights were sent")  # perhaps by that name
        server.workers, server.boot = [answer["boot"] for answer in answers], boot
        server.adapters.clear()
        server.held = weights.state
        return receipt

    def check(self, state: str, *, full: bool = False) -> None:
        """Asks every server that holds `state`. A server that drew since the last check and has ended cannot be asked
        any more: SamplerOutOfSync."""
        self._run(self._check(state, "ostinato_check", state, full))

    async def _check(self, state: str, method: str, *args: Any) -> None:
        holders = [server for server in self.servers if server.held == state]
        if not holders:
            raise SamplerOutOfSync(f"no server holds {state}: {self._told()}")
        lost = self._unproven - {(server.name, server.boot) for server in holders}
        if lost:
            self._unproven.clear()
            names = ", ".join(sorted(name for name, _ in lost))
            raise SamplerOutOfSync(f"{names} drew completions and ended before it was asked for its weights")
        await self._all(holders, lambda server: self._prove(server, method, *args))
        self._unproven.clear()

    async def _prove(self, server: Server, method: str, *args: Any) -> None:
        drew, process, workers = (server.name, server.boot) in self._unproven, server.process, list(server.workers)
        try:
            answers, _ = await server.remote.rpc(method, *args)
            refuse_wrong(answers, workers, who=f"vLLM server {server.name}")
        except WorkerDied as error:
            await server.fail(process)
            if drew:
                raise SamplerOutOfSync(f"{error}; what it drew cannot be proven any more") from error
        except SamplerOutOfSync:
            server.held = None
            raise

    def reset_prefix_cache(self) -> None:
        self._run(self._each(self._up(), lambda server: server.remote.reset_prefix_cache()))

    # -- adapters ---------------------------------------------------------------------------------------------

    def load_adapter(self, folder: Path, name: str, manifest: Manifest) -> None:
        """Into every server that holds the base. Where one of them does not prove it, none keeps it."""

        async def load(server: Server) -> None:
            answer = await server.remote.post("adapter", name=name, path=str(folder), manifest=manifest)
            server.adapters.add(name)
            refuse_wrong(answer["answers"], server.workers, who=f"vLLM server {server.name}")

        async def load_all() -> None:
            await self._each([server for server in self.servers if server.held is not None], load)
            if not any(name in server.adapters for server in self.servers):
                raise WorkerDied(f"no server took adapter {name}: {self._told()}")

        try:
            self._run(load_all())
        except SamplerOutOfSync:
            self.remove_adapter(name)
            raise

    def remove_adapter(self, name: str) -> None:
        async def remove(server: Server) -> None:
            server.adapters.discard(name)
            await server.remote.post("forget", name=name)

        self._run(self._each([server for server in self.servers if name in server.adapters], remove))

    def check_adapter(self, name: str) -> None:
        async def check() -> None:
            holders = [server for server in self.servers if name in server.adapters]
            if not holders:
                raise SamplerOutOfSync(f"no server holds adapter {name}: {self._told()}")
            await self._all(holders, lambda server: self._prove(server, "ostinato_check_adapter", name))

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
        drawings = [Drawing() for _ in prompts]
        heard = Heard()
        every = CHUNK_TOKENS if len(prompts) > INTERACTIVE else 1

        async def send(server: Server, numbers: list[int]) -> None:
            body = {
                "state": server.held,
                **once([list(prompts[number]) for number in numbers]),
                "seeds": [seeds[number] for number in numbers],
                "params": params.model_dump(mode="json"),
                "every": every,
                "adapter": adapter,
            }
            for number in numbers:
                drawings[number].begin()
            async for index, tokens, logprobs, stop in server.remote.chunks(body):
                for token, logprob in drawings[numbers[index]].take(tokens, logprobs, stop):
                    heard.put((numbers[index], token, logprob))

        works = [Work(affinity(prompt), len(prompt) + params.max_new_tokens) for prompt in prompts]
        tell(self._draw(works, send, adapter), heard, on_token, self._loop)
        return [drawing.completion() for drawing in drawings]

    def score(
        self, sequences: Sequence[TokenIds], *, temperature: float = 1.0, adapter: str | None = None
    ) -> list[list[float]]:
        if temperature != 1.0:
            raise BadSpec(f"vLLM scores at temperature 1 only; {temperature} was asked for")
        found: list[list[float]] = [[] for _ in sequences]

        async def send(server: Server, numbers: list[int]) -> None:
            asked = [list(sequences[number]) for number in numbers]
            answer = await server.remote.post("score", sequences=asked, state=server.held, adapter=adapter)
            for number, logprobs in zip(numbers, answer["logprobs"], strict=True):
                found[number] = logprobs

        works = [Work(affinity(sequence), len(sequence)) for sequence in sequences]
        self._run(spread(works, send, lambda: self._ready(adapter)))  # it decides nothing later
        return found

    async def _draw(self, works: Sequence[Work], send: Send, adapter: str | None) -> None:
        self._unproven |= await spread(works, send, lambda: self._ready(adapter))

    async def _ready(self, adapter: str | None) -> list[Server]:
        """The servers that can draw now; waits for one that is on its way with the weights. Raises SamplerOutOfSync
        when none is."""
        while True:
            weights = self._weights
            servers = [
                server
                for server in self.servers
                if server.phase == "up"
                and weights is not None
                and server.held == weights.state
                and (adapter is None or adapter in server.adapters)
            ]
            if servers:
                return servers
            coming = any(server.phase in ("starting", "down") for server in self.servers)
            if weights is None or adapter is not None or not coming or not weights.still_there:
                raise SamplerOutOfSync(f"no server holds the weights any more: {self._told()}")
            await self._until(lambda: any(server.held for server in self.servers))

    # -- life -------------------------------------------------------------------------------------------------

    def drain(self, name: str) -> None:
        """The server gets no new requests, and ends once those it has are done and proven. It is not started again."""

        async def drain() -> None:
            server = next(server for server in self.servers if server.name == name)
            server.enter("draining")
            while server.needed or (server.name, server.boot) in self._unproven:
                await asyncio.sleep(POLL_SECONDS)
            await server.close(grace_seconds=DRAIN_SECONDS)

        self._run(drain())

    def sleep(self) -> None:
        """No server holds weights afterwards; one that is started again meanwhile sleeps too."""
        self._run(self._turn("sleep"))

    def wake(self) -> None:
        self._run(self._turn("wake"))

    async def _turn(self, what: Literal["sleep", "wake"]) -> None:
        self._asleep = what == "sleep"
        await self._each(self._up(), lambda server: server.remote.post("do", what=what))
        for server in self.servers:
            server.held = None
            server.adapters.clear()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()  # it mends itself as long as it is open

    def close(self) -> None:
        """Ends every server; no process of theirs is left."""
        if not self._thread.is_alive():
            return
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        self._forget()
        self._delivery.close()
        await self._on_close()

    # -- the loop ---------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _all(self, servers: Sequence[Server], call: Callable[[Server], Awaitable[Any]]) -> None:
        """One call to each, at once; raises the first error once all have answered."""
        found = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
        if errors := [error for error in found if isinstance(error, BaseException)]:
            raise errors[0]

    async def _each(self, servers: Sequence[Server], call: Callable[[Server], Awaitable[Any]]) -> None:
        """As `_all`, but a server that is gone is only started again: it holds nothing then, which is what counts."""

        async def one(server: Server) -> None:
            process = server.process
            try:
                await call(server)
            except WorkerDied as error:
                log.warning("%s", error)
                await server.fail(process)

        await self._all(servers, one)

    def _up(self) -> list[Server]:
        return [server for server in self.servers if server.phase == "up"]

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for what a server that starts will bring. Raises WorkerDied after the time that a start may take."""
        seconds = max(server.start_seconds for server in self.servers)
        for _ in range(int(seconds / POLL_SECONDS)):
            if condition():
                return
            await asyncio.sleep(POLL_SECONDS)
        raise WorkerDied(f"no server was ready within {seconds:.0f} s (sampler.start_seconds): {self._told()}")

    def _told(self) -> str:
        """What is known of each server, for an error message."""
        return "; ".join(f"{server.name} is {server.phase} {server.error}".strip() for server in self.servers)
