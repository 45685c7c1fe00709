"""The base class of stored records and of configs, the types of their numbers, their canonical JSON, and sha256 digests
of objects and files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

CHUNK_BYTES = 4 << 20
"""Bytes of a large file that are read into memory at a time."""
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
"""These settings decide every digest: a change would make all stored digests invalid."""


class Frozen(BaseModel):
    """Base class of immutable records. Unknown fields are refused. The docstring of a field is its description in the
    JSON schema."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy with changed fields. Raises ValidationError for a value that the record would refuse if it
        were given at first: pydantic's own `model_copy` checks nothing."""
        copy = super().model_copy(deep=deep)
        if not update:
            return copy
        checked = type(self).model_validate(dict(copy) | dict(update))
        # the fields that were set before, and those that are set now
        object.__setattr__(checked, "__pydantic_fields_set__", self.model_fields_set | set(update))
        return checked


def canonical_json(obj: Any) -> bytes:
    """Encodes `obj` as JSON in UTF-8 with sorted keys and no spaces. A pydantic model is dumped first.

    Raises ValueError for NaN and infinities, TypeError for objects that JSON cannot represent.
    """
    return canonical_text(obj).encode("utf-8")


def canonical_text(obj: Any) -> str:
    """Returns the text of `canonical_json`."""
    return _ENCODER.encode(obj.model_dump(mode="json") if isinstance(obj, BaseModel) else obj)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted key -> value of every value in nested mappings. An empty mapping is a value."""
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def left_out(values: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of nested mappings that `kept` does not have."""
    rest: dict[str, Any] = {}
    for name, value in values.items():
        if name not in kept:
            rest[name] = value
        elif isinstance(value, dict) and isinstance(kept[name], dict):
            inner = left_out(value, kept[name])
            if inner:
                rest[name] = inner
    return rest


def digest(obj: Any) -> str:
    """Returns the sha256 in hex of bytes, or of the canonical JSON of any other object."""
    data = bytes(obj) if isinstance(obj, bytes | bytearray | memoryview) else canonical_json(obj)
    return hashlib.sha256(data).hexdigest()


class FileDigest(NamedTuple):
    """The digest and the size of a file."""

    sha256: str
    """In hex."""
    size: int
    """Bytes."""


def digest_file(path: Path) -> FileDigest:
    """Returns the digest and the size of a file. Reads it in chunks of CHUNK_BYTES."""
    hasher, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return FileDigest(hasher.hexdigest(), size)


# Types of the numbers in requests and configs. A model computes in float32, whose largest number is about 3e38: a
# coefficient near that overflows in the first product, and a divisor near the smallest float32 is rounded to 0.
MIN_DIVISOR, MAX_COEFFICIENT = 1e-30, 1e30
"""Bounds of a divisor and a coefficient: products with numbers of ordinary size stay within float32."""
MAX_RATE = 1e3
"""Upper bound of a learning rate and of a weight decay. Useful values are below 1."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Below the minimum, rounding of the logits decides which token is drawn. Above the maximum, all tokens are equally
probable to three digits."""
MAX_EPOCHS = 10_000


def _check_divisor(value: float) -> float:
    if value < MIN_DIVISOR:
        raise ValueError(f"{value} is too small to divide by in float32; give {MIN_DIVISOR} or more")
    return value


# floats
Coefficient = Annotated[float, Field(ge=0, le=MAX_COEFFICIENT, allow_inf_nan=False)]
"""A factor of a loss term. 0 switches the term off."""
Positive = Annotated[float, Field(gt=0, le=MAX_COEFFICIENT, allow_inf_nan=False)]
Divisor = Annotated[float, Field(gt=0, le=MAX_COEFFICIENT, allow_inf_nan=False), AfterValidator(_check_divisor)]
Rate = Annotated[float, Field(ge=0, le=MAX_RATE, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE, allow_inf_nan=False)]
# integers
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]


def default_of(record: type[Frozen], field: str) -> Any:
    """The default of a field of another record."""
    return record.model_fields[field].default
