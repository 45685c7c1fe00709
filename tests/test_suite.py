"""Tests of the suite itself: its shares, its check of the checkout, and the list of tests that CI runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest

FILES = sorted((conftest.CHECKOUT / "tests").rglob("test_*.py"))


def kept_files(share: str | None) -> list[Path]:
    """The files whose tests a run with this --share keeps."""
    items: Any = [SimpleNamespace(path=path) for path in FILES]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config: Any = SimpleNamespace(getoption=lambda name: share, hook=hook)
    conftest.pytest_collection_modifyitems(config, items)
    return [item.path for item in items]


def test_each_file_is_in_one_of_the_shares() -> None:
    shares = [kept_files(f"{number}/8") for number in range(8)]
    assert sorted(path for share in shares for path in share) == FILES == kept_files(None)
    assert all(len(share) > len(FILES) / 16 for share in shares)


def test_what_a_test_changes_in_the_checkout_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conftest, "CHECKOUT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=ada", "-c", "user.email=ada@example.org"]
    (tmp_path / ".gitignore").write_text("ignored\n")
    for name in ("tracked", "edited"):
        (tmp_path / name).write_text("old")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "edited").write_text("by its author, before the run")

    session: Any = SimpleNamespace(config=SimpleNamespace(stash=pytest.Stash()), exitstatus=0)
    conftest.pytest_sessionstart(session)
    (tmp_path / "ignored").touch()
    conftest.pytest_sessionfinish(session)
    assert session.exitstatus == 0

    (tmp_path / "other.yaml").touch()
    (tmp_path / "tracked").write_text("new")
    conftest.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert capsys.readouterr().out.strip().endswith("temporary folders only:  M tracked, ?? other.yaml")


def test_ci_runs_the_two_stage_recipe_and_names_only_tests_that_exist() -> None:
    script = (conftest.CHECKOUT / ".ci" / "run").read_text()
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", script)
    assert ("tests/seeds/test_two_stages.py", "") in named
    for path, test in named:
        assert f"def {test}" in (conftest.CHECKOUT / path).read_text(), (path, test)


@pytest.mark.parametrize("share", range(8))
def test_ci_runs_each_slow_test_at_some_commit(share: int, tmp_path: Path) -> None:
    """Runs .ci/run with recorders in the place of make, git and pytest. A test that a run leaves out on purpose is run
    at the commits of one share."""
    commands = tmp_path / "bin"
    commands.mkdir()
    record = tmp_path / "record"
    for name, body in (("make", ""), ("git", f"echo 0000000{share}"), ("pytest", f'printf "%s " "$@" >> {record}')):
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    checkout = tmp_path / "checkout"
    for folder in (".ci", ".venv/bin", ".venv-vllm/bin"):
        (checkout / folder).mkdir(parents=True)
    (checkout / ".ci" / "run").write_text((conftest.CHECKOUT / ".ci" / "run").read_text())
    for folder in (".venv", ".venv-vllm"):
        (checkout / folder / "bin" / "python").symlink_to(commands / "pytest")
    environment = {"PATH": f"{commands}:/usr/bin:/bin"}
    subprocess.run(["bash", checkout / ".ci" / "run"], env=environment, check=True)
    words = record.read_text().split()
    assert f"{share}/8" in words
    block = re.search(r"^seldom=\((.*?)^\)", (checkout / ".ci" / "run").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    seldom = block[1].split()
    left_out = [test for test in seldom if f"--deselect={test}" in words]
    assert 0 < len(seldom) <= 8
    assert left_out == [test for number, test in enumerate(seldom) if number != share]
