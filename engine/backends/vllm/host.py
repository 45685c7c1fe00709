"""One runtime and what is known of the weights in it: shared by every policy of one architecture."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine.backends.vllm.architecture import Architecture
from engine.backends.vllm.serving.pool import VllmPool
from engine.backends.vllm.serving.replica import count_replicas
from engine.backends.vllm.serving.runtime import EngineOptions, Runtime
from engine.protocol import ActorCount


@dataclass(slots=True, eq=False)
class Host:
    """`loaded` names the weights that the runtime was last proven to hold: a policy's state, or a base's digest."""

    architecture: Architecture
    options: EngineOptions
    config_folder: Path
    open: Callable[[Path, EngineOptions], Runtime]
    nbytes: int
    """Bytes of the engine's memory that it takes: 0 for replicas."""
    loaded: str | None = None
    digest: str | None = None
    """Of the manifest that these came with: a policy that was redone under other numerics has other bytes."""
    loads: int = 0
    """How often weights were loaded: each time vLLM drops every adapter."""
    asleep: bool = False
    users: list[object] = field(default_factory=list)
    """Samplers, the oldest first: it is the one that the memory is booked to."""
    _runtime: Runtime | None = None

    @property
    def runtime(self) -> Runtime:
        """Started on first use, and again once it has died."""
        if self._runtime is not None and not self._runtime.alive:
            self.close()
        if self._runtime is None:
            self._runtime = self.open(self.config_folder, self.options)
        return self._runtime

    @property
    def is_open(self) -> bool:
        return self._runtime is not None and self._runtime.alive

    @property
    def actors(self) -> ActorCount:
        """The replicas behind its runtime. Any thread may ask."""
        runtime = self._runtime
        return count_replicas(runtime.replicas) if isinstance(runtime, VllmPool) else ActorCount()

    def sleep(self) -> None:
        if self.options.sleep and self.is_open and not self.asleep:
            self.runtime.sleep()
            self.asleep = True

    def wake(self) -> bool:
        """True if it slept: its weights may be gone then, which only a check can tell."""
        if not self.asleep:
            return False
        self.asleep = False
        self.runtime.wake()
        self.runtime.reset_prefix_cache()
        return True

    def close(self) -> None:
        """The next use starts it again, without weights."""
        self.loaded, self.asleep = None, False
        if self._runtime is not None:
            runtime, self._runtime = self._runtime, None
            runtime.close()

    def discard(self) -> None:
        self.close()
        shutil.rmtree(self.config_folder, ignore_errors=True)
