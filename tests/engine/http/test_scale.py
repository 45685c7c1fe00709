"""Tests of the call that changes the number of samplers, over HTTP and by `ostinato engine scale`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.errors import BadSpec
from engine.http.client import scale_samplers
from engine.http.service import ServerOptions
from engine.local.engine import LocalEngine
from engine.protocol import ActorCount, SamplerScale
from engine.specs.engine import HttpEngineSpec, LocalEngineSpec
from flows.cli.main import app
from storage.store.objects import ObjectStore
from tests.fixtures.engines import DETERMINISTIC
from tests.fixtures.servers.app_clients import TOKEN
from tests.fixtures.servers.http_engine import running_server
from tests.fixtures.servers.scripted_engine import ScriptedEngine
from tests.fixtures.servers.unreliable_line import URL, UnreliableLine


def scale(samplers: int, url: str, *, token: str = "") -> Result:
    arguments = ["engine", "scale", "--samplers", str(samplers), "--url", url]
    return CliRunner().invoke(app, arguments, env={"OSTINATO_ENGINE_TOKEN": token})


def test_the_command_prints_the_change_in_one_line(engine: ScriptedEngine) -> None:
    with running_server(engine, ServerOptions(token=TOKEN)) as spec:
        result = scale(4, spec.url, token=TOKEN)
        assert (result.exit_code, result.output) == (0, "samplers: 2 -> 4 (2 up, 2 starting, 1 leaving)\n")
        refused = scale(4, spec.url, token=TOKEN + "x")
        assert refused.exit_code == 2 and "NotAuthenticated" in refused.output
    assert engine.done["scale_samplers"] == 1


@pytest.mark.usefixtures("no_backoff")
async def test_a_lost_answer_does_not_scale_twice(line: UnreliableLine, engine: ScriptedEngine) -> None:
    line.lose_answers = 2
    scaled = await scale_samplers(HttpEngineSpec(url=URL), 3, transport=lambda: line)
    assert scaled == SamplerScale(before=2, replicas=ActorCount(wanted=3, alive=2, leaving=1))
    assert line.lost["POST", "/v1/scale_samplers"] == 2
    assert engine.begun["scale_samplers"] == engine.done["scale_samplers"] == 1


@pytest.mark.parametrize("count", [0, -1, 5000])
async def test_a_number_out_of_bounds_is_refused_before_it_is_sent(line: UnreliableLine, count: int) -> None:
    with pytest.raises(BadSpec, match="samplers"):
        await scale_samplers(HttpEngineSpec(url=URL), count, transport=lambda: line)
    assert not line.seen


def test_the_command_refuses_what_is_no_address_and_no_number() -> None:
    assert scale(2, "ftp://host").exit_code == 2
    assert "--url" in scale(2, "ftp://host").output
    assert scale(0, URL).exit_code == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (DETERMINISTIC, "the torch sampler runs in the engine's own process, which has no replicas to add or to"),
        (
            LocalEngineSpec.model_validate({"sampler": {"kind": "vllm"}, "compute_dtype": "float32"}),
            "vLLM samples in the engine's own process, which has no replicas to add or to remove",
        ),
    ],
    ids=["torch", "vllm"],
)
def test_an_engine_without_replicas_refuses(store: ObjectStore, spec: LocalEngineSpec, message: str) -> None:
    engine = LocalEngine(store.url, spec)
    with running_server(engine) as http:
        result = scale(2, http.url)
    assert result.exit_code == 2
    assert f"BadSpec: {message}" in result.output


async def test_a_pool_that_is_not_open_yet_starts_with_the_number_that_was_asked_for(tmp_path: Path) -> None:
    spec = LocalEngineSpec.model_validate({"sampler": {"kind": "vllm", "replicas": 2}, "compute_dtype": "float32"})
    engine = LocalEngine(f"file://{tmp_path}/store", spec)
    assert await engine.scale_samplers(5) == SamplerScale(before=2, replicas=ActorCount())
    assert await engine.scale_samplers(3) == SamplerScale(before=5, replicas=ActorCount())
    assert engine.spec.replicas == 2  # the config stays what the engine starts with
    await engine.close()
