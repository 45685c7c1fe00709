"""Fixtures that several folders share."""

from __future__ import annotations

import gc

import pytest

pytest.register_assert_rewrite("tests.fixtures")

pytest_plugins = [
    "tests.fixtures.runs.charts",
    "tests.fixtures.models",
    "tests.fixtures.servers.hub",
    "tests.fixtures.stores.postgres",
    "tests.fixtures.prefect",
    "tests.fixtures.stores.s3",
    "tests.fixtures.runs.toy_run",
    "tests.fixtures.vision",
    "tests.fixtures.worklog",
]


def pytest_collection_finish() -> None:
    """Takes what importing all tests made, some 650,000 objects, out of the garbage collector, which would else look at
    them again and again in an eighth of the CPU time."""
    gc.collect()
    gc.freeze()
