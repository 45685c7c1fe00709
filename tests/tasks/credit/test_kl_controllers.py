"""KL controllers, from records of the chain."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from storage.chain.records import CommitRecord, Numerics, OptimizerSpec, PolicyRef, StepRequest
from storage.store.artifacts import ArtifactRef
from tasks.batches.advantages import AdaptiveKL, FixedKL


def record(kl: float | None, *, beta: float | None = None) -> CommitRecord:
    """Of a step that measured this KL under this coefficient."""
    request = StepRequest(
        parent=PolicyRef(run="r", stage="0-s", model="m", step=0, state="0"),
        batch=ArtifactRef(kind="batch", key="k", sha256="0", bytes=1, rows=1, parents=()),
        loss={},
        optimizer=OptimizerSpec(lr=0.1),
        controllers_in={} if beta is None else {"kl_beta": beta},
    )
    return CommitRecord(
        request=request,
        state="1",
        updates=1,
        metrics={} if kl is None else {"kl_mean": kl},
        numerics=Numerics(backend="torch", device="cpu", compute_dtype="float32", threads=1, max_tokens=1),
        weights_digest="0",
    )


def test_a_fixed_coefficient_stays_and_enters_no_request() -> None:
    control = FixedKL(beta=0.3)
    assert (control.next(None, samples=8), control.next(record(9.0), samples=8), control.state(0.3)) == (0.3, 0.3, {})


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.1, 1.0),  # on target
        (0.11, 1 + 0.1 * 50 / 1000),  # a tenth above
        (0.09, 1 - 0.1 * 50 / 1000),
        (5.0, 1 + 0.2 * 50 / 1000),  # the error is clipped at a fifth
        (0.0, 1 - 0.2 * 50 / 1000),
        (None, 1.0),
    ],
)
def test_an_adaptive_coefficient_follows_its_target(kl: float | None, factor: float) -> None:
    control = AdaptiveKL(beta=0.5, target=0.1, horizon=1000)
    assert control.next(None, samples=50) == 0.5
    assert control.next(record(kl, beta=0.2), samples=50) == pytest.approx(0.2 * factor, rel=1e-12)
    assert control.state(0.2) == {"kl_beta": 0.2}


@pytest.mark.parametrize(("kl", "factor"), [(0.0, 0.8), (0.4, 1.2)])
def test_a_step_of_many_horizons_changes_an_adaptive_coefficient_by_a_fifth(kl: float, factor: float) -> None:
    """24 completions are 6 horizons of 4: without a bound, the first factor would be 1 - 0.2 · 6 = -0.2."""
    control = AdaptiveKL(beta=0.1, target=0.2, horizon=4)
    assert control.next(record(kl, beta=0.1), samples=24) == pytest.approx(0.1 * factor, rel=1e-12)


@pytest.mark.parametrize("wrong", [{"beta": 0.0}, {"beta": 0.1, "target": 0.0}, {"beta": 0.1, "horizon": 0.0}])
def test_a_controller_without_anything_to_hold_on_to_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        AdaptiveKL(**wrong)
