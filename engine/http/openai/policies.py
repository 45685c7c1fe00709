"""`PolicyResolver`: finds the policy that the `model` of a request names.

    run                          the head of the run's last stage (a run key may be deployment/time)
    run/stage/model              the head of that chain
    …@step                       the committed policy of that step
    name, name@version           a registered model, unless a run has that name
    name@champion                the champion of a registered model, or the version of another alias

A registered model is policy 0 of a chain that has no steps: run `served/<name>`, stage `0-<digest of the version's
content>`. Equal requests of all clients use the same chain."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from engine.http.openai.models import ApiError, ModelCard
from engine.protocol import Engine
from engine.text.stored_models import DEFAULT_CHAIN, context_length_of, served_policy
from storage.chain.leases import current_epoch
from storage.chain.listing import SERVED, is_auxiliary, run_chains
from storage.chain.records import Chain, PolicyRef, base_model_of
from storage.registry.decisions import resolve_model
from storage.registry.models import find_model
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.index import run_entries
from storage.store.objects import ObjectStore

T = TypeVar("T")

RECENT_SECONDS = 1.0
"""How long a head, an epoch or the last stage of a run is used before it is read from the store again."""
LISTING_SECONDS = 10.0
"""How long a listing of models is used before it is made again. It lists every run and every registered model."""
MAX_CACHED = 256
"""Most entries of each cache."""

ChainName = tuple[str, str, str]
"""(run, stage, model)"""


class ResolvedPolicy(NamedTuple):
    """A policy and the registered model that it descends from."""

    policy: PolicyRef
    base: ArtifactRef
    context: int | None
    """Context length of the model in tokens. None: its config does not give it."""

    @property
    def model_id(self) -> str:
        """The name of this policy as a request's `model`."""
        return self.policy.full_name


class PolicyResolver:
    """Resolves names from what is committed in the store. Its methods are called in one event loop."""

    def __init__(self, engine: Engine, store: ObjectStore, *, recent_seconds: float = RECENT_SECONDS) -> None:
        self.engine, self.store = engine, store
        self._resolved: _ExpiringCache[ResolvedPolicy] = _ExpiringCache(recent_seconds)
        self._epochs: _ExpiringCache[int] = _ExpiringCache(recent_seconds)
        self._listing: _ExpiringCache[list[ModelCard]] = _ExpiringCache(min(LISTING_SECONDS, 10 * recent_seconds))
        self._last_chains: dict[str, ChainName] = {}
        self._contexts: dict[str, int | None] = {}

    async def resolve(self, model: str) -> ResolvedPolicy:
        """Returns the policy that `model` names. Raises InvalidKey for an invalid name, ApiError 404 for an unknown
        one."""
        resolved = self._resolved.get(model)
        if resolved is not None:
            return resolved
        target = await asyncio.to_thread(self.look_up, model)
        if isinstance(target, PolicyRef):
            policy = target
        else:
            policy = await self.engine.create_policy(served_policy(target))
        return self._resolved.put(model, await asyncio.to_thread(self._with_base, policy))

    async def card(self, model: str) -> ModelCard:
        """Describes one model, without preparing it for requests. Raises the errors of `resolve`."""
        target = await asyncio.to_thread(self.look_up, model)
        if isinstance(target, PolicyRef):
            return ModelCard(id=model, created=0, owned_by="run", policy=target)
        return ModelCard(id=model, created=0, owned_by="registry")

    async def epoch(self, run: str, *, refresh: bool = False) -> int:
        """Returns the fencing epoch of the run's lease, from the store if `refresh` is set. A reader acts in the epoch
        of the lease's holder and never in a later one."""
        if not refresh:
            epoch = self._epochs.get(run)
            if epoch is not None:
                return epoch
        return self._epochs.put(run, await asyncio.to_thread(current_epoch, self.store, run))

    async def listing(self) -> list[ModelCard]:
        """Lists every run with a chain, and the registered models that share no name with a run."""
        cards = self._listing.get("")
        if cards is not None:
            return cards
        return self._listing.put("", await asyncio.to_thread(self._list))

    # -- in a thread, since the store may be slow --------------------------------------------------------------

    def look_up(self, model: str) -> PolicyRef | ArtifactRef:
        """Returns the policy or the registered model that a name stands for. Raises the errors of `resolve`."""
        path, separator, version = model.partition("@")
        parts = path.split("/")
        for part in parts:
            keys.validate_name(part)
        if separator:
            keys.validate_name(version)

        # the chain that the path names, if any; served/<name> is a registered model
        if parts[0] == SERVED and len(parts) == 2:
            parts = parts[1:]
            chain = None
        elif len(parts) in (3, 4):
            named_chain = Chain(self.store, "/".join(parts[:-2]), *parts[-2:])
            chain = named_chain if named_chain.root() is not None else None
        else:
            chain = self._last_chain(keys.validate_run(path))

        # a policy of the chain, or a registered model
        if chain is not None and re.fullmatch(r"\d{1,12}", version):
            return chain.policy(int(version))
        if chain is not None and not separator:
            return chain.head()
        registered = None
        if len(parts) == 1:
            name, _, version = resolve_model(self.store, f"{parts[0]}{separator}{version}").partition("@")
            registered = find_model(self.store, name, version or None)
        if registered is None:
            raise ApiError(
                404,
                f"no model {model!r}: give a run, run/stage/model, either with @step, or a registered name, "
                "name@version or name@champion; GET /v1/models lists them",
                param="model",
                code="model_not_found",
            )
        return registered

    def _with_base(self, policy: PolicyRef) -> ResolvedPolicy:
        # The config of a registered model never changes, so its context length is read once.
        base = base_model_of(self.store, policy)
        if base.sha256 not in self._contexts:
            self._contexts[base.sha256] = context_length_of(self.store, base)
        return ResolvedPolicy(policy, base, self._contexts[base.sha256])

    def _last_chain(self, run: str) -> Chain | None:
        """Returns the policy chain of the run's last stage.

        The keys of a run are listed once. After that it only checks whether a later stage exists.
        """
        name = self._last_chains.get(run)
        if name is None or self._has_stage(run, _position(name[1]) + 1):
            name = _last_of({(chain.run, chain.stage, chain.model) for chain in run_chains(self.store, run)})
            if name is None:
                return None
            # Another name is not remembered: the stage may yet get its policy chain.
            if name[2] == DEFAULT_CHAIN:
                self._last_chains[run] = name
        return Chain(self.store, *name)

    def _has_stage(self, run: str, position: int) -> bool:
        return any(stage.startswith(f"{position}-") for stage in self.store.folder(keys.stages_prefix(run)).folders)

    def _list(self) -> list[ModelCard]:
        # runs, from the index of the store, whose entries are made with the runs
        entries = run_entries(self.store, kind="chains")
        created = {run: info.modified for run, info in entries.items() if not is_auxiliary(run)}

        # registered models
        registered: dict[str, float] = {}
        for info in self.store.list(keys.models_prefix()):
            alias = keys.alias_of(info.key)
            if alias is not None and alias[0] not in created:
                registered[alias[0]] = info.modified

        cards = []
        for run, first in sorted(created.items()):
            cards.append(ModelCard(id=run, created=int(first), owned_by="run"))
        for model, modified in sorted(registered.items()):
            cards.append(ModelCard(id=model, created=int(modified), owned_by="registry"))
        return cards


def _position(stage: str) -> int:
    """Returns the position of a stage in its run, which its name begins with; -1 if it does not."""
    match = re.match(r"(\d{1,9})-", stage)
    return int(match[1]) if match else -1


def _stage_order(chain: ChainName) -> tuple[int, str]:
    return _position(chain[1]), chain[1]


def _last_of(chains: Iterable[ChainName]) -> ChainName | None:
    """Returns the chain that stands for a run: the policy chain of its last stage, or that stage's only chain.

    Raises ApiError 404 if the last stage has several chains and none is the policy chain.
    """
    ordered = sorted(chains, key=_stage_order)
    if not ordered:
        return None
    last_stage = ordered[-1][1]
    candidates = sorted(chain for chain in ordered if chain[1] == last_stage)
    for chain in candidates:
        if chain[2] == DEFAULT_CHAIN:
            return chain
    if len(candidates) > 1:
        names = ", ".join("/".join(chain) for chain in candidates)
        raise ApiError(404, f"the last stage has several models: give one of {names}", param="model")
    return candidates[0]


class _ExpiringCache(Generic[T]):
    """Values that expire after some seconds. It holds the latest `MAX_CACHED` of them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._values: OrderedDict[str, tuple[float, T]] = OrderedDict()

    def get(self, name: str) -> T | None:
        entry = self._values.get(name)
        if entry is None:
            return None
        put_time, value = entry
        is_fresh = time.monotonic() - put_time < self.seconds
        return value if is_fresh else None

    def put(self, name: str, value: T) -> T:
        self._values[name] = (time.monotonic(), value)
        self._values.move_to_end(name)
        if len(self._values) > MAX_CACHED:
            self._values.popitem(last=False)
        return value
