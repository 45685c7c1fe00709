"""Fixtures that several folders share."""

from __future__ import annotations

import gc
import subprocess
import zlib
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.fixtures")

CHECKOUT = Path(__file__).parents[1]

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="K/N", help="run share K (0 to N-1) of N shares of the test files")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of the chosen share. A file belongs to a share by its name, so that its fixtures are shared."""
    if config.getoption("--share") is None:
        return
    share, shares = map(int, config.getoption("--share").split("/"))
    kept = [item for item in items if zlib.crc32(str(item.path.relative_to(CHECKOUT)).encode()) % shares == share]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_collection_finish() -> None:
    """Takes what importing all tests made, some 650,000 objects, out of the garbage collector, which would else look at
    them again and again in an eighth of the CPU time."""
    gc.collect()
    gc.freeze()


CHANGES_BEFORE = pytest.StashKey[set[str]]()


def uncommitted_changes() -> set[str]:
    """The changed and the new files of the checkout, as git status lists them. Empty without a git checkout."""
    command = ["git", "--no-optional-locks", "-C", str(CHECKOUT), "status", "--porcelain", "--untracked-files=all"]
    return set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines())


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.stash[CHANGES_BEFORE] = uncommitted_changes()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run if a test has written into the checkout. Tests write to temporary folders only."""
    if CHANGES_BEFORE not in session.config.stash:
        return
    before = session.config.stash[CHANGES_BEFORE]
    changes = sorted(uncommitted_changes() - before)
    if changes:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nThe checkout changed during the run, and tests write to temporary folders only: {', '.join(changes)}")
