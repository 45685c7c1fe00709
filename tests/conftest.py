"""Fixtures that several folders share."""

from __future__ import annotations

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
