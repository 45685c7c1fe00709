"""Reserves resources for actors on the cluster with Ray's placement groups. The errors say which resources are missing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.cluster.connection import PRIVATE_CPUS, Cluster, take_inventory
from engine.errors import BadSpec, EngineBusy, WorkerDied

SHARED_GPU = 0.5
"""Fraction of a GPU for each of a trainer rank and a vLLM replica that share it."""
_placement_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources on one machine, for one actor or for two that share the GPUs."""

    cpus: float = 1.0
    gpus: float = 0.0

    def resources(self) -> dict[str, float]:
        """The amounts by Ray's names, without those that are zero."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: amount for name, amount in amounts.items() if amount}


class Placement:
    """A placement group: bundles of resources that are reserved together.

    Ray keeps the reservation until `remove`. When a machine is lost, Ray moves its bundles to machines with room.
    """

    def __init__(self, cluster: Cluster, name: str, bundles: Sequence[Bundle]) -> None:
        """`name` says who holds the resources. `ray status` and the errors of other placements show it."""
        import ray

        self.cluster, self.bundles = cluster, tuple(bundles)
        # Ray requires unique names. PACK puts bundles on as few machines as possible, so that ranks exchange faster.
        self.name = f"{name} ({next(_placement_numbers)})"
        resources = [bundle.resources() for bundle in bundles]
        self._group = ray.util.placement_group(resources, strategy="PACK", name=self.name)

    def wait(self, timeout: float) -> None:
        """Returns when every bundle is reserved. After an error, Ray still tries to reserve them until `remove`.

        Args:
            timeout: seconds.

        Raises:
            BadSpec: a private Ray is complete and has too few resources.
            WorkerDied: a private Ray has lost its node. Connect again.
            EngineBusy: the cluster did not have the resources free within `timeout`.
        """
        check_room(self.cluster, self.name, self.bundles)
        # Otherwise other runs may free resources, or an autoscaler may add machines.
        if not self._group.wait(timeout_seconds=max(0.0, timeout)):
            # The sums may suffice while no single machine has room for a bundle.
            shortage = _shortage_text(self.name, self.bundles, _free_resources(), "free")
            shortage = shortage or f"{_needs_text(self.name, self.bundles)}, and no machine has a whole bundle free"
            raise EngineBusy(
                f"{shortage} after {timeout:.0f} s; {_holders_text()}: add machines to the Ray cluster, or ask for less"
            )

    def options(self, index: int, *, share: float = 1.0) -> dict[str, Any]:
        """Ray's options for the actor in bundle `index`. `share`: the part of the bundle's GPUs that the actor takes,
        less than 1 if two actors share them."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
        )
        # num_cpus=0: the bundle already reserves the CPUs, and an actor does not count them again.
        gpus = self.bundles[index].gpus * share
        return {"scheduling_strategy": strategy, "num_cpus": 0, "num_gpus": gpus}

    def remove(self) -> None:
        """Frees the resources, and kills the actors that still use them. Nothing is left of a cluster that is lost."""
        import ray

        if self.cluster.loss():
            return
        ray.util.remove_placement_group(self._group)


def check_room(cluster: Cluster, name: str, bundles: Sequence[Bundle], held: Mapping[str, float] | None = None) -> None:
    """Checks whether a private Ray is large enough for the bundles of `name`. It never grows, so waiting cannot help.
    Other clusters are not checked: an autoscaler may add machines.

    Args:
        held: amounts that others hold for good, by Ray's names.

    Raises:
        BadSpec: it has too few resources.
        WorkerDied: it has lost its node. Connect again.
    """
    if not cluster.is_private:
        return
    total = {} if cluster.loss() else _total_resources()
    if total.get("CPU", 0.0) < PRIVATE_CPUS and not cluster.loss():
        cluster.mark_lost(f"it reports {_amounts_text({'CPU': total.get('CPU', 0.0)})}, not {PRIVATE_CPUS}")
    if reason := cluster.loss():
        raise WorkerDied(f"{reason}; the next call starts another one")
    available, label = total, "in all"
    if held is not None:
        available = {resource: amount - held.get(resource, 0.0) for resource, amount in total.items()}
        label = "that nothing else holds"
    if shortage := _shortage_text(name, bundles, available, label):
        raise BadSpec(f"{shortage} on this machine; ask for less, or give cluster.address of a larger cluster")


def _needs_text(name: str, bundles: Sequence[Bundle]) -> str:
    return f"{name} needs {_amounts_text(_required_resources(bundles))}"


def _required_resources(bundles: Sequence[Bundle]) -> Counter[str]:
    """The sums over all bundles, by Ray's names."""
    required = Counter[str]()
    for bundle in bundles:
        required.update(bundle.resources())  # type: ignore[arg-type]
    return required


def _shortage_text(name: str, bundles: Sequence[Bundle], available: Mapping[str, float], label: str) -> str:
    """A sentence with the required and the available amounts; empty if the sums suffice.

    Args:
        label: what `available` counts: "free", for example.
    """
    required = _required_resources(bundles)
    if all(available.get(resource, 0.0) >= amount for resource, amount in required.items()):
        return ""
    present = {resource: available.get(resource, 0.0) for resource in required}
    return f"{_needs_text(name, bundles)}, and there are {_amounts_text(present)} {label}"


def _total_resources() -> dict[str, float]:
    import ray

    return dict(ray.cluster_resources())


def _free_resources() -> dict[str, float]:
    import ray

    return dict(ray.available_resources())


def _holders_text() -> str:
    """A sentence that names the placement groups that hold resources now."""
    names = set[str]()
    for node in take_inventory().nodes:
        names.update(reservation.name for reservation in node.reservations)
    if not names:
        return "no placement group holds resources"
    return f"resources are held by {', '.join(sorted(names))}"


def _amounts_text(amounts: Mapping[str, float]) -> str:
    """{"GPU": 8, "CPU": 8} as "8 GPUs and 8 CPUs"."""
    gpus_first = sorted(amounts, key=lambda name: name != "GPU")
    parts = []
    for name in gpus_first:
        plural = "" if amounts[name] == 1 else "s"
        parts.append(f"{amounts[name]:g} {name}{plural}")
    return " and ".join(parts)
