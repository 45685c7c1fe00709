"""From a spec to a live engine. Torch is imported only when an embedded engine is asked for."""

from __future__ import annotations

from functools import lru_cache

from engine.protocol import Engine
from engine.specs.engine import EngineSpec, HttpEngineSpec


@lru_cache(maxsize=8)
def connect(store_url: str, spec: EngineSpec) -> Engine:
    """The engine that `spec` names, over the artifacts at `store_url`. Equal arguments share one engine: tasks of
    one process must find the weights that the task before them left there."""
    from importlib import import_module

    # by name, so that a worker without torch can import this module (the import contract checks it)
    if isinstance(spec, HttpEngineSpec):
        return import_module("engine.http.client").EngineClient(store_url, spec)
    return import_module("engine.local.engine").LocalEngine(store_url, spec)
