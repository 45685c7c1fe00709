"""Fixtures that several folders share."""

from __future__ import annotations

pytest_plugins = ["tests.fixtures.models", "tests.fixtures.s3", "tests.fixtures.prefect", "tests.fixtures.toy_run"]
