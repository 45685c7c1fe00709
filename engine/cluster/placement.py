"""Places for actors on the cluster: Ray's placement groups, with errors that say what is missing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.cluster.connection import Cluster
from engine.cluster.inventory import take_inventory
from engine.errors import BadSpec, EngineBusy

SHARED_GPU = 0.5
"""Part of a GPU that each takes, where a rank of the trainer and a replica of vLLM share it."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one actor needs, all of it on one machine."""

    cpus: float = 1.0
    gpus: float = 0.0

    def resources(self) -> dict[str, float]:
        """In Ray's names, without what is zero."""
        named = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: amount for name, amount in named.items() if amount}


class Placement:
    """A bundle of resources for each actor of a group, reserved together.

    Ray keeps the reservation until `remove`. When a machine is lost, Ray moves its bundles to machines with room.
    """

    def __init__(self, cluster: Cluster, name: str, bundles: Sequence[Bundle]) -> None:
        """`name` says who holds the resources: it stands in `ray status` and in errors of others that find none."""
        import ray

        self._cluster, self.bundles = cluster, tuple(bundles)
        self.name = f"{name} ({next(_numbers)})"  # Ray wants another name for each
        wanted = [bundle.resources() for bundle in bundles]
        self._group = ray.util.placement_group(wanted, strategy="PACK", name=self.name)

    def wait(self, seconds: float) -> None:
        """Returns when every bundle is reserved. Ray goes on trying when it raises, until `remove`.

        Raises:
            BadSpec: a private Ray can never have the resources.
            EngineBusy: the cluster did not have them free within `seconds`.
        """
        if self._cluster.private and (missing := self._missing(_totals(), "in all")):
            raise BadSpec(f"{missing} on this machine; ask for less, or give cluster.address of a larger cluster")
        if not self._group.wait(timeout_seconds=max(0.0, seconds)):
            missing = self._missing(_free(), "free") or f"{self._needs()}, and no machine has a whole bundle free"
            raise EngineBusy(
                f"{missing} after {seconds:.0f} s; {_holders()}: add machines to the Ray cluster, or ask for less"
            )

    def options(self, index: int, *, share: float = 1.0) -> dict[str, Any]:
        """Options of the actor in bundle `index`. `share`: its part of the bundle's GPUs, where two actors share."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
        )
        gpus = self.bundles[index].gpus * share
        return {"scheduling_strategy": strategy, "num_cpus": 0, "num_gpus": gpus}

    def remove(self) -> None:
        """Gives the resources back, and kills the actors that are still there."""
        import ray

        ray.util.remove_placement_group(self._group)

    def _needs(self) -> str:
        return f"{self.name} needs {_amounts(self._needed())}"

    def _needed(self) -> Counter[str]:
        """The sums over all bundles, in Ray's names."""
        needed = Counter[str]()
        for bundle in self.bundles:
            needed.update(bundle.resources())  # type: ignore[arg-type]
        return needed

    def _missing(self, there: Mapping[str, float], how: str) -> str:
        """What is needed and what is `there`, "free" or "in all", in words; empty when the sums suffice."""
        needed = self._needed()
        if all(there.get(name, 0.0) >= amount for name, amount in needed.items()):
            return ""
        short = {name: there.get(name, 0.0) for name in needed}
        return f"{self._needs()}, and there are {_amounts(short)} {how}"


def _totals() -> dict[str, float]:
    import ray

    return dict(ray.cluster_resources())


def _free() -> dict[str, float]:
    import ray

    return dict(ray.available_resources())


def _holders() -> str:
    """Which placement groups hold resources now."""
    names = sorted({reservation.name for node in take_inventory().nodes for reservation in node.reservations})
    return f"resources are held by {', '.join(names)}" if names else "no placement group holds resources"


def _amounts(amounts: Mapping[str, float]) -> str:
    """{"GPU": 8, "CPU": 8} as "8 GPUs and 8 CPUs"."""
    order = sorted(amounts, key=lambda name: name != "GPU")
    return " and ".join(f"{amounts[name]:g} {name}{'' if amounts[name] == 1 else 's'}" for name in order)
