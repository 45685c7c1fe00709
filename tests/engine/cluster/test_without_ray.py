"""Tests of a machine without Ray: code that needs Ray names the package before a model is loaded, and the rest
works."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.errors import BadSpec
from engine.local.engine import LocalEngine
from engine.specs.engine import LocalEngineSpec
from flows.cli.main import app

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None  # `import ray` raises ModuleNotFoundError
from engine.local.engine import LocalEngine
from engine.specs.engine import LocalEngineSpec
import asyncio
engine = LocalEngine("memory://without-ray", LocalEngineSpec(threads=1))
print(asyncio.run(engine.info()).devices)
"""
RANKS = {"trainer": {"kind": "deepspeed", "ranks": 2}}
REPLICAS = {"sampler": {"kind": "vllm", "replicas": 2}}


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.parametrize("keys", [RANKS, REPLICAS], ids=["ranks", "replicas"])
def test_ranks_and_replicas_say_what_to_install(no_ray: None, keys: dict[str, Any]) -> None:
    with pytest.raises(BadSpec, match=r"Ray is not installed.*pip install 'ostinato\[cluster\]'"):
        LocalEngine("memory://never", LocalEngineSpec.model_validate(keys))


def test_the_server_says_it_in_one_line_and_does_not_start(no_ray: None) -> None:
    words = ["engine", "serve", "--storage", "memory://never", "--port", "0", "--set", "trainer.kind=deepspeed"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert result.output.splitlines()[-1].startswith("BadSpec: Ray is not installed")
    assert "listening" not in result.output


def test_the_embedded_engine_never_imports_ray() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
