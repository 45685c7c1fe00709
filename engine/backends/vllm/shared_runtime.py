"""A vLLM runtime that all policies of one architecture share, with a record of the weights that it was loaded with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine.backends.replicas.pool import ReplicaPool
from engine.backends.replicas.replica import count_replicas
from engine.backends.replicas.runtime import Runtime
from engine.backends.vllm.architecture import Architecture, EngineOptions
from engine.protocol import ActorCount


@dataclass(slots=True, eq=False)
class SharedRuntime:
    """A runtime that is started at its first use, and started again after it has died."""

    architecture: Architecture
    options: EngineOptions
    config_folder: Path
    start: Callable[[Path, EngineOptions], Runtime]
    """Starts a runtime from the config folder and the options."""
    nbytes: int
    """Bytes of the engine's memory that the runtime takes; 0 for replicas."""
    loaded: str | None = None
    """Name of the weights that the runtime was last proven to hold: a policy's state, or the digest of a base."""
    digest: str | None = None
    """Digest of the manifest of these weights. The state does not identify the bytes: a policy that was recomputed with
    other numerics has the same state and other bytes."""
    loads: int = 0
    """Number of weight loads. vLLM drops all adapters at each load."""
    asleep: bool = False
    users: list[object] = field(default_factory=list)
    """The samplers that use it, the oldest first. The oldest one reports the memory of the runtime as its own."""
    _runtime: Runtime | None = None

    def ensure_running(self) -> Runtime:
        """Returns the runtime. Starts it if it does not run yet or has died, which takes seconds to minutes."""
        if self._runtime is not None and not self._runtime.alive:
            self.close()
        if self._runtime is None:
            self._runtime = self.start(self.config_folder, self.options)
        return self._runtime

    @property
    def is_open(self) -> bool:
        return self._runtime is not None and self._runtime.alive

    @property
    def actors(self) -> ActorCount:
        """Number of replicas. Any thread may use it."""
        runtime = self._runtime  # read once: another thread may close the runtime meanwhile
        if isinstance(runtime, ReplicaPool):
            return count_replicas(runtime.replicas)
        return ActorCount()

    def sleep(self) -> None:
        """Frees device memory, if the options allow it."""
        if self.options.sleep and self.is_open and not self.asleep:
            self.ensure_running().sleep()
            self.asleep = True

    def wake(self) -> bool:
        """Ends a sleep. Returns whether the runtime was asleep. Then its weights may be lost, and must be checked."""
        if not self.asleep:
            return False
        self.asleep = False
        runtime = self.ensure_running()
        runtime.wake()
        runtime.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Ends the runtime. The next use starts another one, without weights."""
        self.loaded, self.asleep = None, False
        if self._runtime is not None:
            runtime, self._runtime = self._runtime, None
            runtime.close()

    def discard(self) -> None:
        """Ends the runtime for good, and deletes the config folder."""
        self.close()
        shutil.rmtree(self.config_folder, ignore_errors=True)
