"""What all tests of flows share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def reports_without_charts(charts_not_drawn: None) -> None:
    """A run of a test writes its report without drawing the charts."""
