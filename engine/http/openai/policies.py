"""Which policy a client's `model` means.

    run                          the head of the run's last stage (a run key may be deployment/time)
    run/stage/model              the head of that chain
    …@step                       that committed policy of it
    name, name@version           a registered model; a run of the same name comes before it

A registered model is served as policy 0 of a chain that never moves, `served/<name>`, stage `0-<digest of the version's
content>`: equal requests find the same chain, whoever asks.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from engine.http.openai.models import ApiError, ModelCard
from engine.models.served_policy import DEFAULT_CHAIN, served_policy
from engine.protocol import Engine
from engine.text.stored_models import context_length_of
from storage.chain.leases import current_epoch
from storage.chain.listing import SERVED, is_auxiliary
from storage.chain.records import Chain, PolicyRef, base_model_of
from storage.registry.models import find_model
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore

T = TypeVar("T")

RECENT_SECONDS = 1.0
"""How long a head, an epoch or an unchanged stage is believed."""
LISTING_SECONDS = 10.0
"""How long a listing is believed: it looks at every key of the store."""
REMEMBERED = 256

ChainName = tuple[str, str, str]


class Found(NamedTuple):
    """A policy and the registered model that it descends from."""

    policy: PolicyRef
    base: ArtifactRef
    context: int | None
    """Tokens that the model was made for; None where it does not say."""

    @property
    def model_id(self) -> str:
        policy = self.policy
        return f"{policy.run}/{policy.stage}/{policy.model}@{policy.step}"


class Policies:
    """Names to policies, by what is committed in the store. Its methods are called in one event loop."""

    def __init__(self, engine: Engine, store: ObjectStore, *, recent_seconds: float = RECENT_SECONDS) -> None:
        self.engine, self.store = engine, store
        self._found: _Recent[Found] = _Recent(recent_seconds)
        self._epochs: _Recent[int] = _Recent(recent_seconds)
        self._listing: _Recent[list[ModelCard]] = _Recent(min(LISTING_SECONDS, 10 * recent_seconds))
        self._last_chain: dict[str, ChainName] = {}
        self._contexts: dict[str, int | None] = {}

    async def find(self, model: str) -> Found:
        """Raises InvalidKey on what is no name, ApiError 404 on a name that nothing bears."""
        if (found := self._found.get(model)) is not None:
            return found
        there = await asyncio.to_thread(self._look_up, model)
        policy = there if isinstance(there, PolicyRef) else await self.engine.create_policy(served_policy(there))
        return self._found.put(model, await asyncio.to_thread(self._with_base, policy))

    async def card(self, model: str) -> ModelCard:
        """What there is to say of one model, without making it ready to answer."""
        there = await asyncio.to_thread(self._look_up, model)
        if isinstance(there, PolicyRef):
            return ModelCard(id=model, created=0, owned_by="run", policy=there)
        return ModelCard(id=model, created=0, owned_by="registry")

    async def epoch(self, run: str, *, ask: bool = False) -> int:
        """The fencing epoch in force: a reader acts in the lease holder's, and never ahead of it."""
        if not ask and (known := self._epochs.get(run)) is not None:
            return known
        return self._epochs.put(run, await asyncio.to_thread(current_epoch, self.store, run))

    async def listing(self) -> list[ModelCard]:
        """Every run with a chain, and the registered models whose names no run bears."""
        if (known := self._listing.get("")) is not None:
            return known
        return self._listing.put("", await asyncio.to_thread(self._list))

    # -- in a thread: the store may be slow --------------------------------------------------------------------

    def _look_up(self, model: str) -> PolicyRef | ArtifactRef:
        path, at, version = model.partition("@")
        parts = path.split("/")
        for part in (*parts, version) if at else parts:
            keys.validate_name(part)
        if parts[0] == SERVED and len(parts) == 2:
            parts = parts[1:]
            chain = None
        elif len(parts) in (3, 4):
            chain = Chain(self.store, "/".join(parts[:-2]), *parts[-2:])
            chain = chain if chain.root() is not None else None
        else:
            chain = self._head_chain(keys.validate_run(path))
        if chain is not None and re.fullmatch(r"\d{1,12}", version):
            return chain.policy(int(version))
        if chain is not None and not at:
            return chain.head()
        registered = find_model(self.store, parts[0], version or None) if len(parts) == 1 else None
        if registered is None:
            raise ApiError(
                404,
                f"no model {model!r}: give a run, run/stage/model, either with @step, or a registered name or "
                "name@version; GET /v1/models lists them",
                param="model",
                code="model_not_found",
            )
        return registered

    def _with_base(self, policy: PolicyRef) -> Found:
        base = base_model_of(self.store, policy)
        if base.sha256 not in self._contexts:
            self._contexts[base.sha256] = context_length_of(self.store, base)
        return Found(policy, base, self._contexts[base.sha256])

    def _head_chain(self, run: str) -> Chain | None:
        """The policy chain of the run's last stage. What a run has is listed once, then only what comes after."""
        known = self._last_chain.get(run)
        if known is None or self._has_stage(run, _position(known[1]) + 1):
            names = (keys.chain_of(info.key) for info in self.store.list(keys.run_prefix(run)))
            known = _last({name for name in names if name is not None and name[0] == run})
            if known is None:
                return None
            if known[2] == DEFAULT_CHAIN:
                self._last_chain[run] = known
        return Chain(self.store, *known)

    def _has_stage(self, run: str, position: int) -> bool:
        beginning = keys.stage_prefix(run, f"{position}-").removesuffix("/")
        return any(True for _ in self.store.list(beginning))

    def _list(self) -> list[ModelCard]:
        created: dict[str, float] = {}
        runs: set[str] = set()
        for info in self.store.list(keys.runs_prefix()):
            name = keys.chain_of(info.key)
            if name is not None and not is_auxiliary(name[0]):
                runs.add(name[0])
                created[name[0]] = min(info.modified, created.get(name[0], info.modified))
        registered: dict[str, float] = {}
        for info in self.store.list(keys.models_prefix()):
            alias = keys.alias_of(info.key)
            if alias is not None and alias[0] not in runs:
                registered[alias[0]] = info.modified
        return [
            *(ModelCard(id=run, created=int(created[run]), owned_by="run") for run in sorted(runs)),
            *(ModelCard(id=name, created=int(at), owned_by="registry") for name, at in sorted(registered.items())),
        ]


def _position(stage: str) -> int:
    """The place of a stage in its run; -1 for one whose name does not say."""
    found = re.match(r"(\d{1,9})-", stage)
    return int(found[1]) if found else -1


def _last(chains: Iterable[ChainName]) -> ChainName | None:
    """The chain that stands for a run: `policy` of its last stage, or the only one there."""
    order: Callable[[ChainName], tuple[int, str]] = lambda chain: (_position(chain[1]), chain[1])  # noqa: E731
    by_place = sorted(chains, key=order)
    if not by_place:
        return None
    stage = by_place[-1][1]
    there = sorted(chain for chain in by_place if chain[1] == stage)
    if len(there) > 1 and all(chain[2] != DEFAULT_CHAIN for chain in there):
        names = ", ".join("/".join(chain) for chain in there)
        raise ApiError(404, f"the last stage has several models: give one of {names}", param="model")
    return next((chain for chain in there if chain[2] == DEFAULT_CHAIN), there[0])


class _Recent(Generic[T]):
    """Values that are believed for a while; the latest `REMEMBERED` of them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._values: OrderedDict[str, tuple[float, T]] = OrderedDict()

    def get(self, name: str) -> T | None:
        put_at, value = self._values.get(name, (None, None))
        return value if put_at is not None and time.monotonic() - put_at < self.seconds else None

    def put(self, name: str, value: T) -> T:
        self._values[name] = (time.monotonic(), value)
        self._values.move_to_end(name)
        if len(self._values) > REMEMBERED:
            self._values.popitem(last=False)
        return value
