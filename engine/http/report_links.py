"""Addresses of the reports that an engine server shows to a browser, which sends no token.

An address contains a proof that can be computed only with read access to the store: a digest of the store's id, which
is random, and the run. The proof does not change when the engine restarts, so that links in Prefect's history keep
working."""

from __future__ import annotations

import hashlib
import hmac

from engine.specs.engine import EngineSpec, HttpEngineSpec
from storage.store.objects import ObjectStore, store_id

PREFIX = "/reports/"
PROOF_LETTERS = 32
"""Hexadecimal digits of a proof."""


def report_url(engine: EngineSpec, store: ObjectStore, run: str) -> str | None:
    """Returns the address of a run's report, or None if no server shows it. Raises StorageError."""
    # An embedded engine serves no pages.
    if not isinstance(engine, HttpEngineSpec):
        return None
    return f"{engine.url.rstrip('/')}{PREFIX}{run}?proof={proof_of(store_id(store), run)}"


def proof_of(store: str, run: str) -> str:
    """Returns the proof of a run: a keyed digest of 128 bits, whose key is the store's id."""
    return hmac.new(store.encode(), f"report:{run}".encode(), hashlib.sha256).hexdigest()[:PROOF_LETTERS]


def is_proof(proof: str, store: str, run: str) -> bool:
    """Returns whether `proof` is the proof of the run, in constant time."""
    return hmac.compare_digest(proof.encode(), proof_of(store, run).encode())
