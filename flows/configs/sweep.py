"""Config of the `sweep` flow: which keys of a training config take which values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from flows.configs.common import TrainingConfig
from flows.configs.evaluation import checked_name
from flows.configs.overrides import describe_validation
from flows.configs.training import AnyTraining
from storage.serialization import Frozen, canonical_json, digest

MAX_TRIALS = 1000


class GridSearch(Frozen):
    """Every combination."""

    kind: Literal["grid"] = "grid"
    values: dict[str, list[JsonValue]] = Field(min_length=1)
    """Dotted key of the training config -> the values it takes: {"optimizer.lr": [1e-6, 3e-6], "seed": [0, 1]}."""

    @field_validator("values")
    @classmethod
    def _none_is_empty(cls, values: dict[str, list[JsonValue]]) -> dict[str, list[JsonValue]]:
        for key, given in values.items():
            if not given:
                raise ValueError(f"{key} has no values; give at least one, or leave the key out")
        return values

    def trials(self) -> list[dict[str, Any]]:
        count = math.prod(len(given) for given in self.values.values())
        if count > MAX_TRIALS:
            raise ValueError(f"the grid has {count} combinations, at most {MAX_TRIALS} are run; use a random search")
        return [dict(zip(self.values, chosen, strict=True)) for chosen in itertools.product(*self.values.values())]


class Choice(Frozen):
    """One of these, each as likely."""

    kind: Literal["choice"] = "choice"
    values: list[JsonValue] = Field(min_length=1)
    """What may be drawn."""

    def draw(self, source: random.Random) -> Any:
        return source.choice(self.values)


class Range(Frozen):
    """Any number between two."""

    kind: Literal["range"] = "range"
    low: float
    """The least that is drawn."""
    high: float
    """The most that is drawn."""
    scale: Literal["linear", "log"] = "linear"
    """log: every factor is as likely, as rates want it."""
    whole: bool = False
    """Whole numbers only; both ends belong to it."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if not self.low < self.high or not math.isfinite(self.low + self.high):
            raise ValueError(f"low={self.low} and high={self.high} are no range; give low < high")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"low={self.low} has no logarithm; give a low above 0, or scale: linear")
        return self

    def draw(self, source: random.Random) -> float | int:
        if self.scale == "log":
            value = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = source.uniform(self.low, self.high)
        value = min(max(value, self.low), self.high)
        # a float of 17 digits in a table helps nobody, and three digits are finer than any search needs
        return round(value) if self.whole else float(f"{value:.3g}")


class RandomSearch(Frozen):
    """So many draws."""

    kind: Literal["random"] = "random"
    trials_wanted: int = Field(10, ge=1, le=MAX_TRIALS)
    """Draws. Equal ones are one run."""
    values: dict[str, Annotated[Choice | Range, Field(discriminator="kind")]] = Field(min_length=1)
    """Dotted key of the training config -> what it is drawn from."""
    seed: int = 0
    """More trials with the same seed are the same trials, and more."""

    def trials(self) -> list[dict[str, Any]]:
        drawn = []
        for number in range(self.trials_wanted):
            source = random.Random(digest(canonical_json(["sweep", self.seed, number])))
            drawn.append({key: values.draw(source) for key, values in self.values.items()})
        return drawn


class TrialsFailed(RuntimeError):
    """Some child runs failed. The others are kept; the same sweep again tries those that failed."""


class SweepConfig(Frozen):
    """`ostinato sweep`: child runs that differ in some keys of their config, and a page that compares them."""

    name: str
    """Child runs are `name/<digest of their config>`: the same sweep again resumes, a larger one adds to it."""
    training: AnyTraining
    """The flow, and the config that every child has but for the keys searched over."""
    search: Annotated[GridSearch | RandomSearch, Field(discriminator="kind")]
    """grid: every combination. random: so many draws."""
    parallel: int = Field(1, ge=1)
    """Child runs at a time. They share the engine, and its memory."""

    _name = field_validator("name")(checked_name)

    @model_validator(mode="after")
    def _every_trial_is_a_config(self) -> Self:
        if self.training.config.run:
            raise ValueError(f"training.config.run={self.training.config.run!r} is made by this flow; leave it out")
        self.children()
        return self

    def children(self) -> list[tuple[dict[str, Any], TrainingConfig]]:
        """(values, config with its run key) of every child, each once. Raises ValueError naming the trial."""
        kind: type[TrainingConfig] = type(self.training.config)
        found: dict[str, tuple[dict[str, Any], TrainingConfig]] = {}
        for values in self.search.trials():
            body = self.training.config.model_dump(mode="json")
            for key, value in values.items():
                _put(body, key, value)
            try:
                config = kind.model_validate(body)
            except ValidationError as error:
                raise ValueError(f"the trial {values} is no {describe_validation(error, kind)}") from error
            run = f"{self.name}/{digest(canonical_json(config.semantic()))[:12]}"
            found.setdefault(run, (values, config.model_copy(update={"run": run})))
        return list(found.values())


def _put(body: dict[str, Any], key: str, value: Any) -> None:
    *groups, last = key.split(".")
    at: Any = body
    for group in groups:
        at = at.get(group) if isinstance(at, Mapping) else None
    if not isinstance(at, dict):
        raise ValueError(f"{key!r} goes through what is no group of the config; give a key like optimizer.lr")
    at[last] = value  # a key that the config does not know is refused when it is validated
