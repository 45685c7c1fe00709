"""Connects to the engine that a spec describes. Torch is imported only for an embedded engine."""

from __future__ import annotations

from functools import lru_cache

from engine.protocol import Engine
from engine.specs.engine import EngineSpec, HttpEngineSpec


@lru_cache(maxsize=8)
def connect(store_url: str, spec: EngineSpec) -> Engine:
    """Returns the engine that `spec` describes, working on the artifacts at `store_url`.

    Equal arguments return the same engine, so that every task of a process finds the weights that earlier tasks loaded.
    """
    from importlib import import_module

    # Import by name, so that a worker without torch can import this module (an import contract checks it).
    if isinstance(spec, HttpEngineSpec):
        return import_module("engine.http.client").EngineClient(store_url, spec)
    return import_module("engine.local.engine").LocalEngine(store_url, spec)
