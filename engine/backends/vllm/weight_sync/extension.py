"""What runs inside vLLM's workers (its `worker_extension_cls`): receives weights, proves them, answers for them later.

The same in this process, in workers of a tensor-parallel group, and in a server, where /collective_rpc reaches it. So
arguments and answers are plain data, and a refusal is an answer (`wrong`), never an exception that a transport would
turn into something else. Only tensors handed over in the same process are more than plain data.

Per load, in this order: every tensor as it is handed to vLLM is digested and compared with the trainer's manifest; vLLM
loads; a tied head is tied again; slices of every live layer are read back and compared with the tensors received (see
readback). The digests of these slices stay, so that `ostinato_check` can prove later, for the price of a few tokens,
that the weights are still the same.
"""

from __future__ import annotations

import hashlib
import random
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.backends.vllm.weight_sync import lora_adapters, readback
from engine.backends.vllm.weight_sync.broadcast import BrokenOff, Meeting, Member, place_of, receive
from engine.backends.weight_files.tensor_files import read_tensors, tensor_bytes
from engine.errors import BadSpec

COUNT = 8
"""Columns or rows read per tensor and load."""
KEPT = 2
"""Of these, how many `ostinato_check` reads again unless it is asked for all."""

Answer = dict[str, Any]


class Refused(Exception):
    """The weights are not what they should be; the text says which tensor."""


@dataclass(slots=True)
class _Held:
    """What this worker proved it holds."""

    state: str
    plan: readback.Plan
    picks: readback.Picks
    digests: dict[str, str]
    """Of what the live layers answered, by slot."""
    few: dict[str, str]
    """The same of the first `KEPT` picks only."""


@dataclass(slots=True)
class _Received:
    """The tensors of one load, as they pass: digests compared, slices kept."""

    manifest: Mapping[str, Sequence[Any]]
    plan: readback.Plan
    rng: random.Random
    before: Mapping[str, tuple[Tensor, Tensor]]
    full: bool
    seen: set[str] = field(default_factory=set)
    now: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    picks: readback.Picks = field(default_factory=dict)
    cuts: dict[str, Tensor] = field(default_factory=dict)
    ended: bool = False
    seconds: float = 0.0

    def pass_on(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields what it was given. Raises Refused at the first tensor that the trainer did not stage like this."""
        slots: dict[str, list[readback.Slot]] = {}
        for slot in self.plan.slots:
            slots.setdefault(slot.tensor, []).append(slot)
        for name, tensor in tensors:
            began = time.perf_counter()
            self._compare(name, tensor)
            prints = readback.fingerprints(tensor)
            if prints is not None:
                self.now[name] = prints
            for slot in slots.get(name, ()):
                count = slot.choices[1] - slot.choices[0] if self.full else COUNT
                picks = readback.pick(slot, prints, self.before.get(name), self.rng, count=count)
                self.picks[slot.key], self.cuts[slot.key] = picks, slot.cut(tensor, picks)
            self.seconds += time.perf_counter() - began
            yield name, tensor
        missing = sorted(self.manifest.keys() - self.seen)
        if missing:
            raise Refused(f"tensor {missing[0]} did not arrive ({len(missing)} of {len(self.manifest)} are missing)")
        self.ended = True

    def _compare(self, name: str, tensor: Tensor) -> None:
        if name in self.seen:
            raise Refused(f"tensor {name} arrived twice")
        if name not in self.manifest:
            raise Refused(f"tensor {name} arrived, which the trainer did not stage")
        self.seen.add(name)
        dtype, shape, sha256 = self.manifest[name]
        if str(tensor.dtype) != dtype or tuple(tensor.shape) != tuple(shape):
            raise Refused(
                f"tensor {name} arrived as {tensor.dtype} {tuple(tensor.shape)}, the trainer staged {dtype} "
                f"{tuple(shape)}"
            )
        found = hashlib.sha256(tensor_bytes(tensor)).hexdigest()
        if found != sha256:
            raise Refused(f"tensor {name} arrived with other bytes: sha256 {found[:12]}…, staged {sha256[:12]}…")


class Extension:
    """Mixed into vLLM's worker class, whose attributes (`model_runner`, `rank`, `reload_weights` …) it uses."""

    model_runner: Any
    rank: int

    # -- weights ----------------------------------------------------------------------------------------------

    def ostinato_load(
        self,
        source: Sequence[str] | Mapping[str, Tensor] | str,
        manifest: Mapping[str, Sequence[Any]],
        state: str,
        full: bool = False,
    ) -> Answer:
        """Loads files, tensors, or what is sent to the group named, as the weights of `state`. `full` reads back every
        column instead of a sample."""
        began = time.perf_counter()
        self._ostinato_held: _Held | None = None
        model = self.model_runner.get_model()
        try:
            plan = readback.plan_of(model, {name: tuple(entry[1]) for name, entry in manifest.items()})
            if plan.untouched:
                raise Refused(f"the trainer staged no tensor for the live parameter {plan.untouched[0]}")
            rng = random.Random(f"{self._boot()} {state}")
            before = getattr(self, "_ostinato_prints", {})
            received = _Received(manifest, plan, rng, before, full)
            self.ostinato_apply(received.pass_on(self._tensors(source, manifest)))
            if not received.ended:
                raise Refused("vLLM did not take every tensor")
            self.ostinato_retie(self.model_runner.get_model())
            loaded = time.perf_counter()
            values, held = self._read_back(plan, received, state)
        except (Refused, BadSpec, BrokenOff) as error:
            return self._load_failed(source, str(error))
        except Exception as error:  # noqa: BLE001 - the boundary to vLLM's loaders, which raise anything
            return self._load_failed(source, f"vLLM did not load the weights: {type(error).__name__}: {error}")
        self._ostinato_prints, self._ostinato_held = received.now, held
        ended = time.perf_counter()
        seconds = {
            "receive": received.seconds,
            "load": loaded - began - received.seconds,
            "readback": ended - loaded,
        }
        return self._answer(state=state, tensors=len(manifest), values=values, unread=plan.unread, seconds=seconds)

    def _load_failed(self, source: Any, wrong: str) -> Answer:
        if isinstance(source, str):
            self._leave(f"rank {self.rank}: {wrong}")
        return self._answer(wrong=wrong, broken=not self._settled())

    def _tensors(
        self, source: Sequence[str] | Mapping[str, Tensor] | str, manifest: Mapping[str, Sequence[Any]]
    ) -> Iterator[tuple[str, Tensor]]:
        if isinstance(source, Mapping):
            yield from source.items()
        elif isinstance(source, str):
            member = self._member()
            if member is None or member.meeting.name != source:
                raise Refused(f"it is no member of group {source}, whose broadcast it was told to take")
            yield from receive(member, manifest)
        else:
            for path in source:
                yield from read_tensors(Path(path))

    def ostinato_apply(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """vLLM's own layerwise reload."""
        self.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]

    @staticmethod
    def ostinato_retie(model: nn.Module) -> None:
        """On the CPU a tied head keeps a prepacked copy of the embedding, which vLLM's reload leaves as it was."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
        embeddings = [
            m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
        ]
        if not getattr(model.config, "tie_word_embeddings", False) or not embeddings:
            return
        for head in heads:
            head.weight = embeddings[0].weight
            head.quant_method.process_weights_after_loading(head)

    def _settled(self) -> bool:
        """Ends a reload that was broken off, or else vLLM would refuse the next one: what no weights came for is put
        back. False where that fails too, and only another process will do."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

        try:
            with set_current_vllm_config(self.model_runner.vllm_config):
                model = self.model_runner.get_model()
                finalize_layerwise_processing(model, self.model_runner.vllm_config.model_config)
        except Exception:  # noqa: BLE001 - the same boundary; the caller tells
            return False
        return True

    def _read_back(self, plan: readback.Plan, received: _Received, state: str) -> tuple[int, _Held]:
        values, held = 0, _Held(state, plan, received.picks, {}, {})
        for slot, live in readback.read(self.model_runner.get_model(), plan.slots, received.picks):
            picks = received.picks[slot.key]
            difference = readback.first_difference(slot, live, received.cuts[slot.key], picks)
            if difference:
                raise Refused(f"tensor {slot.tensor} is not what the live model computes with: {difference}")
            values += live.numel()
            held.digests[slot.key] = readback.digest(live)
            held.few[slot.key] = readback.digest(live[: len(_few(picks))] if picks else live)
        return values, held

    def ostinato_check(self, state: str, full: bool = False) -> Answer:
        """Whether the live weights are still those that were loaded as `state`; `full`: all slices that it read."""
        held: _Held | None = getattr(self, "_ostinato_held", None)
        if held is None or held.state != state:
            return self._answer(wrong=f"it holds {held.state if held else 'no proven weights'}, expected {state}")
        try:
            picks = held.picks if full else {key: _few(chosen) for key, chosen in held.picks.items()}
            wanted = held.digests if full else held.few
            for slot, live in readback.read(self.model_runner.get_model(), held.plan.slots, picks):
                if readback.digest(live) != wanted[slot.key]:
                    raise Refused(f"tensor {slot.tensor} changed in {slot.path} since {state} was loaded")
        except Refused as error:
            self._ostinato_held = None
            return self._answer(wrong=str(error))
        except Exception as error:  # noqa: BLE001 - the boundary to vLLM's layers: what they raise after a bad reload
            self._ostinato_held = None
            return self._answer(wrong=f"the live layers no longer answer: {type(error).__name__}: {error}")
        return self._answer(state=state)

    # -- broadcasts -------------------------------------------------------------------------------------------

    def ostinato_place(self) -> Answer:
        """Where this worker computes, by which the kind of the group is chosen."""
        return self._answer(place=dict(place_of(self._device())))

    def ostinato_join(self, meeting: Mapping[str, Any], first: int) -> Answer:
        """Becomes rank `first` + its own of a new group, in the place of the one that it was in."""
        self._leave("a member joined another group")
        try:
            member = Member(Meeting(**meeting), first + self.rank, self._device())
        except BrokenOff as error:
            return self._answer(wrong=str(error))
        self._ostinato_member: Member | None = member
        return self._answer()

    def _member(self) -> Member | None:
        return getattr(self, "_ostinato_member", None)

    def _leave(self, why: str) -> None:
        member = self._member()
        if member is not None:
            member.leave(why)
        self._ostinato_member = None

    def _device(self) -> torch.device:
        return next(self.model_runner.get_model().parameters()).device

    # -- adapters ---------------------------------------------------------------------------------------------

    def ostinato_load_adapter(
        self, folder: str, name: str, number: int, manifest: Mapping[str, Sequence[Any]]
    ) -> Answer:
        """Hot-loads a peft folder and proves that the live slots hold it. The base must have been loaded before."""
        held: _Held | None = getattr(self, "_ostinato_held", None)
        if held is None:
            return self._answer(wrong="an adapter came before the base's weights")
        try:
            self.ostinato_add_adapter(folder, name, number)
            manager, model = self._lora()
            digest = lora_adapters.compare(manager, model, held.plan, Path(folder), number, manifest)
        except (lora_adapters.NotTheAdapter, BadSpec) as error:
            return self._answer(wrong=str(error))
        except Exception as error:  # noqa: BLE001 - the boundary to vLLM's LoRA loader, which raises anything
            return self._answer(wrong=f"vLLM did not load the adapter: {type(error).__name__}: {error}")
        self._adapters_held()[name] = (number, digest)
        return self._answer(name=name)

    def ostinato_add_adapter(self, folder: str, name: str, number: int) -> None:
        from vllm.lora.request import LoRARequest

        self.add_lora(LoRARequest(name, number, folder))  # type: ignore[attr-defined]

    def ostinato_check_adapter(self, name: str) -> Answer:
        """Whether the live slots still hold what `ostinato_load_adapter` proved."""
        number, wanted = self._adapters_held().get(name, (0, ""))
        if not wanted:
            return self._answer(wrong=f"it holds no adapter {name}")
        manager, model = self._lora()
        try:
            if lora_adapters.digest(manager, model, number) != wanted:
                raise lora_adapters.NotTheAdapter(f"the live adapter changed since {name} was loaded")
        except lora_adapters.NotTheAdapter as error:
            del self._adapters_held()[name]
            return self._answer(wrong=str(error))
        return self._answer(name=name)

    def ostinato_remove_adapter(self, name: str) -> Answer:
        number, _ = self._adapters_held().pop(name, (0, ""))
        if number:
            self.remove_lora(number)  # type: ignore[attr-defined]
        return self._answer(name=name)

    def _lora(self) -> tuple[Any, nn.Module]:
        return self.model_runner.lora_manager._adapter_manager, self.model_runner.get_model()

    def _adapters_held(self) -> dict[str, tuple[int, str]]:
        """By name: vLLM's number, digest of the live slots."""
        if not hasattr(self, "_ostinato_adapters"):
            self._ostinato_adapters: dict[str, tuple[int, str]] = {}
        return self._ostinato_adapters

    # -- life -------------------------------------------------------------------------------------------------

    def ostinato_reset(self) -> Answer:
        """Forgets what was proven: the next check fails until the next load."""
        self._ostinato_held = None
        return self._answer()

    def _boot(self) -> str:
        """Made once in the life of this process's worker."""
        if not hasattr(self, "_ostinato_boot"):
            self._ostinato_boot = uuid.uuid4().hex
        return self._ostinato_boot

    def _answer(self, *, wrong: str | None = None, **found: Any) -> Answer:
        return {"rank": self.rank, "boot": self._boot(), "wrong": wrong, **found}


def _few(picks: list[int]) -> list[int]:
    return picks[:KEPT]
