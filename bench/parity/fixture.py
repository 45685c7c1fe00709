"""The samples that both sides of the comparison use. All values follow from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine.models.samples import Sample

GROUPS, COMPLETIONS = 4, 4
LONGEST = 24
"""Tokens of the longest completion. The loss dr_grpo divides by this number."""


@dataclass(frozen=True)
class Row:
    """One completion of a prompt, with its advantage and its logprobs under the old policy and the reference."""

    prompt: list[int]
    completion: list[int]
    advantage: float
    old: list[float]
    reference: list[float]

    def sample(self, group: str, completion: int) -> Sample:
        count = len(self.completion)
        return Sample(
            token_ids=self.prompt + self.completion,
            loss_mask=[False] * len(self.prompt) + [True] * count,
            group=group,
            completion=completion,
            advantages=[self.advantage] * count,
            old_logprobs=self.old,
            reference_logprobs=self.reference,
        )


def token_rows(seed: int, vocabulary: int) -> list[list[tuple[list[int], list[int]]]]:
    """Returns (prompt, completion) of unequal lengths, indexed by [group][completion]."""
    draw = random.Random(seed)
    groups = []
    for _ in range(GROUPS):
        prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(3, 12))]
        lengths = [draw.randint(2, LONGEST) for _ in range(COMPLETIONS)]
        groups.append([(prompt, [draw.randrange(vocabulary) for _ in range(length)]) for length in lengths])
    # one completion has the largest length
    groups[0][0] = (groups[0][0][0], [draw.randrange(vocabulary) for _ in range(LONGEST)])
    return groups


def sequence(prompt: list[int], completion: list[int], *, group: str) -> Sample:
    """Returns the sample of a prompt and a completion, without advantages and logprobs."""
    weights = [0.0] * len(prompt) + [1.0] * len(completion)
    return Sample(prompt + completion, weights, group=group)


def noise(seed: int, count: int, size: float) -> list[float]:
    draw = random.Random(seed)
    return [draw.uniform(-size, size) for _ in range(count)]
