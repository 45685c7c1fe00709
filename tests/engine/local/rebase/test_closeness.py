"""Tests of redos on a device that does not repeat its sums: what passes as rounding, and what does not.

The noise is one unit in the last place of every gradient, drawn anew at each update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.torch.determinism import small_update_repeats
from engine.errors import ReplayDiverged
from engine.local.engine import LocalEngine
from engine.local.verify import verify_run
from engine.specs.adapters import LoraSpec
from engine.specs.engine import LocalEngineSpec
from storage.chain.rebase import difference_texts, rebases_in_effect
from storage.inspect.run_details import describe_run
from tests.engine.local.rebase.killed_chains import (
    STEPS,
    WRONG,
    WRONG_STEP,
    chain_of_a_killed_engine,
    faster,
    take_step,
    with_other_update,
    wrong_tensor,
)
from tests.engine.local.rebase.rebasing import SINGLE, has_no_problems, only_rebase, read

BFLOAT16 = SINGLE.model_copy(update={"compute_dtype": "bfloat16"})


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gradients of the torch trainer have rounding noise, as on a device that adds in a random order."""
    clip = torch.nn.utils.clip_grad_norm_
    generator = torch.Generator().manual_seed(0)

    def clip_noisy(parameters: list[Any], max_norm: float) -> torch.Tensor:
        for parameter in parameters:
            ulps = torch.randint(-1, 2, parameter.grad.shape, generator=generator)
            parameter.grad.mul_(1 + torch.finfo(torch.float32).eps * ulps)
        return clip(parameters, max_norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_noisy)
    small_update_repeats.cache_clear()
    yield
    small_update_repeats.cache_clear()


# -- rounding passes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (SINGLE, {}),
        (BFLOAT16, {}),
        (SINGLE, {"max_grad_norm": 0.01}),
        (BFLOAT16, {"max_grad_norm": 0.01}),
        (SINGLE, {"trainable": LoraSpec(rank=4)}),
        (BFLOAT16, {"trainable": LoraSpec(rank=4)}),
    ],
    ids=["float32", "bfloat16", "float32-clipped", "bfloat16-clipped", "float32-lora", "bfloat16-lora"],
)
async def test_rounding_is_recorded_as_a_proven_rebase(
    noise: None, url: str, tiny_folder: Path, spec: LocalEngineSpec, options: dict[str, Any]
) -> None:
    chain = await chain_of_a_killed_engine(url, tiny_folder, spec, **options)
    engine = LocalEngine(url, spec)
    policy = await take_step(engine, chain.head())
    rebase = only_rebase(chain)
    assert [step.step for step in rebase.redone] == [1, 2, 3, 4]
    assert rebase.proven, rebase.title
    assert all(step.distance is not None and 0 < step.distance < step.bound for step in rebase.redone)
    # A rate 1.1 times too high would differ by 0.09. In its first update, AdamW turns the noise of small gradients up.
    assert all(step.bound < 0.09 for step in rebase.redone[1:])
    assert difference_texts(rebase.before, rebase.after) == []
    assert not rebase.before.repeats and not rebase.after.repeats
    record = chain.record(policy.step)
    assert record is not None and record.rebase == rebase.mark
    assert has_no_problems(chain.store)
    (line,) = describe_run(chain.store, "r").chains[0].rebases
    assert "rounding alone" in line and "the same numerics" in line
    await engine.close(checkpoint=False)
    # The next engine restores the checkpoint of the rebase, and redoes only the step after it.
    again = LocalEngine(url, spec)
    await take_step(again, policy)
    first, second = rebases_in_effect(chain)
    assert (first, second.policy.step, second.proven) == (rebase, STEPS + 1, True)
    assert [step.step for step in second.redone] == [STEPS + 1]
    await again.close(checkpoint=False)


async def test_from_a_checkpoint_only_the_steps_after_it_differ(noise: None, url: str, tiny_folder: Path) -> None:
    chain = await chain_of_a_killed_engine(url, tiny_folder, BFLOAT16, checkpoint_at=2)
    engine = LocalEngine(url, BFLOAT16)
    await take_step(engine, chain.head())
    rebase = only_rebase(chain)
    assert ([step.step for step in rebase.redone], rebase.proven) == ([3, 4], True)
    await engine.close(checkpoint=False)


async def test_a_past_policy_is_read_with_rounding_differences(
    noise: None, url: str, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = await chain_of_a_killed_engine(url, tiny_folder, SINGLE)
    engine = LocalEngine(url, SINGLE)
    with caplog.at_level(logging.WARNING, "engine.local.rebase"):
        await read(engine, chain.policy(2))
    assert "was redone with rounding differences: step 2 differs by" in caplog.text
    assert rebases_in_effect(chain) == []
    await engine.close(checkpoint=False)


# -- anything else does not ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SINGLE, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
async def test_a_wrong_step_is_recorded_as_unproven(
    noise: None, url: str, tiny_folder: Path, spec: LocalEngineSpec, change: Callable[..., Any]
) -> None:
    chain = await chain_of_a_killed_engine(url, tiny_folder, spec, wrong=with_other_update(change))
    engine = LocalEngine(url, spec)
    await take_step(engine, chain.head())
    rebase = only_rebase(chain)
    assert not rebase.proven
    assert [step.is_close for step in rebase.redone][: WRONG_STEP - 1] == [True] * (WRONG_STEP - 1)
    wrong_step = rebase.redone[WRONG_STEP - 1]
    assert not wrong_step.is_close
    if change is wrong_tensor:
        assert wrong_step.tensor is not None and wrong_step.tensor.endswith("k_proj.weight")
    (line,) = describe_run(chain.store, "r").chains[0].rebases
    assert "UNPROVEN: step 3 differs by" in line
    await engine.close(checkpoint=False)


async def test_a_past_policy_behind_a_wrong_step_is_refused(noise: None, url: str, tiny_folder: Path) -> None:
    chain = await chain_of_a_killed_engine(url, tiny_folder, SINGLE, wrong=with_other_update(faster))
    engine = LocalEngine(url, SINGLE)
    with pytest.raises(ReplayDiverged, match="Rounding does not explain it: step 3 differs by 0.09"):
        await read(engine, chain.policy(3))
    await engine.close(checkpoint=False)


async def test_a_deterministic_engine_demands_equal_bytes(noise: None, url: str, tiny_folder: Path) -> None:
    chain = await chain_of_a_killed_engine(url, tiny_folder, SINGLE)
    engine = LocalEngine(url, SINGLE.model_copy(update={"deterministic": True}))
    with pytest.raises(ReplayDiverged, match="deterministic=true promises the bytes"):
        await take_step(engine, chain.head())
    await engine.close(checkpoint=False)


async def test_on_a_device_that_repeats_a_wrong_step_is_an_error(url: str, tiny_folder: Path) -> None:
    chain = await chain_of_a_killed_engine(url, tiny_folder, SINGLE, wrong=with_other_update(faster))
    engine = LocalEngine(url, SINGLE)
    with pytest.raises(ReplayDiverged, match="redoing step 3 gave .* A second redo gave the same weights again"):
        await take_step(engine, chain.head())
    assert rebases_in_effect(chain) == []
    await engine.close(checkpoint=False)


# -- verification --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"from_checkpoints": True}], ids=["whole", "from checkpoints"])
async def test_verify_notes_steps_that_differ_by_rounding(
    noise: None, url: str, tiny_folder: Path, options: dict[str, Any]
) -> None:
    chain = await chain_of_a_killed_engine(url, tiny_folder, SINGLE, checkpoint_at=2)
    (report,) = verify_run(chain.store, "r", **options).chains
    assert (report.problems, report.redone, report.digests) == ((), STEPS, STEPS)
    assert all("by rounding alone" in note for note in report.notes)
    assert len(report.notes) == (2 if options else 1)


async def test_verify_finds_a_wrong_step_on_a_device_that_does_not_repeat(
    noise: None, url: str, tiny_folder: Path
) -> None:
    chain = await chain_of_a_killed_engine(url, tiny_folder, SINGLE, wrong=with_other_update(faster))
    (problem,) = verify_run(chain.store, "r").problems
    assert problem.what.startswith("step 3 differs: redone, the weights are ")
    assert "rounding does not explain it: step 3 differs by 0.09" in problem.what
