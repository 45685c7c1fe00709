"""Which store this is: two processes that name it differently (a mount, another endpoint) can tell that it is one."""

from __future__ import annotations

import json
from uuid import uuid4

from storage import keys
from storage.models import canonical_json
from storage.objects import ObjectStore


def store_id(store: ObjectStore) -> str:
    """The store's own id, given to it by whoever asks first."""
    put = store.put_if_absent(keys.store_json(), canonical_json({"schema_version": 1, "id": uuid4().hex}))
    return str(json.loads(put.data)["id"])
