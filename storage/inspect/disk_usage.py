"""The bytes of a store by run, for `ostinato runs du`.

It lists one run or model after the other (storage.inspect.scopes). Only the manifests of published models are read,
which say from which run a model was made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Literal

from storage.inspect.scopes import scopes_of
from storage.serialization import Frozen
from storage.store import key_patterns, keys
from storage.store.artifacts import read_manifest
from storage.store.objects import ObjectInfo, ObjectStore

Part = Literal["checkpoints", "models", "rollouts", "other"]


class RunUsage(Frozen):
    """The bytes of one run."""

    run: str
    checkpoints: int = 0
    models: int = 0
    """Registered models that were made from the run. They do not lie in its folder, and stay when it is deleted."""
    rollouts: int = 0
    """Everything that the steps made: completions, grades, batches."""
    other: int = 0
    """Records, metrics, evaluations, reports."""

    @property
    def total(self) -> int:
        return self.checkpoints + self.models + self.rollouts + self.other


class StoreUsage(Frozen):
    """The bytes of a store."""

    runs: tuple[RunUsage, ...]
    """The largest first."""
    datasets: int
    imported_models: int
    """Registered models that were made by no run, such as base models."""
    models_of_deleted_runs: int
    """Registered models whose runs were deleted."""
    other: int

    @property
    def total(self) -> int:
        models = self.imported_models + self.models_of_deleted_runs
        return sum(run.total for run in self.runs) + self.datasets + models + self.other


def measure_usage(store: ObjectStore) -> StoreUsage:
    """Returns the bytes of every run of the store, and of what belongs to no run. Raises CorruptArtifact."""
    # each object belongs to a run or to one area of the store
    by_run: defaultdict[str, Counter[Part]] = defaultdict(Counter)
    areas: Counter[str] = Counter()
    for scope in scopes_of(store):
        objects = scope.objects(store)
        runs_of_models = _runs_of_models(store, objects)
        for info in objects:
            run, artifact = keys.run_of(info.key), key_patterns.owning_artifact(info.key)
            if run is not None:
                by_run[run][_part_of(info.key, run)] += info.size
            elif artifact in runs_of_models:
                by_run[runs_of_models[artifact]]["models"] += info.size
            else:
                areas[info.key.partition("/")[0]] += info.size
    datasets, imported_models = areas.pop("datasets", 0), areas.pop("models", 0)
    # a run with models only is deleted
    deleted_models = 0
    for run in [run for run, parts in by_run.items() if parts.keys() == {"models"}]:
        deleted_models += by_run.pop(run)["models"]
    # the largest run first
    usages = [RunUsage.model_validate({"run": run, **parts}) for run, parts in by_run.items()]
    return StoreUsage(
        runs=tuple(sorted(usages, key=lambda usage: (-usage.total, usage.run))),
        datasets=datasets,
        imported_models=imported_models,
        models_of_deleted_runs=deleted_models,
        other=areas.total(),
    )


def _part_of(key: str, run: str) -> Part:
    """Returns the part of a run that the object belongs to, by the folder of its stage that it lies in."""
    _stage, _, rest = key.removeprefix(keys.stages_prefix(run)).partition("/")
    folder = rest.partition("/")[0]
    if folder in ("checkpoints", "rebased"):
        return "checkpoints"
    return "rollouts" if folder == "steps" else "other"


def _runs_of_models(store: ObjectStore, objects: list[ObjectInfo]) -> dict[str, str]:
    """Returns the run of each registered model that was made from a policy, by the model's logical key."""
    runs = {}
    for info in objects:
        artifact = key_patterns.artifact_of_manifest(info.key)
        if artifact is None or not info.key.startswith(keys.models_prefix()):
            continue
        manifest = read_manifest(store, artifact)
        parents = [keys.run_of_parent(parent) for parent in manifest.parents]
        if manifest.kind == "model" and parents and parents[0] is not None:
            runs[artifact] = parents[0]
    return runs
