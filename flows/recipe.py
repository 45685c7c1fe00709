"""What a hand-written recipe needs: a context that builders take, for a run of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass

from engine.spec import EngineSpec, LocalEngineSpec
from engine.workspace import Workspace
from flows.version import code_version
from storage.artifacts import Provenance
from storage.leases import acquire
from storage.models import canonical_json, digest
from storage.objects import open_store
from storage.runs import create_or_check_run, machine_info


@dataclass(frozen=True)
class RecipeContext:
    """The `ctx` of a recipe: `Model(key).to_builder(ctx)`."""

    workspace: Workspace

    @classmethod
    def open(
        cls, run: str, *, store: str = "ostinato-data", seed: int = 0, engine: EngineSpec | None = None
    ) -> RecipeContext:
        """Creates the run, or opens it again to go on from its last committed step, and takes the lease on it.

        A recipe is code: what it passes to its training classes is not compared with what an earlier attempt passed.
        """
        provenance = Provenance(
            code_version=code_version(), config_digest=digest(canonical_json({"recipe": run})), seed=seed
        )
        opened = open_store(store)
        create_or_check_run(
            opened, run, semantic={"seed": seed}, other={}, code_version=provenance.code_version
        )
        epoch = acquire(opened, run, machine_info() | {"code_version": provenance.code_version, "pid": os.getpid()})
        return cls(
            Workspace(
                store=store,
                engine=engine or LocalEngineSpec(),
                run=run,
                epoch=epoch,
                seed=seed,
                provenance=provenance,
            )
        )
