"""The id of a store, by which two processes find out that different URLs (a mount, another endpoint) are one store."""

from __future__ import annotations

import logging
from uuid import uuid4

from storage.errors import ObjectNotFound
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.backends.local_folder import read_store_id
from storage.store.objects import ObjectStore

log = logging.getLogger(__name__)


def store_id(store: ObjectStore) -> str:
    """Returns the id of the store. A store without an id gets a new one."""
    # of two processes that begin a store at once, one decides its id
    put = store.put_if_absent(keys.store_json(), canonical_json({"schema_version": 1, "id": uuid4().hex}))
    if put.won:
        log.info("a new store was begun at %s", store.url)
    return read_store_id(put.data, store.address(keys.store_json()))


def find_store_id(store: ObjectStore) -> str | None:
    """Returns the id of the store, or None if it has none yet."""
    try:
        return read_store_id(store.get(keys.store_json()), store.address(keys.store_json()))
    except ObjectNotFound:
        return None
