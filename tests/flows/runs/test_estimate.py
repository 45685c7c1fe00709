"""Estimates, against counts made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.local.engine import LocalEngine
from engine.memory_plan.plan import plan_memory
from engine.memory_plan.records import Machine, Workload
from engine.memory_plan.shape import read_shape
from engine.models.folder import base_nbytes, parameter_count
from engine.protocol import EngineInfo
from engine.specs.engine import LocalEngineSpec
from engine.text.threads import StringThread
from flows.catalogue import DPOConfig, SFTToGSPOConfig
from flows.configs.common import GRPOConfig
from flows.configs.overrides import parse_config
from flows.configs.ppo import PPOConfig, ValueModelConfig
from flows.runs.durations import FIXED_START_SECONDS, TASK_SECONDS, Durations, StoreSpeed, measure_store
from flows.runs.estimate import BYTES_PER_STORED_TOKEN, EFFICIENCY, GIB, Estimate, estimate
from flows.runs.expected_errors import DoesNotFit
from flows.training.checkpointing import MIN_SECONDS, SAVES_BETWEEN
from storage.chain.records import Numerics
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.objects import ObjectStore, open_store
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.spec import InlinePairs
from tests.fixtures.toy import toy_config, write_prompts

PROMPT_TOKENS = 5
"""A prompt of the toy task has one turn of one character: 1/4 and 5 tokens of the chat template, rounded down."""
HEAD = 259 * 128
"""Weights of the tiny model's head, which is its embedding: 259 tokens, 128 hidden features."""
PACKED = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 512) + HEAD
"""Weights that a sampler packs: queries, output, keys, values and the MLP's three matrices of four layers; the head."""
ADAPTER = 4 * 16 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 512))
"""Weights of an adapter of rank 16: the rank times input and output of each of these matrices but the head."""
PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


def info(**changes: Any) -> EngineInfo:
    numerics = Numerics(backend="torch", device="cpu", compute_dtype="float32", threads=1, max_tokens=8192)
    fields = {
        "numerics": numerics, "store_id": "s", "memory_bytes": 8 * GIB, "memory_used_bytes": 0,
        "operations_per_second": 1e9, "spec": LocalEngineSpec(device="cpu", compute_dtype="float32"),
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
    # Weights, gradients and two moments in float32, the matrices that the sampler packs, and the reference.
    with_reference = estimate(store, GRPOConfig.model_validate(config), base, [data], info())
    assert with_reference.memory_bytes == 4 * (5 * parameters + PACKED)
    config["algorithm"]["kl_beta"] = 0
    alone = estimate(store, GRPOConfig.model_validate(config), base, [data], info())
    assert alone.memory_bytes == 4 * (4 * parameters + PACKED)
    # In bfloat16 the sampler has a copy of its own, the tied head once more, and a second form of what it packs.
    halves = info(spec=LocalEngineSpec(device="cpu", compute_dtype="bfloat16"))
    copied = 2 * (parameters + HEAD + PACKED)
    sampled = estimate(store, GRPOConfig.model_validate(config), base, [data], halves)
    assert sampled.memory_bytes == 16 * parameters + copied
    # A value model needs as much as the policy without a sampler, with 128 weights of its head; more disk and time.
    valued, values = PPOConfig.model_validate(config), 16 * (parameters + 128)
    assert estimate(store, valued, base, [data], info()).memory_bytes == 4 * (4 * parameters + PACKED) + values
    assert estimate(store, valued, base, [data], halves).memory_bytes == 16 * parameters + copied + values
    named = valued.model_copy(update={"value_model": ValueModelConfig(key=str(tiny_folder))})
    assert estimate(store, named, base, [data], info()) == estimate(store, valued, base, [data], info())
    plain = estimate(store, GRPOConfig.model_validate(config), base, [data], info())
    with_values = estimate(store, valued, base, [data], info())
    assert with_values.disk_bytes is not None and plain.disk_bytes is not None
    assert with_values.disk_bytes > plain.disk_bytes
    assert with_values.durations is not None and plain.durations is not None
    assert with_values.durations.steps > 1.5 * plain.durations.steps
    # Adapters share the weights of their base.
    config["model"]["adapter"] = {}
    adapter = estimate(store, GRPOConfig.model_validate(config), base, [data], info()).memory_bytes
    assert adapter == 4 * parameters + 16 * ADAPTER
    both = PPOConfig.model_validate(config | {"value_model": {"adapter": {}}})
    assert estimate(store, both, base, [data], info()).memory_bytes == adapter + 16 * ADAPTER  # one base
    # A base in 4 bits is smaller, and another one than the plain base.
    config["model"]["adapter"] = {"load_in_4bit": True}
    in_4bit = base_nbytes(store, base, compute_bytes=4, master_bytes=4, load_in_4bit=True)
    small = estimate(store, GRPOConfig.model_validate(config), base, [data], info()).memory_bytes
    assert adapter - small == pytest.approx(parameters * 4 - in_4bit, abs=1)
    mixed = PPOConfig.model_validate(config | {"value_model": {"adapter": {}}})
    assert estimate(store, mixed, base, [data], info()).memory_bytes == small + adapter + 4 * 128


async def test_the_gate_and_the_plan_count_the_same_bytes(world: Any, tiny_folder: Path) -> None:
    store, base, data, config = world
    needed = estimate(store, GRPOConfig.model_validate(config), base, [data], info()).memory_bytes
    work, machine = Workload(read_shape(tiny_folder), context=512), Machine.cpu(64 * GIB)
    for admitted, problems in ((needed, 0), (needed - 1, 1)):
        spec = LocalEngineSpec(device="cpu", compute_dtype="float32", memory_gib=admitted / GIB)
        assert len(plan_memory(spec, work, machine).problems) == problems


async def test_an_engine_names_what_auto_stands_for(tmp_path: Path) -> None:
    engine = LocalEngine(f"file://{tmp_path}", LocalEngineSpec(threads=1, deterministic=True, max_rows=3))
    answered = await engine.info()
    await engine.close()
    expected = LocalEngineSpec(threads=1, deterministic=True, max_rows=3, device="cpu", compute_dtype="float32")
    assert answered.spec == expected


async def test_a_model_without_known_dimensions_counts_its_parameters(world: Any) -> None:
    store, base, data, config = world
    config["algorithm"]["kl_beta"] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.memory_plan.shape.stored_config", lambda *_: {"num_experts": 8})
        memory = estimate(store, GRPOConfig.model_validate(config), base, [data], info()).memory_bytes
    assert memory == 16 * parameter_count(store, base)


async def test_time_is_steps_times_passes_over_tokens(world: Any) -> None:
    store, base, data, config = world
    config["algorithm"] |= {"kl_beta": 0.0, "old_logprobs": "sampler", "steps": 10}
    first = estimate(store, GRPOConfig.model_validate(config), base, [data], info())
    # one read (2P) and one trained pass (6P) of each token; with a reference, one read (2P) more
    config["algorithm"] |= {"kl_beta": 0.1, "old_logprobs": "trainer"}
    pulled = estimate(store, GRPOConfig.model_validate(config), base, [data], info())
    # with several updates, one read (2P) more for the trainer's old logprobs
    config["algorithm"] |= {"samples_per_mini_batch": config["algorithm"]["samples_per_batch"] // 2}
    second = estimate(store, GRPOConfig.model_validate(config), base, [data], info())
    assert first.durations and pulled.durations and second.durations
    assert pulled.durations.steps / first.durations.steps == pytest.approx((2 + 2 + 6) / (2 + 6))
    assert second.durations.steps / first.durations.steps == pytest.approx((2 + 2 + 2 + 6) / (2 + 6))
    faster = estimate(store, GRPOConfig.model_validate(config), base, [data], info(operations_per_second=2e9)).durations
    assert faster is not None
    assert faster.steps == pytest.approx(second.durations.steps / 2)


async def test_an_endless_run_has_no_length(world: Any) -> None:
    store, base, data, config = world
    config["algorithm"]["steps"] = None
    endless = estimate(store, GRPOConfig.model_validate(config), base, [data], info())
    assert (endless.durations, endless.disk_bytes) == (None, None)


async def test_time_counts_start_evaluations_checkpoints_and_storage(world: Any, tmp_path: Path) -> None:
    """Computed by hand from a store that writes 1 MB/s and reads 2 MB/s, with 0.01 s per object."""
    store, base, data, config = world
    speed = StoreSpeed(put_seconds=0.01, write_bytes_per_second=1e6, read_bytes_per_second=2e6)
    config["data"]["heldout"] = {"kind": "file", "path": str(write_prompts(tmp_path / "heldout.jsonl", repeats=3))}
    config["algorithm"] |= {"steps": 10, "kl_beta": 0.0}
    config["checkpoints"] = {"every_steps": 4}
    config["evaluation"] = {"every_steps": 5, "temperature": 1.0, "samples_per_prompt": 2}
    run = GRPOConfig.model_validate(config)
    assert run.data.heldout is not None
    heldout = load_dataset(store, run.data.heldout, provenance=PROVENANCE)
    durations = estimate(store, run, base, [data], info(), heldout=heldout, speed=speed).durations
    assert durations is not None

    weights = 4 * parameter_count(store, base)
    assert durations.start == pytest.approx(FIXED_START_SECONDS + weights / 2e6)
    # before, after step 5 and after training: 30 prompts with 2 answers of 6 tokens, 2P operations per token
    evaluated = 3 * 30 * (PROMPT_TOKENS + 2 * 6)
    assert durations.evaluation == pytest.approx(evaluated * 2 * (weights / 4) / (EFFICIENCY * 1e9))
    # after 4, 8 and 10 steps: weights and two moments; then the published model; four objects each
    assert durations.checkpoints == pytest.approx(3 * (3 * weights / 1e6 + 0.04) + weights / 1e6 + 0.04)
    # 4 prompts in shards of 2: two tasks of sampling, two of grading, the batch and the step, with two objects each
    tokens = 4 * PROMPT_TOKENS + 16 * 6
    a_step = 12 * 0.01 + tokens * BYTES_PER_STORED_TOKEN / 1e6 + 6 * TASK_SECONDS
    assert durations.storage == pytest.approx(10 * a_step)
    parts = (durations.start, durations.steps, durations.evaluation, durations.checkpoints, durations.storage)
    assert durations.total == pytest.approx(sum(parts))


async def test_checkpoints_of_shares_that_would_be_seconds_apart_are_not_counted(world: Any) -> None:
    store, base, data, config = world
    config["algorithm"]["steps"] = 100
    config["checkpoints"] = {"frequency": 0.1}
    speed = StoreSpeed(put_seconds=0.0, write_bytes_per_second=1e6, read_bytes_per_second=1e6)
    run, weights = GRPOConfig.model_validate(config), 4 * parameter_count(store, base)

    def written(operations_per_second: float) -> float:
        there = info(operations_per_second=operations_per_second)
        durations = estimate(store, run, base, [data], there, speed=speed).durations
        assert durations is not None
        return (durations.checkpoints - weights / 1e6) / (3 * weights / 1e6)

    save_seconds = 3 * weights / 1e6
    durations = estimate(store, run, base, [data], info(operations_per_second=1.0), speed=speed).durations
    assert durations is not None
    operations = durations.steps
    # so slow that all nine and the last are written; four shares fit into five times the shortest distance less a bit
    assert written(1.0) == pytest.approx(10)
    apart_seconds = max(MIN_SECONDS, SAVES_BETWEEN * save_seconds)
    assert written(operations / (4.9 * apart_seconds)) == pytest.approx(5)
    assert written(1e30) == pytest.approx(1)  # only the last


async def test_an_estimate_counts_what_is_left(world: Any) -> None:
    store, base, data, config = world
    config["data"]["heldout"] = config["data"]["train"]
    config["evaluation"] = {"every_steps": 5}
    config["checkpoints"] = {"every_steps": 4}
    config["algorithm"]["steps"] = 10
    run, speed = GRPOConfig.model_validate(config), StoreSpeed(0.01, 1e6, 2e6)

    def durations(*committed: int) -> Durations:
        expected = estimate(store, run, base, [data], info(), heldout=data, speed=speed, committed=committed).durations
        assert expected is not None
        return expected

    whole, rest, last = durations(), durations(6), durations(10)
    assert durations(0) == whole
    assert rest.start == whole.start
    assert rest.steps == pytest.approx(whole.steps * 4 / 10)
    assert rest.storage == pytest.approx(whole.storage * 4 / 10)
    # of the evaluations before, after step 5 and at the end, the last is left
    assert rest.evaluation == pytest.approx(whole.evaluation / 3)
    # of the checkpoints at 4, 8 and 10, the last two
    published = 4 * parameter_count(store, base) / 1e6 + 0.04
    assert rest.checkpoints - published == pytest.approx((whole.checkpoints - published) * 2 / 3)
    assert last.steps == last.storage == 0


async def test_a_finished_stage_is_not_counted_again(world: Any, tiny_folder: Path) -> None:
    store, base, data, _ = world
    config = parse_config(SFTToGSPOConfig, Path("examples/sft_to_gspo.yaml"), [f"model.key={tiny_folder}"])

    def steps(*committed: int) -> float:
        expected = estimate(store, config, base, [data, data], info(), committed=committed).durations
        assert expected is not None
        return expected.steps

    of_first = config.first.count_steps(data.rows)
    of_second = config.second.count_steps(data.rows)
    assert of_first and of_second
    second = steps(of_first, 0)
    assert 0 < second < steps()
    assert steps(of_first - 1) == pytest.approx(second + (steps() - second) / of_first)
    assert steps(of_first, of_second - 1) == pytest.approx(second / of_second)


def test_a_store_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    speed = measure_store(store)
    assert 0 < speed.put_seconds < 5
    assert speed.write_seconds(0, objects=3) == 3 * speed.put_seconds
    assert 1e5 < speed.write_bytes_per_second < 1e12
    assert 1e5 < speed.read_bytes_per_second < 1e12
    assert list(store.list("")) == []


async def test_a_pair_counts_the_texts_of_both_conversations_and_no_metadata(world: Any, tiny_folder: Path) -> None:
    store, base, _, _ = world
    prompt = StringThread([("user", "What is the capital of Peru?")], {"vote": "x" * 4000})
    pairs = InlinePairs.of([(prompt.assistant("Lima"), prompt.assistant("It is Cusco."))])
    data = load_dataset(store, pairs, use="preference", provenance=PROVENANCE)
    config = DPOConfig.model_validate({
        "model": {"key": str(tiny_folder)}, "data": {"train": {"kind": "registered", "key": "pairs"}},
        "algorithm": {"steps": 10, "samples_per_batch": 4},
    })  # fmt: skip
    durations = estimate(store, config, base, [data], info()).durations
    assert durations is not None
    # 28 and 4, 28 and 12 characters in four turns of 5 tokens more; one pair a step, though 4 are asked for
    tokens = (28 + 4 + 28 + 12) / 4 + 4 * 5
    # the reference reads each token (2P), and the policy is trained on it (6P)
    assert durations.steps == pytest.approx(10 * tokens * 8 * parameter_count(store, base) / (EFFICIENCY * 1e9))


async def test_the_descriptions_of_tools_count(world: Any, tiny_folder: Path) -> None:
    store, base, _, _ = world
    prompt = StringThread([("user", "What is the capital of Peru?")], tools=[{"name": "x" * 27}])
    pairs = InlinePairs.of([(prompt.assistant("Lima"), prompt.assistant("It is Cusco."))])
    data = load_dataset(store, pairs, use="preference", provenance=PROVENANCE)
    config = DPOConfig.model_validate({
        "model": {"key": str(tiny_folder)}, "data": {"train": {"kind": "registered", "key": "tools"}},
        "algorithm": {"steps": 10, "samples_per_batch": 4},
    })  # fmt: skip
    durations = estimate(store, config, base, [data], info()).durations
    assert durations is not None
    # as above, and in both conversations the 40 characters of the tools' JSON
    tokens = (28 + 4 + 28 + 12 + 2 * 40) / 4 + 4 * 5
    assert durations.steps == pytest.approx(10 * tokens * 8 * parameter_count(store, base) / (EFFICIENCY * 1e9))


async def test_disk_counts_the_checkpoints_that_are_held_at_one_time(world: Any) -> None:
    store, base, data, config = world
    config["algorithm"]["steps"] = 10
    parameters = parameter_count(store, base)
    tokens = 10 * (4 * PROMPT_TOKENS + 16 * 6)

    def held(operations_per_second: float = 1e9, **checkpoints: Any) -> float:
        config["checkpoints"] = checkpoints
        there = info(operations_per_second=operations_per_second)
        disk_bytes = estimate(store, GRPOConfig.model_validate(config), base, [data], there).disk_bytes
        assert disk_bytes is not None
        # without the published model and the tables of the steps
        return (disk_bytes - 4 * parameters - tokens * BYTES_PER_STORED_TOKEN) / (12 * parameters)

    # ten named ones, and no other is written; of four, two of the recovery and one that is being written at most
    assert held(every_steps=1) == held(every_steps=1, keep_named=99) == 10
    assert held(every_steps=1, keep_named=4) == 4 + 2 + 1
    # a run of seconds writes the last one only; a slow one five named ones, and keeps some of the recovery
    assert held(1e30) == 1
    assert held(1.0) == 5 + 2 + 1
    assert held(1.0, keep_last=3) == 5 + 3 + 1


@pytest.mark.parametrize(
    ("there", "message"),
    [({"memory_bytes": GIB}, r"2\.0 GiB of the engine's memory, which is 1\.0 GiB.*model\.adapter"),
     ({"disk_free_bytes": GIB}, r"3\.0 GiB, but the disk of its store has 1\.0 GiB free.*keep_last")],
)  # fmt: skip
def test_what_cannot_fit_is_refused_with_both_sizes(there: dict[str, Any], message: str) -> None:
    needs = Estimate(memory_bytes=2 * GIB, disk_bytes=3 * GIB, durations=Durations(steps=600.0))
    needs.check(info(disk_free_bytes=4 * GIB))
    with pytest.raises(DoesNotFit, match=message):
        needs.check(info(**there))


def test_a_resumed_run_has_written_part_of_its_disk_already() -> None:
    needs = Estimate(memory_bytes=2 * GIB, disk_bytes=3 * GIB, durations=Durations(steps=600.0))
    needs.check(info(disk_free_bytes=GIB), resumed=True)
    with pytest.raises(DoesNotFit, match="memory"):
        needs.check(info(memory_bytes=GIB), resumed=True)


def test_the_text_names_all_three() -> None:
    durations = Durations(start=8.0, steps=600.0, evaluation=0.9, checkpoints=31.0)
    needs = Estimate(memory_bytes=2 * GIB, disk_bytes=3 * GIB, durations=durations)
    text = needs.text(info(disk_free_bytes=4 * GIB))
    assert text == (
        "estimate: 2.0 GiB of the engine's 8.0 GiB memory, 3.0 GiB of 4.0 GiB free storage, about 11 min "
        "(steps 10 min, checkpoints 31 s, start 8 s)"
    )
