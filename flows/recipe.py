"""What a hand-written recipe needs: a context that builders take, for a run of its own."""

from __future__ import annotations

from dataclasses import dataclass

from engine.spec import EngineSpec, LocalEngineSpec
from engine.workspace import Workspace
from flows.session import take_lease
from flows.version import code_version
from storage.artifacts import Provenance
from storage.fork import check_fork
from storage.models import canonical_json, digest
from storage.runs import create_or_check_run


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
        workspace = Workspace(
            store=store, engine=engine or LocalEngineSpec(), run=run, seed=seed, provenance=provenance
        )
        check_fork(workspace.open_store(), run)
        create_or_check_run(
            workspace.open_store(), run, semantic={"seed": seed}, other={}, code_version=provenance.code_version
        )
        return cls(take_lease(workspace))
