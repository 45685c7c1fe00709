"""The keys of loop marks belong to their run, and garbage collection and listings know them."""

from __future__ import annotations

import pytest

from storage.errors import InvalidKey
from storage.store import key_patterns, keys


@pytest.mark.parametrize("run", ["mine", "nightly/20260101T000000Z"])
def test_a_mark_is_a_plain_object_of_its_run(run: str) -> None:
    mark = keys.loop_mark(run, 1, 42)
    assert mark == f"runs/{run}/loops/000001/000042.json"
    assert mark.startswith(keys.loop_prefix(run, 1))
    assert (keys.run_of(mark), key_patterns.classify_key(mark), keys.parse_number(mark)) == (run, "standalone", 42)
    assert key_patterns.artifact_of_manifest(mark) is None and not key_patterns.is_artifact_data(mark)


def test_no_run_is_named_like_the_folder() -> None:
    with pytest.raises(InvalidKey):
        keys.loop_mark("mine/loops", 0, 0)
