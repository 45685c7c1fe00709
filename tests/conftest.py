"""Fixtures that several folders share."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.fixtures")

pytest_plugins = [
    "tests.fixtures.charts",
    "tests.fixtures.models",
    "tests.fixtures.postgres",
    "tests.fixtures.prefect",
    "tests.fixtures.s3",
    "tests.fixtures.task_calls",
    "tests.fixtures.toy_run",
    "tests.fixtures.vision",
    "tests.fixtures.worklog",
]
