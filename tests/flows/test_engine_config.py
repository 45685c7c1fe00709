"""One file for `ostinato run`, `engine serve`, `engine plan` and `engine sampler`."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.sampler_spec import VllmSpec
from engine.trainer_spec import DeepSpeedSpec
from flows.engine_config import load_engine
from flows.overrides import ConfigError

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
