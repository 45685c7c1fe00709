"""A pool of vLLM replicas behind the interface of one runtime: requests are distributed over the replicas, weights go
to all of them, and each replica must show that it holds the right weights.

A replica that ends or hangs during a call is started again. Other replicas repeat all work that it had in this call,
with the same seeds. Its finished completions are discarded too, because it cannot prove its weights any more. After the
restart it loads the last weights if their files still exist. It gets no work until it holds weights. A replica whose
workers are broken (for example with half-loaded layers) is restarted too.

Replicas join and leave while calls run (`scale`). One that joins is in the state of one that was restarted. One that
leaves gets no new work. The interruptible calls that it samples for end at their next token, and their callers continue
them on other replicas. It finishes other calls. Its weights are then checked once more, and it ends. A replica on a
machine that Ray drains leaves in the same way, and another one joins in its place.

The replicas are Ray actors (`replica_actor`). This process decides which replica samples what (`dispatch`). Ray's
prefix-aware router is not used: it belongs to Ray Serve, which puts proxies and a controller between the pool and
the actors, and it does not know which weights an actor holds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, Literal, TypeVar

from engine.backends.protocol import Interrupted, OnToken
from engine.backends.replicas import partial_completions
from engine.backends.replicas.delivery import FILE_DELIVERY, LoadRequest, WeightDelivery
from engine.backends.replicas.dispatch import WorkItem, affinity_key, dispatch_work
from engine.backends.replicas.partial_completions import POOL_CLOSED, PartialCompletion, TokenQueue
from engine.backends.replicas.replica import (
    POLL_INTERVAL,
    Replica,
    ReplicaSource,
    call_all,
    call_surviving,
    describe_replicas,
    holders_of_adapter,
    holders_of_state,
    in_use,
    replicas_up,
    staying_replicas,
    wait_until,
)
from engine.backends.replicas.runtime import (
    HeldWeights,
    LoadProof,
    Manifest,
    Source,
    any_broken,
    check_replies,
    merge_proofs,
    proof_from_replies,
)
from engine.cluster.actors import ActorHandle
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied
from engine.protocol import Completion, SamplingParams, TokenIds
from engine.text.stops import StopStrings

T = TypeVar("T")

log = logging.getLogger(__name__)

MACHINES_INTERVAL = 2.0
"""Seconds between two questions which machines will be taken away."""


class LoopThread:
    """A thread that runs an event loop until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop and returns its result. Must not be called from the loop's thread. Raises
        WorkerDied if the thread has ended, or ends meanwhile."""
        if self.loop.is_closed():
            work.close()
            raise WorkerDied(POOL_CLOSED)
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop).result()
        except CancelledError as error:
            raise WorkerDied(POOL_CLOSED) from error

    def close(self) -> None:
        """Cancels what runs in the loop, stops it and ends the thread."""
        self.run(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        # Each thread that waits for a call gets its error.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class ReplicaPool:
    """Implements runtime.Runtime over several replicas."""

    def __init__(
        self,
        source: ReplicaSource,
        count: int,
        *,
        keep_weights: bool = False,
        delivery: WeightDelivery = FILE_DELIVERY,
    ) -> None:
        """Returns when `count` replicas are up.

        Args:
            keep_weights: keep links to the last weights for replicas that restart. Without it, they can load them only
                while the caller's files exist.

        Raises:
            WorkerDied: a replica did not start. No replica is left running.
        """
        self.replicas: list[Replica] = []
        """All of them, also those that leave. A change makes a new list, because other threads read it."""
        self._source, self._keep_weights, self._delivery = source, keep_weights, delivery
        self._last_load: LoadRequest | None = None
        """The last weights that were sent to the replicas, for those that restart."""
        self._unchecked: dict[tuple[ActorHandle, str | None], object] = {}
        """The processes that sampled completions since the last check that passed, with the name of the adapter to be
        checked, or None for the base. The value is unique to the last call of `generate`."""
        self._asleep = False
        self._tasks: set[asyncio.Task[None]] = set()
        """The supervisors of the replicas, and what else runs until the pool is closed."""
        # Everything that changes the replicas runs in the loop of this thread, so no lock is needed. Other threads only
        # read them.
        self._thread = LoopThread("vllm-pool")
        try:
            self._thread.run(self._start(count))
        except BaseException:
            self.close()
            raise

    async def _start(self, count: int) -> None:
        for _ in range(count):
            self._join()
        while any(replica.phase == "starting" and not replica.failures for replica in self.replicas):
            await asyncio.sleep(POLL_INTERVAL)
        for replica in self.replicas:
            if replica.failures:
                raise WorkerDied(replica.error)
        self._run_task(self._watch_machines())

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine until it ends or the pool is closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restore_replica(self, replica: Replica) -> None:
        """Loads the last weights into a replica in which vLLM has started, if their files still exist.

        If the pool sleeps, it puts the replica to sleep. Raises WorkerDied if the replica broke during the load.
        """
        # Other weights may be sent while a load runs. Repeat until the replica has got the last ones.
        actor, previous = replica.running_actor(), None
        while (request := self._last_load) is not None and request.files_exist and request.manifest is not previous:
            previous = request.manifest
            try:
                await self._load_into(replica, request)
            except SamplerOutOfSync as error:
                # The files were removed meanwhile, or other weights were sent: only a broken process is an error.
                log.warning("%s", error)
                try:
                    await actor.call("check_health")
                except WorkerDied:
                    raise WorkerDied(f"vLLM {replica.name} broke while it loaded weights: {error}") from error
        if request is not None and replica.loaded_state is None:
            log.warning("vLLM replica %s is back without weights: it waits for the next sync", replica.name)
        # A pool that sleeps must not take the trainer's memory. The caller of `wake` sends weights to all replicas.
        if self._asleep:
            replica.loaded_state = None
            await actor.call("sleep")
            # `wake` may have been called meanwhile, and skips a replica that is not up yet.
            if not self._asleep:
                await actor.call("wake")

    # -- weights ----------------------------------------------------------------------------------------------

    def load(self, source: Source, manifest: Manifest, state: str, *, full: bool = False) -> LoadProof:
        """Loads the weights into every replica that is up, and waits until one is up. For `full`, see Runtime.

        Raises WorkerDied if all die. Raises SamplerOutOfSync if one does not prove them; then none counts as loaded.
        """
        parts = source.parts if isinstance(source, HeldWeights) else None
        request = LoadRequest(self._delivery.paths(source), manifest, state, full, parts=parts)
        return self._thread.run(self._load(request, source))

    async def _load(self, request: LoadRequest, source: Source) -> LoadProof:
        self._forget_last_load()
        self._unchecked.clear()
        for replica in self.replicas:
            replica.loaded_state = None
        await wait_until(lambda: any(replica.phase == "up" for replica in self.replicas), self.replicas)

        # A replica that comes up during the delivery loads them in _restore_replica. After a broadcast it cannot.
        up = replicas_up(self.replicas)
        self._last_load = request
        proofs: list[LoadProof] = []
        deaths, mismatches = list[BaseException](), list[BaseException]()
        with in_use(up):
            outcomes = await self._delivery.deliver(up, request, source, self._load_into)
        for outcome in outcomes:
            if isinstance(outcome, LoadProof):
                proofs.append(outcome)
            elif isinstance(outcome, WorkerDied):
                deaths.append(outcome)
            else:
                mismatches.append(outcome)

        # The load survives the death of some replicas, but not of all, and it does not survive a mismatch.
        if mismatches or not proofs:
            self._forget_last_load()
            for replica in up:
                replica.loaded_state = None
            raise (mismatches or deaths)[0]
        proof = merge_proofs(proofs, request.state)
        if self._keep_weights:
            self._last_load = request.link_files()
        return proof

    @property
    def needs_weights(self) -> bool:
        can_reload = self._last_load is not None and self._last_load.files_exist
        return not can_reload and any(replica.loaded_state is None for replica in replicas_up(self.replicas))

    def _forget_last_load(self) -> None:
        if self._last_load is not None:
            self._last_load.remove_links()
        self._last_load = None

    async def _load_into(self, replica: Replica, request: LoadRequest) -> LoadProof:
        who, actor = f"vLLM {replica.name}", replica.running_actor()
        try:
            replies = await actor.call(
                "load", request.source, request.manifest, request.state, request.full, request.parts
            )
        except WorkerDied:
            await replica.fail(actor)
            raise
        if any_broken(replies):
            await replica.fail(actor)  # the next line raises the error of its reply
        proof = proof_from_replies(replies, request.state, who=who)
        # Compare manifests, not states: two loads of one state may have different bytes.
        if self._last_load is None or self._last_load.manifest is not request.manifest:
            raise SamplerOutOfSync(f"{who} took {request.state} while other weights were sent")
        if replica.actor is not actor:
            raise WorkerDied(f"{who} ended after it took {request.state}")
        replica.worker_ids = [reply["worker_id"] for reply in replies]
        replica.adapters.clear()
        replica.loaded_state = request.state
        return proof

    def check(self, state: str, *, full: bool = False) -> None:
        """Checks every replica that holds `state`.

        Also raises SamplerOutOfSync if a replica sampled and then ended before this check.
        """
        self._thread.run(self._check(state, "ostinato_check", state, full))

    async def _check(self, state: str, method: str, *args: Any) -> None:
        holders = holders_of_state(self.replicas, state)
        if not holders:
            raise SamplerOutOfSync(f"no replica holds {state}: {describe_replicas(self.replicas)}")
        # Nothing can prove the weights of a process that has ended, so its completions must not be used.
        lost = {actor for actor, _ in self._unchecked} - {replica.actor for replica in holders}
        if lost:
            # They stay in `_unchecked` until the next load: other calls may have completions of theirs, too.
            names = ", ".join(sorted(actor.name for actor in lost))
            raise SamplerOutOfSync(f"{names} sampled completions and ended before its weights were checked")
        await self._check_holders(holders, None, method, *args)

    async def _check_holders(self, holders: Sequence[Replica], adapter: str | None, method: str, *args: Any) -> None:
        """Checks the base, or one adapter, of all these replicas, whose completions with it are proven then."""
        actors = {replica.actor for replica in holders}
        sampled = {key: call for key, call in self._unchecked.items() if key[0] in actors and key[1] == adapter}
        await call_all(holders, lambda replica: self._check_replica(replica, method, *args))
        # A call that ended during the check may have sampled after its process was checked, which stays unchecked then.
        for key, last_call in sampled.items():
            if self._unchecked.get(key) is last_call:
                del self._unchecked[key]

    async def _check_replica(self, replica: Replica, method: str, *args: Any) -> None:
        """Calls a check of the worker extension on one replica. Raises SamplerOutOfSync if it does not pass, or if the
        replica sampled since the last check and dies. The death of a replica that has not sampled is no error."""
        actor, worker_ids = replica.running_actor(), list(replica.worker_ids)
        try:
            replies = await actor.call("rpc", method, *args)
            check_replies(replies, worker_ids, who=f"vLLM {replica.name}")
        except WorkerDied as error:
            await replica.fail(actor)
            if any(sampler is actor for sampler, _ in self._unchecked):
                raise SamplerOutOfSync(f"{error}; the weights of its completions cannot be proven any more") from error
        except SamplerOutOfSync:
            replica.loaded_state = None
            raise

    def reset_prefix_cache(self) -> None:
        up = replicas_up(self.replicas)
        self._thread.run(call_surviving(up, lambda replica: replica.running_actor().call("reset_prefix_cache")))

    # -- adapters ---------------------------------------------------------------------------------------------

    def load_adapter(self, folder: Path, name: str, manifest: Manifest) -> None:
        """Loads an adapter into every replica that holds the base. If a replica does not prove it, all remove it.

        The call carries the files themselves, so the replicas need no access to `folder`.
        """
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

        async def load(replica: Replica) -> None:
            replies = await replica.running_actor().call("load_adapter", name, files, manifest)
            replica.adapters.add(name)
            check_replies(replies, replica.worker_ids, who=f"vLLM {replica.name}")

        async def load_all() -> None:
            with_base = [replica for replica in self.replicas if replica.loaded_state is not None]
            await call_surviving(with_base, load)
            if not holders_of_adapter(self.replicas, name):
                raise WorkerDied(f"no replica took adapter {name}: {describe_replicas(self.replicas)}")

        try:
            self._thread.run(load_all())
        except SamplerOutOfSync:
            self.remove_adapter(name)
            raise

    def remove_adapter(self, name: str) -> None:
        async def remove(replica: Replica) -> None:
            replica.adapters.discard(name)
            await replica.running_actor().call("remove_adapter", name)

        async def remove_all() -> None:
            self._unchecked = {key: last_call for key, last_call in self._unchecked.items() if key[1] != name}
            await call_surviving(holders_of_adapter(self.replicas, name), remove)

        self._thread.run(remove_all())

    def check_adapter(self, name: str) -> None:
        async def check() -> None:
            holders = holders_of_adapter(self.replicas, name)
            if not holders:
                raise SamplerOutOfSync(f"no replica holds adapter {name}: {describe_replicas(self.replicas)}")
            await self._check_holders(holders, name, "ostinato_check_adapter", name)

        self._thread.run(check())

    # -- tokens -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        *,
        adapter: str | None = None,
        stops: StopStrings | None = None,
        sampled: Sequence[TokenIds] | None = None,
        interrupted: Interrupted | None = None,
    ) -> list[Completion]:
        """Prompts may repeat. Calls `on_token` in the calling thread; with many prompts the tokens arrive in chunks."""
        completions, new_tokens = [PartialCompletion() for _ in prompts], TokenQueue()
        # A cut must not lose tokens: a completion that ended within a chunk would be kept, and one that went on would
        # be sampled again, so that ends would come more often than the policy draws them.
        chunk_tokens = partial_completions.tokens_per_chunk(1 if interrupted else len(prompts))
        json_params = params.model_dump(mode="json")
        actors: dict[int, ActorHandle] = {}
        """The process that each completion was sent to last."""

        async def send(replica: Replica, indices: list[int]) -> None:
            # Send each distinct prompt once: the completions of a group share a prompt, which may be long.
            distinct, prompt_indices = partial_completions.distinct_prompts([prompts[index] for index in indices])
            earlier = None if sampled is None else [sampled[index] for index in indices]
            actor = replica.running_actor()
            stream = actor.stream(
                "generate", replica.loaded_state, distinct, prompt_indices, [seeds[index] for index in indices],
                json_params, chunk_tokens, adapter, stops, earlier,
            )  # fmt: skip
            for index in indices:
                completions[index].restart()  # a replica that has failed may have begun it
                actors[index] = actor
            await partial_completions.receive_chunks(stream, completions, indices, new_tokens)

        async def dispatch() -> None:
            samplers, last_call = set[ActorHandle](), object()
            try:
                samplers = await dispatch_work(work_items, send, lambda: self._ready_replicas(adapter))
            except asyncio.CancelledError:
                # The tokens so far of an interrupted call are used.
                samplers = {actor for index, actor in actors.items() if completions[index].tokens}
                raise
            finally:
                # `check` must prove the weights of every process that sampled. A replica that leaves waits for its
                # last call and then for this proof, so nothing may be awaited since `dispatch_work` has ended.
                for actor in samplers:
                    self._unchecked |= dict.fromkeys([(actor, None), (actor, adapter)], last_call)

        def must_end() -> bool:
            assert interrupted is not None
            return interrupted() or self._is_sampled_where_one_leaves(completions, actors)

        work_items = [WorkItem(affinity_key(prompt), len(prompt) + params.max_new_tokens) for prompt in prompts]
        work = partial_completions.run_unless_interrupted(dispatch(), must_end if interrupted else None)
        partial_completions.run_with_listener(work, new_tokens, on_token, self._thread.loop)
        if interrupted is not None:
            for completion in completions:
                completion.interrupt()
        return [completion.completion() for completion in completions]

    def _is_sampled_where_one_leaves(
        self, completions: Sequence[PartialCompletion], actors: Mapping[int, ActorHandle]
    ) -> bool:
        """Whether a completion that has not ended is sampled by a replica that leaves. `actors`: their processes, by
        index."""
        draining = {replica.actor for replica in self.replicas if replica.phase == "draining"}
        return any(actor in draining and completions[index].stop is None for index, actor in actors.items())

    def score(
        self, sequences: Sequence[TokenIds], *, temperature: float = 1.0, adapter: str | None = None
    ) -> list[list[float]]:
        if temperature != 1.0:
            raise BadSpec(f"temperature={temperature} was given, and vLLM scores at temperature 1 only")
        scores: list[list[float]] = [[] for _ in sequences]

        async def send(replica: Replica, indices: list[int]) -> None:
            replica_sequences = [list(sequences[index]) for index in indices]
            logprobs = await replica.running_actor().call("score", replica.loaded_state, replica_sequences, adapter)
            for index, sequence_logprobs in zip(indices, logprobs, strict=True):
                scores[index] = sequence_logprobs

        work_items = [WorkItem(affinity_key(sequence), len(sequence)) for sequence in sequences]
        # A process that only scored returned nothing that a later check must prove, so it is not in _unchecked.
        self._thread.run(dispatch_work(work_items, send, lambda: self._ready_replicas(adapter)))
        return scores

    async def _ready_replicas(self, adapter: str | None) -> list[Replica]:
        """The replicas that hold the weights (and the adapter). Waits for one that is about to load them. Raises
        SamplerOutOfSync if there is none."""

        def holders() -> list[Replica]:
            if self._last_load is None:
                return []
            replicas = holders_of_state(replicas_up(self.replicas), self._last_load.state)
            return replicas if adapter is None else holders_of_adapter(replicas, adapter)

        if not holders():
            # A starting replica reloads the base if its files exist, but no adapter.
            request = self._last_load
            is_starting = any(replica.phase in ("starting", "down") for replica in self.replicas)
            if request is None or adapter is not None or not is_starting or not request.files_exist:
                raise SamplerOutOfSync(f"no replica holds the weights any more: {describe_replicas(self.replicas)}")
            await wait_until(lambda: bool(holders()), self.replicas)
        return holders()

    # -- life -------------------------------------------------------------------------------------------------

    def scale(self, count: int) -> None:
        """Changes the number of replicas, at least 1. Returns at once, while replicas start, and others finish their
        work before they end.

        Raises:
            BadSpec: so many replicas can never run.
            WorkerDied: the cluster is lost.
        """
        self._thread.run(self._scale(count))

    async def _scale(self, count: int) -> None:
        staying = staying_replicas(self.replicas)
        if count > len(staying):
            self._source.check_room(count)
        for _ in range(count - len(staying)):
            self._join()
        # Those that can do the least work leave first, and of equal ones the youngest.
        staying.reverse()
        staying.sort(key=lambda each: (each.phase == "up", each.loaded_state is not None, len(each.adapters)))
        for replica in staying[: max(0, len(staying) - count)]:
            self._leave(replica)

    def _join(self) -> None:
        replica = self._source.make(self._restore_replica)
        self.replicas = [*self.replicas, replica]
        self._run_task(replica.supervise())

    def _leave(self, replica: Replica) -> None:
        replica.leaving = True
        self._run_task(self._retire(replica))

    async def _retire(self, replica: Replica) -> None:
        """Ends a replica after its last work and the proof of its weights."""
        # It works on while no other replica can. One that is not up ends at once.
        while replica.phase == "up" and not self._is_replaceable(replica):
            await asyncio.sleep(POLL_INTERVAL)
        if replica.phase == "up":
            replica.set_phase("draining")
            while replica.active_calls and replica.phase == "draining":
                await asyncio.sleep(POLL_INTERVAL)
            await self._prove_sampled(replica)
            # Checks that begin from now on leave it out. Those that run still need it.
            replica.loaded_state = None
            replica.adapters.clear()
            while replica.group_calls and replica.phase == "draining":
                await asyncio.sleep(POLL_INTERVAL)
        await replica.close()
        self.replicas = [other for other in self.replicas if other is not replica]
        replica.release()

    def _is_replaceable(self, replica: Replica) -> bool:
        """Whether a replica that stays can do the work of this one."""
        for other in replicas_up(staying_replicas(self.replicas)):
            has_weights = other.loaded_state is not None or replica.loaded_state is None
            # One that has joined takes part from the next load of an adapter on.
            has_adapters = bool(other.adapters) or not replica.adapters
            if has_weights and has_adapters:
                return True
        return False

    async def _prove_sampled(self, replica: Replica) -> None:
        """Checks the weights with which a replica sampled that samples no more, so that its completions can be used
        after its end. If they are not proven, the next `check` fails."""
        adapters = {adapter for actor, adapter in self._unchecked if actor is replica.actor}
        try:
            for adapter in adapters:
                if adapter is None:
                    await self._check_holders([replica], None, "ostinato_check", replica.loaded_state, False)
                else:
                    await self._check_holders([replica], adapter, "ostinato_check_adapter", adapter)
        except (SamplerOutOfSync, WorkerDied) as error:
            log.warning("%s", error)

    async def _watch_machines(self) -> None:
        """Replaces the replicas on machines that will be taken away."""
        while True:
            await asyncio.sleep(MACHINES_INTERVAL)
            try:
                nodes = await asyncio.to_thread(self._source.draining_nodes)
                for replica in staying_replicas(self.replicas):
                    process = replica.actor.process if replica.actor is not None else None
                    if process is not None and process.node in nodes:
                        log.warning("the machine of vLLM %s will be taken away: another replica joins", replica.name)
                        self._join()
                        self._leave(replica)
            except Exception as error:  # noqa: BLE001 - the boundary to Ray: it is asked again
                if not threading.main_thread().is_alive():
                    return  # Python ends, and starts no threads any more
                log.warning("the replicas on machines that Ray drains are not replaced yet: %s", error)

    def sleep(self) -> None:
        """Puts all replicas to sleep, including those that restart later. After `wake`, load the weights again."""
        self._thread.run(self._sleep_or_wake("sleep"))

    def wake(self) -> None:
        self._thread.run(self._sleep_or_wake("wake"))

    async def _sleep_or_wake(self, method: Literal["sleep", "wake"]) -> None:
        self._asleep = method == "sleep"
        await call_surviving(replicas_up(self.replicas), lambda replica: replica.running_actor().call(method))
        for replica in self.replicas:
            replica.loaded_state = None
            replica.adapters.clear()

    @property
    def alive(self) -> bool:
        # Until close() the pool restarts dead replicas, but a lost private Ray takes all of them along.
        return self._thread.alive and self._source.is_connected()

    def close(self) -> None:
        """Ends every replica and all their processes."""
        if self._thread.alive:
            self._thread.run(self._close())
            self._thread.close()
            self._source.close()

    async def _close(self) -> None:
        # A lost private Ray has taken the processes along, and must not be called.
        if self._source.is_connected():
            await asyncio.gather(*(replica.close() for replica in self.replicas))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._forget_last_load()
        self._delivery.close()
