"""Redos after a kill on a GPU: equal bytes with deterministic kernels, and a recorded rebase without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.torch.tiny import build_tiny_model
from engine.local.engine import LocalEngine
from engine.local.verify import verify_run
from engine.specs.engine import LocalEngineSpec
from storage.chain.rebase import rebases_in_effect
from tests.engine.local.rebase.killed_chains import (
    STEPS,
    WRONG,
    WRONG_STEP,
    chain_of_a_killed_engine,
    take_step,
    with_other_update,
)
from tests.engine.local.rebase.rebasing import has_no_problems, only_rebase

pytestmark = pytest.mark.gpu
TOKENS = 700
"""Of each completion. The backward pass of attention adds up blocks of about a hundred tokens in a random order."""
DTYPES = ["float32", "bfloat16"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of about 25M parameters, large enough that the GPU does not repeat its gradients."""
    return build_tiny_model(tmp_path_factory.mktemp("models") / "small", seed=0, hidden=512, layers=8)


def spec_of(dtype: Any, *, deterministic_kernels: bool) -> LocalEngineSpec:
    return LocalEngineSpec(device="cuda", compute_dtype=dtype, deterministic_kernels=deterministic_kernels, threads=1)


@pytest.fixture(autouse=True)
def kernels_restored(cuda: torch.device) -> Any:
    """Torch's setting is that of the whole process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_deterministic_kernels_redo_a_chain_to_the_byte(url: str, folder: Path, dtype: str) -> None:
    spec = spec_of(dtype, deterministic_kernels=True)
    chain = await chain_of_a_killed_engine(url, folder, spec, tokens=TOKENS)
    engine = LocalEngine(url, spec)
    await take_step(engine, chain.head(), tokens=TOKENS)
    assert rebases_in_effect(chain) == []
    (report,) = verify_run(chain.store, "r").chains
    assert report.problems == ()
    await engine.close(checkpoint=False)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_without_them_the_redo_is_a_proven_rebase(url: str, folder: Path, dtype: str) -> None:
    spec = spec_of(dtype, deterministic_kernels=False)
    chain = await chain_of_a_killed_engine(url, folder, spec, tokens=TOKENS)
    engine = LocalEngine(url, spec)
    record = chain.record((await take_step(engine, chain.head(), tokens=TOKENS)).step)
    rebase = only_rebase(chain)
    print([(step.step, step.distance, step.bound) for step in rebase.redone])
    assert rebase.proven, rebase.title
    assert not rebase.before.repeats and rebase.redone and rebase.redone[-1].step == STEPS
    assert record is not None and record.rebase == rebase.mark
    assert has_no_problems(chain.store)
    await engine.close(checkpoint=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
async def test_a_wrong_step_is_not_taken_for_rounding(
    url: str, folder: Path, dtype: str, change: Callable[..., Any]
) -> None:
    spec = spec_of(dtype, deterministic_kernels=False)
    chain = await chain_of_a_killed_engine(url, folder, spec, tokens=TOKENS, wrong=with_other_update(change))
    engine = LocalEngine(url, spec)
    await take_step(engine, chain.head(), tokens=TOKENS)
    rebase = only_rebase(chain)
    print([(step.step, step.distance, step.bound) for step in rebase.redone])
    assert not rebase.proven
    assert not next(step for step in rebase.redone if step.step == WRONG_STEP).is_close
    await engine.close(checkpoint=False)
