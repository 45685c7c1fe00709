"""Tests of the base class of records: copies with changes are checked."""

from __future__ import annotations

import pytest
from pydantic import Field, ValidationError

from storage.serialization import Frozen


class Inner(Frozen):
    size: int = 1


class Record(Frozen):
    weight: float = Field(1.0, ge=0)
    name: str = "a"
    inner: Inner = Inner()


@pytest.mark.parametrize("update", [{"weight": -0.02}, {"name": None}, {"unknown": 1}, {"inner": {"size": "x"}}])
def test_a_copy_with_a_value_that_the_record_refuses_is_refused(update: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Record().model_copy(update=update)


def test_a_copy_keeps_the_other_fields_and_which_of_them_were_set() -> None:
    record = Record(name="b")
    copy = record.model_copy(update={"weight": 2.0})
    assert (copy.weight, copy.name, copy.inner) == (2.0, "b", record.inner)
    assert copy.model_dump(exclude_unset=True) == {"weight": 2.0, "name": "b"}
    assert record.weight == 1.0 and record.model_copy() == record
