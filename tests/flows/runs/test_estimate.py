"""Estimates, against counts made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.local.engine import LocalEngine
from engine.models.size import parameter_count
from engine.protocol import EngineInfo
from engine.specs.engine import LocalEngineSpec
from flows.configs.common import GRPOConfig
from flows.configs.ppo import PPOConfig, ValueModelConfig
from flows.runs.estimate import GIB, DoesNotFit, Estimate, estimate
from storage.chain.records import Numerics
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.objects import ObjectStore, open_store
from tasks.datasets.load import LoadedDataset, load_dataset
from tests.fixtures.toy import toy_config

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


def info(**changes: Any) -> EngineInfo:
    numerics = Numerics(backend="torch", device="cpu", compute_dtype="float32", threads=1, max_tokens=8192)
    fields = {
        "numerics": numerics, "store_id": "s", "memory_bytes": 8 * GIB, "memory_used_bytes": 0,
        "operations_per_second": 1e9,
    }  # fmt: skip
    return EngineInfo.model_validate(fields | changes)


@pytest.fixture
async def world(tmp_path: Path, tiny_folder: Path) -> tuple[ObjectStore, ArtifactRef, LoadedDataset, dict[str, Any]]:
    url = f"file://{tmp_path}/data"
    engine = LocalEngine(url, LocalEngineSpec(threads=1))
    base = await engine.import_model(str(tiny_folder), provenance=PROVENANCE)
    await engine.close()
    config = toy_config(tmp_path, tiny_folder)
    source = GRPOConfig.model_validate(config).data.train
    return open_store(url), base, load_dataset(open_store(url), source, provenance=PROVENANCE), config


async def test_memory_counts_weights_gradients_moments_and_the_reference(world: Any, tiny_folder: Path) -> None:
    store, base, data, config = world
    from safetensors import safe_open

    with safe_open(tiny_folder / "model.safetensors", framework="pt") as file:
        parameters = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - not a dict
    assert parameter_count(store, base) == parameters
    # Weights, gradients and two moments in float32, and the reference.
    with_reference = estimate(store, GRPOConfig.model_validate(config), base, data, info())
    assert with_reference.memory_bytes == parameters * 4 * 5
    config["algorithm"]["kl_beta"] = 0
    assert estimate(store, GRPOConfig.model_validate(config), base, data, info()).memory_bytes == parameters * 4 * 4
    # In bfloat16 the sampler has a copy of its own.
    halves = info(numerics=info().numerics.model_copy(update={"compute_dtype": "bfloat16"}))
    sampled = estimate(store, GRPOConfig.model_validate(config), base, data, halves)
    assert sampled.memory_bytes == parameters * (4 * 4 + 2)  # the sampler's copy
    # A value model needs as much as the policy, and more disk and time.
    valued = PPOConfig.model_validate(config)
    assert estimate(store, valued, base, data, info()).memory_bytes == parameters * 4 * (4 + 4)
    assert estimate(store, valued, base, data, halves).memory_bytes == parameters * (4 * (4 + 4) + 2)  # one samples
    named = valued.model_copy(update={"value_model": ValueModelConfig(key=str(tiny_folder))})
    assert estimate(store, named, base, data, info()) == estimate(store, valued, base, data, info())
    plain = estimate(store, GRPOConfig.model_validate(config), base, data, info())
    with_values = estimate(store, valued, base, data, info())
    assert with_values.disk_bytes is not None and plain.disk_bytes is not None
    assert with_values.disk_bytes > plain.disk_bytes
    assert with_values.seconds is not None and plain.seconds is not None and with_values.seconds > 1.5 * plain.seconds
    # Adapters share the weights of their base.
    config["model"]["adapter"] = {}
    adapter = estimate(store, GRPOConfig.model_validate(config), base, data, info()).memory_bytes
    assert adapter < 1.5 * parameters * 4
    both = PPOConfig.model_validate(config | {"value_model": {"adapter": {}}})
    assert estimate(store, both, base, data, info()).memory_bytes < 2 * adapter - 0.9 * parameters * 4  # one base


async def test_time_is_steps_times_passes_over_tokens(world: Any) -> None:
    store, base, data, config = world
    config["algorithm"] |= {"kl_beta": 0.0, "old_logprobs": "sampler", "steps": 10}
    first = estimate(store, GRPOConfig.model_validate(config), base, data, info())
    # one read (2P) and one trained pass (6P) of each token; with trainer logprobs and a reference, two reads (4P) more
    config["algorithm"] |= {"kl_beta": 0.1, "old_logprobs": "trainer"}
    second = estimate(store, GRPOConfig.model_validate(config), base, data, info())
    assert first.seconds and second.seconds
    assert second.seconds / first.seconds == pytest.approx((2 + 2 + 2 + 6) / (2 + 6))
    assert estimate(store, GRPOConfig.model_validate(config), base, data, info(operations_per_second=2e9)).seconds == (
        pytest.approx(second.seconds / 2)
    )


async def test_an_endless_run_has_no_length(world: Any) -> None:
    store, base, data, config = world
    config["algorithm"]["steps"] = None
    endless = estimate(store, GRPOConfig.model_validate(config), base, data, info())
    assert (endless.seconds, endless.disk_bytes) == (None, None)


async def test_disk_counts_only_the_named_checkpoints_that_are_kept(world: Any) -> None:
    store, base, data, config = world
    config["algorithm"]["steps"] = 10

    def disk(**checkpoints: Any) -> int:
        config["checkpoints"] = {"every_steps": 1} | checkpoints
        disk_bytes = estimate(store, GRPOConfig.model_validate(config), base, data, info()).disk_bytes
        assert disk_bytes is not None
        return disk_bytes

    a_checkpoint = disk(keep_last=3) - disk(keep_last=2)
    assert disk() - disk(keep_named=4) == 6 * a_checkpoint
    assert disk(keep_named=99) == disk()


@pytest.mark.parametrize(
    ("there", "message"),
    [({"memory_bytes": GIB}, r"2\.0 GiB of the engine's memory, which is 1\.0 GiB.*model\.adapter"),
     ({"disk_free_bytes": GIB}, r"3\.0 GiB, but the disk of its store has 1\.0 GiB free.*keep_last")],
)  # fmt: skip
def test_what_cannot_fit_is_refused_with_both_sizes(there: dict[str, Any], message: str) -> None:
    needs = Estimate(memory_bytes=2 * GIB, disk_bytes=3 * GIB, seconds=600.0)
    needs.check(info(disk_free_bytes=4 * GIB))
    with pytest.raises(DoesNotFit, match=message):
        needs.check(info(**there))


def test_a_resumed_run_has_written_part_of_its_disk_already() -> None:
    needs = Estimate(memory_bytes=2 * GIB, disk_bytes=3 * GIB, seconds=600.0)
    needs.check(info(disk_free_bytes=GIB), resumed=True)
    with pytest.raises(DoesNotFit, match="memory"):
        needs.check(info(memory_bytes=GIB), resumed=True)


def test_the_text_names_all_three() -> None:
    text = Estimate(memory_bytes=2 * GIB, disk_bytes=3 * GIB, seconds=600.0).text(info(disk_free_bytes=4 * GIB))
    assert text == (
        "estimate: 2.0 GiB of the engine's 8.0 GiB memory, 3.0 GiB of 4.0 GiB free storage, about 10 min "
        "of computation at the measured speed"
    )
