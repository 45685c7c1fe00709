"""Fixtures that several folders share."""

from __future__ import annotations

pytest_plugins = [
    "tests.fixtures.models",
    "tests.fixtures.postgres",
    "tests.fixtures.prefect",
    "tests.fixtures.s3",
    "tests.fixtures.toy_run",
    "tests.fixtures.vision",
    "tests.fixtures.worklog",
]
