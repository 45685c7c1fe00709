"""Field types for the numbers in requests and configs, with the bounds that float32 arithmetic needs.

A model computes in float32, whose largest number is about 3e38. A coefficient near that overflows in the first product,
and a divisor near the smallest float32 is rounded to 0.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

MIN_DIVISOR, MAX_COEFFICIENT = 1e-30, 1e30
"""Bounds of a divisor and a coefficient: products with numbers of ordinary size stay within float32."""
MAX_RATE = 1e3
"""Upper bound of a learning rate and of a weight decay. Useful values are below 1."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Below the minimum, rounding of the logits decides which token is drawn. Above the maximum, all tokens are equally
probable to three digits."""
MAX_EPOCHS = 10_000


def _check_divisor(value: float) -> float:
    if value < MIN_DIVISOR:
        raise ValueError(f"{value} is too small to divide by in float32; give {MIN_DIVISOR} or more")
    return value


# floats
Coefficient = Annotated[float, Field(ge=0, le=MAX_COEFFICIENT, allow_inf_nan=False)]
"""A factor of a loss term. 0 switches the term off."""
Positive = Annotated[float, Field(gt=0, le=MAX_COEFFICIENT, allow_inf_nan=False)]
Divisor = Annotated[float, Field(gt=0, le=MAX_COEFFICIENT, allow_inf_nan=False), AfterValidator(_check_divisor)]
Rate = Annotated[float, Field(ge=0, le=MAX_RATE, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE, allow_inf_nan=False)]
# integers
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
