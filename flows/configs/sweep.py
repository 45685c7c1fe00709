"""The config of the `sweep` flow: which keys of a training config take which values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from flows.catalogue import AnyTraining
from flows.configs.common import TrainingConfig
from flows.configs.evaluation import checked_name
from flows.configs.forms import FormConfig
from flows.configs.overrides import describe_validation
from storage.serialization import Frozen, canonical_json, digest

MAX_TRIALS = 1000


class GridSearch(Frozen):
    """Every combination of the values of all keys."""

    kind: Literal["grid"] = "grid"
    values: dict[str, list[JsonValue]] = Field(min_length=1)
    """Dotted key of the training config, with its values: {"optimizer.lr": [1e-6, 3e-6], "seed": [0, 1]}."""

    @field_validator("values")
    @classmethod
    def _none_is_empty(cls, values: dict[str, list[JsonValue]]) -> dict[str, list[JsonValue]]:
        for key, options in values.items():
            if not options:
                raise ValueError(f"{key} has no values; give at least one, or leave the key out")
        return values

    def trials(self) -> list[dict[str, Any]]:
        """The values of each child run, by key."""
        # counted first, since the list of a large grid would fill the memory
        count = math.prod(len(options) for options in self.values.values())
        if count > MAX_TRIALS:
            raise ValueError(f"the grid has {count} combinations, at most {MAX_TRIALS} are run; use a random search")
        return [dict(zip(self.values, chosen, strict=True)) for chosen in itertools.product(*self.values.values())]


class Choice(Frozen):
    """One of several values, each with the same probability."""

    kind: Literal["choice"] = "choice"
    values: list[JsonValue] = Field(min_length=1)
    """Values to draw from."""

    def draw(self, source: random.Random) -> Any:
        """A value."""
        return source.choice(self.values)


class Range(Frozen):
    """A number between two bounds."""

    kind: Literal["range"] = "range"
    low: float
    """Smallest number that may be drawn."""
    high: float
    """Largest number that may be drawn."""
    scale: Literal["linear", "log"] = "linear"
    """Scale of the draw. linear: every number has the same probability. log: every factor has the same probability,
    which suits learning rates."""
    whole: bool = False
    """Draw whole numbers only; both bounds may be drawn."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if not self.low < self.high or not math.isfinite(self.low + self.high):
            raise ValueError(f"low={self.low} and high={self.high} are no range; give low < high")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"low={self.low} has no logarithm; give a low above 0, or scale: linear")
        return self

    def draw(self, source: random.Random) -> float | int:
        """A number."""
        if self.scale == "log":
            value = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = source.uniform(self.low, self.high)
        # rounding of exp and log may leave the bounds
        value = min(max(value, self.low), self.high)
        # three digits are finer than any search needs, and can be read in a table
        if self.whole:
            return round(value)
        return float(f"{value:.3g}")


class RandomSearch(Frozen):
    """A random search: a number of independent draws."""

    kind: Literal["random"] = "random"
    trials_wanted: int = Field(10, ge=1, le=MAX_TRIALS)
    """Number of draws. Equal draws are one child run."""
    values: dict[str, Annotated[Choice | Range, Field(discriminator="kind")]] = Field(min_length=1)
    """Dotted key of the training config, with the distribution that its value is drawn from."""
    seed: int = 0
    """Seed of the draws. With the same seed, a larger search begins with the same trials."""

    def trials(self) -> list[dict[str, Any]]:
        """The values of each child run, by key."""
        drawn = []
        for number in range(self.trials_wanted):
            # each draw has its own generator, so that a larger search begins with the same trials
            source = random.Random(digest(canonical_json(["sweep", self.seed, number])))
            drawn.append({key: values.draw(source) for key, values in self.values.items()})
        return drawn


class TrialsFailed(RuntimeError):
    """Some child runs failed. The results of the others are kept; running the same sweep again repeats the failed
    ones."""


class SweepConfig(FormConfig):
    """`ostinato sweep`: child runs that differ in some keys of their config, and a page that compares them."""

    name: str
    """Name of the sweep. Child runs are called `name/<digest of their config>`: the same sweep resumes, and a larger
    one adds runs to it."""
    training: AnyTraining
    """Training flow, and the config that all child runs share, except for the keys that are searched."""
    search: Annotated[GridSearch | RandomSearch, Field(discriminator="kind")]
    """Search. grid: every combination of the values. random: a number of draws."""
    parallel: int = Field(1, ge=1)
    """Number of child runs at the same time. They share the engine and its memory."""

    _name = field_validator("name")(checked_name)

    @model_validator(mode="after")
    def _every_trial_is_a_config(self) -> Self:
        if self.training.config.run:
            raise ValueError(f"training.config.run={self.training.config.run!r} is made by this flow; leave it out")
        self.children()
        return self

    @property
    def title(self) -> str:
        """The name of its flow runs."""
        return f"sweep {self.name}"

    def children(self) -> list[tuple[dict[str, Any], TrainingConfig]]:
        """(values, config with its run key) of each child run, without repetitions. Raises ValueError that names the
        trial whose config is refused."""
        kind: type[TrainingConfig] = type(self.training.config)
        children: dict[str, tuple[dict[str, Any], TrainingConfig]] = {}
        for values in self.search.trials():
            body = self.training.config.model_dump(mode="json")
            for key, value in values.items():
                _put(body, key, value)
            try:
                config = kind.model_validate(body)
            except ValidationError as error:
                raise ValueError(f"the trial {values} is no {describe_validation(error, kind, body)}") from error
            run = f"{self.name}/{digest(canonical_json(config.semantic()))[:12]}"
            # equal trials are one run
            children.setdefault(run, (values, config.model_copy(update={"run": run})))
        return list(children.values())


def _put(body: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value of a dotted key."""
    *groups, last = key.split(".")
    target: Any = body
    for group in groups:
        target = target.get(group) if isinstance(target, Mapping) else None
    if not isinstance(target, dict):
        raise ValueError(f"{key!r} names no key within a group of the config; give a key like optimizer.lr")
    # a key that the config does not know is refused when it is validated
    target[last] = value
