"""Tests of the engine config that `ostinato run`, `engine serve` and `engine plan` share."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.specs.engine import DeepSpeedSpec, VllmSpec
from flows.configs.overrides import ConfigError, load_engine

ENGINE = 'device = "cpu"\n[trainer]\nkind = "deepspeed"\nranks = 2\n[sampler]\nkind = "vllm"\n'
RUN = 'seed = 1\n[model]\nkey = "m"\n[engine]\ndevice = "cpu"\n[engine.trainer]\nkind = "deepspeed"\nranks = 2\n'
RUN += '[engine.sampler]\nkind = "vllm"\n'


@pytest.mark.parametrize("text", [ENGINE, RUN], ids=["engine", "run"])
def test_an_engines_file_and_a_runs_file_give_the_same_engine(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    spec, _ = load_engine(path, ["trainer.zero_stage=3"])
    assert spec.trainer == DeepSpeedSpec(ranks=2, zero_stage=3)
    assert spec.sampler == VllmSpec()
    assert spec.device == "cpu"


def test_without_a_file_the_sets_are_the_engine() -> None:
    spec, _ = load_engine(None, ["trainer.kind=deepspeed", "sampler.kind=vllm"])
    assert (spec.trainer.kind, spec.sampler.kind) == ("deepspeed", "vllm")


def test_a_run_of_an_engine_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[model]\nkey = "m"\n[engine]\nkind = "http"\nurl = "http://localhost:1"\n')
    with pytest.raises(ConfigError, match="elsewhere.*engine serve"):
        load_engine(path)


def test_what_cannot_go_together_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="offload_parameters.*zero_stage=3"):
        load_engine(None, ["trainer.kind=deepspeed", "trainer.zero_stage=2", "trainer.offload_parameters=cpu"])
    with pytest.raises(ConfigError, match="deterministic=true.*vllm"):
        load_engine(None, ["deterministic=true", "sampler.kind=vllm"])
    with pytest.raises(ConfigError, match="sequence_parallel=2 does not divide ranks=3"):
        load_engine(None, ["trainer.kind=deepspeed", "trainer.ranks=3", "trainer.sequence_parallel=2"])


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["sampler.replicas=0"], "replicas=0.*set replicas to 1 or more"),
        (["sampler.replicas=2", "sampler.tensor_parallel=2"], "tensor_parallel=2.*placement='dedicated'"),
        (["sampler.replicas=2"], "trainer.kind='torch'.*set trainer.kind='deepspeed'"),
        (["sampler.replicas=3", "trainer.kind=deepspeed", "trainer.ranks=2"], "give at most 2 replicas"),
    ],
)
def test_colocated_replicas_need_as_many_ranks(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_engine(None, ["sampler.kind=vllm", "sampler.placement=colocated", *sets])


def test_memory_does_not_reach_replicas() -> None:
    with pytest.raises(ConfigError, match="replicas=2 was given"):
        load_engine(None, ["sampler.kind=vllm", "sampler.transport=memory", "sampler.replicas=2"])


@pytest.mark.parametrize(
    ("sets", "gpus", "ranks"),
    [
        ([], 8, 1),  # the torch trainer
        (["trainer.kind=deepspeed"], 8, 8),
        (["trainer.kind=deepspeed"], 0, 1),
        (["trainer.kind=deepspeed", "trainer.ranks=3"], 8, 3),
        (["trainer.kind=deepspeed", "sampler.kind=vllm", "sampler.replicas=2", "sampler.tensor_parallel=2"], 8, 4),
        (["trainer.kind=deepspeed", "sampler.kind=vllm", "sampler.replicas=2", "sampler.placement=colocated"], 8, 8),
        (["trainer.kind=deepspeed", "sampler.kind=vllm"], 8, 8),
    ],
)
def test_auto_ranks_take_the_gpus_that_no_replica_takes(sets: list[str], gpus: int, ranks: int) -> None:
    assert load_engine(None, sets)[0].ranks(gpus) == ranks


@pytest.mark.parametrize(
    ("sets", "needed"),
    [
        ([], False),
        (["sampler.kind=vllm"], False),
        (["sampler.kind=vllm", "sampler.replicas=1"], True),
        (["trainer.kind=deepspeed"], True),
        (["cluster.address=head:6379"], False),
    ],
)
def test_ray_is_needed_for_ranks_and_replicas_only(sets: list[str], needed: bool) -> None:
    assert load_engine(None, sets)[0].uses_ray is needed
