"""Addresses under which an engine server shows the reports of its store to a browser, which carries no token.

An address holds a proof that only somebody who may read the store could make: a digest of the store's id, which is
random, and the run. It stays the same over restarts of the engine, so that links in Prefect's history go on working.
"""

from __future__ import annotations

import hashlib
import hmac

from engine.specs.engine import EngineSpec, HttpEngineSpec
from storage.store.identity import store_id
from storage.store.objects import ObjectStore

PREFIX = "/reports/"
PROOF_LETTERS = 32


def report_url(engine: EngineSpec, store: ObjectStore, run: str) -> str | None:
    """Where a browser finds the report of the run; None where no server shows it. Raises StorageError."""
    if not isinstance(engine, HttpEngineSpec):
        return None
    return f"{engine.url.rstrip('/')}{PREFIX}{run}?proof={proof_of(store_id(store), run)}"


def proof_of(store: str, run: str) -> str:
    """128 bits that say: whoever made this address knows the store's id."""
    return hmac.new(store.encode(), f"report:{run}".encode(), hashlib.sha256).hexdigest()[:PROOF_LETTERS]


def is_proof(given: str, store: str, run: str) -> bool:
    return hmac.compare_digest(given.encode(), proof_of(store, run).encode())
