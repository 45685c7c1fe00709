"""Simulates samplers and a trainer with long-tailed lengths: synchronous, with a fixed lag, and with updates in flight.

    PYTHONPATH=. .venv/bin/python bench/async_sim.py --samplers 64 --steps 20

The rules are those of `rules.max_staleness` and `rules.weight_updates`; the rates are those of bench/cost_model.py. A
sampler decodes its rows together, `CHUNK` tokens at a time, and gives a free place to the next completion of the oldest
step that may begin; the samplers share the completions evenly. Between updates, all samplers have one policy. No
completion is dropped: a step trains when its last one has ended. Grading takes no time.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bench import cost_model as model

CHUNK = 64
"""Tokens that the rows of a sampler decode between two looks at the clock."""
WARM_UP = 5
"""Steps that are not counted, while the lanes fill."""


@dataclass(frozen=True)
class Rule:
    """How far sampling may run ahead of training, and what happens to running completions when a policy is new."""

    name: str
    max_staleness: int
    in_flight: bool = False
    keeps_caches: bool = False
    """Whether an update keeps the keys and values of running completions, which no rule of the product does."""


RULES = (
    Rule("synchronous", 0),
    Rule("between, one step off", 1),
    Rule("between, 4 steps off", 4),
    Rule("in flight, one step off", 1, in_flight=True),
    Rule("in flight, 4 steps off", 4, in_flight=True),
    Rule("in flight, 4 steps off, caches kept", 4, in_flight=True, keeps_caches=True),
)


@dataclass(frozen=True)
class Case:
    """The model, the cluster and the batch of a simulation."""

    shape: model.Shape
    cluster: model.Cluster
    work: model.Work
    """`new_tokens` is the median length of a completion."""
    spread: float
    """Standard deviation of the logarithm of the lengths."""
    longest: int
    steps: int
    seed: int = 0

    def lengths(self) -> NDArray[np.int64]:
        """(steps, rollouts)"""
        generator = np.random.default_rng(self.seed)
        drawn = self.work.new_tokens * np.exp(self.spread * generator.standard_normal((self.steps, self.work.rollouts)))
        return np.clip(drawn, 1, self.longest).astype(np.int64)

    def train_seconds(self, lengths: NDArray[np.int64]) -> float:
        """Scoring and training of one step. Its coordinator's work is part of it."""
        work = replace(self.work, new_tokens=round(lengths.mean()))
        split = model.step_split(self.shape, self.cluster, work)
        return split.score + split.train + split.coordinator


@dataclass
class Sampler:
    """One copy of the model with its running rows."""

    places: int
    policy: int = 0
    steps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Of each running row, the step that it belongs to."""
    done: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    left: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    waits: bool = False


@dataclass(frozen=True)
class Result:
    rule: Rule
    step_seconds: float
    sampler_idle: float
    """Share of the samplers' time in which no row decoded: they waited, or loaded weights."""
    rows: float
    """Rows that a sampler decoded together, on average over all its time."""
    trainer_idle: float
    mean_lag: float
    """In steps, over tokens."""
    max_lag: int
    tokens_lost: int
    """Sampled and not trained on, of the steps that trained."""


class Simulation:
    """Events are the ends of a sampler's chunk and of the trainer's step."""

    def __init__(self, case: Case, rule: Rule) -> None:
        self.case, self.rule = case, rule
        self.lengths = case.lengths()
        count = case.cluster.sample // case.cluster.tensor_parallel
        typical = replace(case.work, new_tokens=2 * case.work.new_tokens)
        places = model.running(case.shape, case.cluster, typical)
        self.samplers = [Sampler(places) for _ in range(count)]
        self.sync = model.sync_seconds(case.shape, case.cluster)
        self.waiting: deque[tuple[int, int]] = deque(
            (step, length) for step, row in enumerate(self.lengths) for length in row.tolist()
        )
        self.unfinished = self.lengths.shape[1] * np.ones(case.steps, np.int64)
        self.trained = 0
        """Steps that are trained, which is also the newest policy."""
        self.training = False
        self.ends: list[float] = []
        self.chunks: list[tuple[float, float, int]] = []
        """(begin, seconds, rows)"""
        self.train_spans: list[tuple[float, float]] = []
        self.sampled = np.zeros(case.steps, np.int64)
        self.lag_sum, self.lag_tokens, self.max_lag = 0, 0, 0
        self.events: list[tuple[float, int]] = []

    def run(self) -> Result:
        for number in range(len(self.samplers)):
            heapq.heappush(self.events, (0.0, number))
        while self.events and self.trained < self.case.steps:
            now, number = heapq.heappop(self.events)
            if number < 0:
                self._end_step(now)
            else:
                self._decode(self.samplers[number], number, now)
        return self._result()

    # -- the trainer ---------------------------------------------------------------------------------------------

    def _maybe_train(self, now: float) -> None:
        step = self.trained
        if self.training or step == self.case.steps or self.unfinished[step]:
            return
        self.training = True
        seconds = self.case.train_seconds(self.lengths[step])
        self.train_spans.append((now, now + seconds))
        heapq.heappush(self.events, (now + seconds, -1))

    def _end_step(self, now: float) -> None:
        self.training = False
        self.trained += 1
        self.ends.append(now)
        self._maybe_train(now)
        self._wake_samplers(now)

    def _wake_samplers(self, now: float) -> None:
        for number, sampler in enumerate(self.samplers):
            if sampler.waits:
                sampler.waits = False
                heapq.heappush(self.events, (now, number))

    # -- a sampler -----------------------------------------------------------------------------------------------

    def _policy_of(self, step: int) -> int | None:
        """The policy that begins completions of this step (counted from 0), or None if it is not trained yet."""
        if step >= self._open_steps():
            return None
        return self.trained if self.rule.in_flight else max(0, step - self.rule.max_staleness)

    def _decode(self, sampler: Sampler, number: int, now: float) -> None:
        """Loads new weights where the rule says so, fills free places, and decodes one chunk."""
        begin = now
        if self.rule.in_flight and sampler.policy < self.trained:
            now = self._load(sampler, self.trained, now)
        share = self._share()
        while self.waiting and len(sampler.left) < share:
            step, length = self.waiting[0]
            policy = self._policy_of(step)
            if policy is None:
                break
            if policy != sampler.policy:
                now = self._load(sampler, policy, now)
            self.waiting.popleft()
            sampler.steps = np.append(sampler.steps, step)
            sampler.done = np.append(sampler.done, 0)
            sampler.left = np.append(sampler.left, length)
        rows = len(sampler.left)
        if not rows:
            sampler.waits = True
            return
        # the chunk
        tokens = min(CHUNK, int(sampler.left.min()))
        work = replace(self.case.work, new_tokens=2 * round(sampler.done.mean()))
        end = now + tokens * model.decode_seconds(self.case.shape, self.case.cluster, work, rows)
        self.chunks.append((now, end - now, rows))
        lags = sampler.steps - sampler.policy
        self.lag_sum += int(lags.sum()) * tokens
        self.lag_tokens += rows * tokens
        self.max_lag = max(self.max_lag, int(lags.max()))
        np.add.at(self.sampled, sampler.steps, tokens)
        sampler.done += tokens
        sampler.left -= tokens
        ended = sampler.left == 0
        ended_steps = sampler.steps[ended]
        np.subtract.at(self.unfinished, ended_steps, 1)
        sampler.steps, sampler.done, sampler.left = (
            values[~ended] for values in (sampler.steps, sampler.done, sampler.left)
        )
        assert end > begin
        heapq.heappush(self.events, (end, number))
        if ended.any():
            self._maybe_train(end)
            if not self.unfinished[ended_steps].all():
                self._wake_samplers(end)

    def _open_steps(self) -> int:
        """The number of steps whose completions may begin."""
        steps = min(self.case.steps, self.trained + self.rule.max_staleness + 1)
        if self.rule.in_flight:
            return steps
        # All samplers have one policy: a step begins when the last completion of the step before has ended.
        unfinished = np.flatnonzero(self.unfinished[:steps])
        return int(unfinished[0]) + 1 if len(unfinished) else steps

    def _share(self) -> int:
        """Rows of each sampler, if all that run or may begin are spread evenly."""
        may_begin = self._open_steps() * self.lengths.shape[1]
        running = sum(len(sampler.left) for sampler in self.samplers)
        begun = self.lengths.size - len(self.waiting)
        return min(self.samplers[0].places, -(-(running + may_begin - begun) // len(self.samplers)))

    def _load(self, sampler: Sampler, policy: int, now: float) -> float:
        """Loads the weights and computes the KV cache of the running rows again; returns when that is done."""
        sampler.policy = policy
        if self.rule.keeps_caches:
            return now + self.sync
        contexts = int(sampler.done.sum()) + len(sampler.done) * self.case.work.prompt_tokens
        rate = self.case.cluster.tensor_parallel * self.case.cluster.gpu.flops * model.MFU
        return now + self.sync + model.FORWARD_FLOPS * self.case.shape.parameters * contexts / rate

    def _result(self) -> Result:
        begin, end = self.ends[WARM_UP - 1], self.ends[-1]
        steps = len(self.ends) - WARM_UP
        # The samplers are counted until they have nothing left to sample.
        until = min(end, max(start for start, _, _ in self.chunks))
        counted = [(seconds, rows) for start, seconds, rows in self.chunks if begin <= start < until]
        total = len(self.samplers) * (until - begin)
        trained = sum(stop - start for start, stop in self.train_spans if start >= begin)
        return Result(
            self.rule,
            (end - begin) / steps,
            1 - sum(seconds for seconds, _ in counted) / total,
            sum(seconds * rows for seconds, rows in counted) / total,
            1 - trained / (end - begin),
            self.lag_sum / self.lag_tokens,
            self.max_lag,
            int((self.sampled - self.lengths.sum(axis=1)).sum()),
        )


def table(results: list[Result]) -> str:
    lines = [
        "| rule | seconds per step | times synchronous | samplers idle | rows of a sampler | trainer idle "
        "| lag of a token: mean, max | tokens thrown away |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = results[0].step_seconds
    for r in results:
        lines.append(
            f"| {r.rule.name} | {r.step_seconds:.1f} | {first / r.step_seconds:.2f} | {r.sampler_idle:.0%} "
            f"| {r.rows:.0f} | {r.trainer_idle:.0%} | {r.mean_lag:.2f}, {r.max_lag} | {r.tokens_lost} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samplers", type=int, default=64, help="GPUs that sample, one copy of 8B on each")
    parser.add_argument("--trainers", type=int, default=128, help="GPUs of the trainer")
    parser.add_argument("--prompts", type=int, default=4096)
    parser.add_argument("--median", type=int, default=512, help="median length of a completion, in tokens")
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of the logarithm of the lengths")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    cluster = model.Cluster(model.H100, options.trainers, options.samplers)
    work = model.Work(options.prompts, new_tokens=options.median, scored=1)
    case = Case(model.B8, cluster, work, options.spread, options.longest, options.steps)
    lengths = case.lengths()
    print(f"8B, {options.trainers} + {options.samplers} H100, {work.rollouts} completions a step; lengths: median")
    print(f"{np.median(lengths):.0f}, mean {lengths.mean():.0f}, 99 % {np.percentile(lengths, 99):.0f} tokens;")
    print(f"training alone takes {case.train_seconds(lengths):.1f} s a step\n")
    print(table([Simulation(case, rule).run() for rule in RULES]))


if __name__ == "__main__":
    main()
