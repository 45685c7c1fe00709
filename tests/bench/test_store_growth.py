"""What is done with one run costs the same requests in a store of 10 and of 1,000 other runs."""

from __future__ import annotations

import pytest

from bench.store_growth import OPERATIONS, Cost, measure, own_run

STEPS = 6


@pytest.fixture(scope="module")
def costs() -> tuple[dict[str, Cost], dict[str, Cost]]:
    """With 10 and with 1,000 other runs of a thousand steps."""
    own = own_run("mine", STEPS)
    return measure(own, 10, 1000), measure(own, 1000, 1000)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_number_of_other_runs_costs_nothing(
    costs: tuple[dict[str, Cost], dict[str, Cost]], operation: str
) -> None:
    few, many = costs
    assert many[operation].requests == few[operation].requests
    # the 36,000 objects of another run are in no listing
    assert many[operation].largest_listing == few[operation].largest_listing < 300
