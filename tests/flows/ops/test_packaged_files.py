"""Tests of the files that travel in the wheel: prefect.yaml and examples."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from flows.ops.packaged_files import PACKAGED, packaged_file, write_examples
from flows.runs import code_version

ROOT = Path(__file__).parents[3]


def files_below(folder: Path) -> set[str]:
    """The paths of all files, relative to the folder's parent, without compiled modules."""
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder.parent).as_posix() for path in paths}


def test_the_wheel_has_the_packages_and_what_they_read(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    expected = {"flows/packaged/prefect.yaml"}
    expected |= {f"flows/packaged/{name}" for name in files_below(ROOT / "examples")}
    for package in ("flows", "tasks", "engine", "storage"):
        expected |= files_below(ROOT / package)
    assert names == expected
    # a name per kind of file that is no module
    assert {
        "flows/packaged/examples/demo.yaml", "flows/packaged/examples/data/sums-train.jsonl",
        "tasks/reports/report.html.j2", "tasks/evaluation/comparison.html.j2", "flows/verl/keys.toml",
        "flows/page/templates/base.html", "flows/page/static/htmx.min.js", "flows/page/static/htmx.LICENSE",
    } <= names  # fmt: skip


def test_a_checkout_reads_the_files_of_its_root() -> None:
    assert not PACKAGED.exists()
    assert packaged_file("prefect.yaml") == ROOT / "prefect.yaml"


def test_the_examples_are_written_once_and_edited_files_stay(tmp_path: Path) -> None:
    names = files_below(ROOT / "examples")
    assert write_examples(tmp_path) == len(names)
    assert files_below(tmp_path / "examples") == names
    (tmp_path / "examples" / "demo.yaml").write_text("edited")
    (tmp_path / "examples" / "data" / "sums-train.jsonl").unlink()
    assert write_examples(tmp_path) == 1
    assert (tmp_path / "examples" / "demo.yaml").read_text() == "edited"
    assert write_examples(tmp_path) == 0
    assert files_below(tmp_path / "examples") == names


def test_the_code_version_of_a_wheel_is_that_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSTINATO_CODE_VERSION", raising=False)
    monkeypatch.setattr(code_version, "PACKAGED", tmp_path)
    assert code_version.code_version() == version("ostinato")
