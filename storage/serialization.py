"""Frozen records, and the one way an object becomes bytes and a digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from storage.forms import as_form

CHUNK_BYTES = 4 << 20
"""How much of a large file is in memory at a time."""


class Frozen(BaseModel):
    """An immutable record that refuses fields it does not know. Its JSON schema is fit for a form (storage.forms), in
    which the text under a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(core_schema)
        as_form(handler.resolve_ref_schema(reference), cls.__name__)
        return reference


def canonical_json(obj: Any) -> bytes:
    """The JSON bytes of `obj`: sorted keys, no spaces, UTF-8. Raises ValueError on NaN and infinities, TypeError on
    what JSON cannot say; a pydantic model is dumped first."""
    if isinstance(obj, BaseModel):
        obj = obj.model_dump(mode="json")
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def digest(obj: Any) -> str:
    """sha256 in hex of bytes as they are, of anything else by its canonical JSON."""
    data = bytes(obj) if isinstance(obj, bytes | bytearray | memoryview) else canonical_json(obj)
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> tuple[str, int]:
    """sha256 in hex and size in bytes of a file, in bounded memory."""
    hasher, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return hasher.hexdigest(), size
