"""Tests of a pool of two real vLLM replicas: both draw the same, and the digests of their weights are checked."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.backends.replicas.pool import ReplicaPool
from engine.errors import SamplerOutOfSync
from engine.protocol import Completion
from tests.engine.vllm.pools import LONG, PROMPTS, SEEDS, SHORT, WeightFiles, call, count_requests, load, same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# -- draws --------------------------------------------------------------------------------------------------------


def test_two_replicas_share_a_call_and_draw_what_one_draws(
    loaded: ReplicaPool, expected: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    request_counts = count_requests(monkeypatch)
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
    assert sorted(request_counts) == ["replica-0", "replica-1"] and sum(request_counts.values()) == len(PROMPTS)
    assert max(request_counts.values()) <= 10  # 16 pieces of 15 tokens, at most a quarter above the mean of 8
    loaded.check("state-0")


def test_tokens_are_told_in_the_callers_thread_and_are_those_returned(loaded: ReplicaPool) -> None:
    heard: dict[int, list[tuple[int, float]]] = {}
    threads = set()

    def on_token(index: int, token: int, logprob: float) -> None:
        heard.setdefault(index, []).append((token, logprob))
        threads.add(threading.current_thread())

    drawn = loaded.generate(PROMPTS, SEEDS, SHORT, on_token)
    assert threads == {threading.current_thread()}
    assert heard == {
        index: list(zip(completion.token_ids, completion.logprobs, strict=True))
        for index, completion in enumerate(drawn)
    }


def test_what_a_listener_raises_ends_the_call_on_the_replicas(loaded: ReplicaPool, weights: list[WeightFiles]) -> None:
    class Enough(Exception):
        pass

    def on_token(index: int, token: int, logprob: float) -> None:
        raise Enough

    with pytest.raises(Enough):
        loaded.generate(PROMPTS, SEEDS, LONG, on_token)
    assert [replica.outstanding_tokens for replica in loaded.replicas] == [0, 0]
    load(loaded, weights[0])  # resets the prefix cache, which completions that still ran would keep busy


def test_an_interrupted_call_is_continued_from_the_tokens_that_arrived(loaded: ReplicaPool) -> None:
    """The logprobs of both parts are those of the whole text, and the completions have their length in all."""
    params, arrived = LONG.model_copy(update={"max_new_tokens": 60, "min_new_tokens": 60}), 0

    def count(index: int, token: int, logprob: float) -> None:
        nonlocal arrived
        arrived += 1

    begun = loaded.generate(PROMPTS, SEEDS, params, count, interrupted=lambda: arrived >= 200)
    loaded.check("state-0")  # the replicas that sampled still have the weights
    assert [replica.outstanding_tokens for replica in loaded.replicas] == [0, 0]
    assert "interrupted" in {completion.stop_reason for completion in begun}
    left = [index for index, completion in enumerate(begun) if completion.stop_reason == "interrupted"]
    assert sum(len(completion.token_ids) for completion in begun) >= 200
    rest = loaded.generate(
        [PROMPTS[index] for index in left], [100 + index for index in left], params,
        sampled=[begun[index].token_ids for index in left],
    )  # fmt: skip
    wholes = []
    for index, completion in zip(left, rest, strict=True):
        assert completion.stop_reason == "length"
        assert len(begun[index].token_ids) + len(completion.token_ids) == 60
        wholes.append([*PROMPTS[index], *begun[index].token_ids, *completion.token_ids])
    for index, completion, scores in zip(left, rest, loaded.score(wholes), strict=True):
        reported = begun[index].logprobs + completion.logprobs
        # The sampler masks the ends of sequence before min_new_tokens: -ln(1 - 1/259) is about 0.004.
        assert scores[len(PROMPTS[index]) - 1 :] == pytest.approx(reported, abs=0.02)


def test_scores_are_the_logprobs_of_the_draw(loaded: ReplicaPool) -> None:
    drawn = loaded.generate(PROMPTS[:3], SEEDS[:3], SHORT)
    scored = loaded.score([p + c.token_ids for p, c in zip(PROMPTS[:3], drawn, strict=True)])
    for prompt, completion, logprobs in zip(PROMPTS[:3], drawn, scored, strict=True):
        # min_new_tokens holds the end back: its probability, e^-5.6 at most, is missing from what was scored
        assert logprobs[len(prompt) - 1 :] == pytest.approx(completion.logprobs, abs=0.01)


# -- weights ------------------------------------------------------------------------------------------------------


def test_an_update_that_one_of_two_replicas_only_acknowledges_is_refused(
    loaded: ReplicaPool, weights: list[WeightFiles], faults: Path
) -> None:
    (faults / "replica-1").touch()
    try:
        with pytest.raises(SamplerOutOfSync, match="replica-1"):
            load(loaded, weights[1])
    finally:
        (faults / "replica-1").unlink()
    with pytest.raises(SamplerOutOfSync):
        loaded.generate(PROMPTS, SEEDS, SHORT)


def test_the_check_names_a_replica_whose_weights_changed(loaded: ReplicaPool, weights: list[WeightFiles]) -> None:
    loaded.check("state-0")
    call(loaded, loaded.replicas[1], "rpc", "ostinato_check_and_spoil")
    with pytest.raises(SamplerOutOfSync, match="replica-1"):
        loaded.check("state-0")
    with pytest.raises(SamplerOutOfSync):
        loaded.check("state-1")


def test_other_weights_draw_other_tokens_and_the_first_ones_come_back(
    loaded: ReplicaPool, weights: list[WeightFiles], expected: dict[int, list[Completion]]
) -> None:
    load(loaded, weights[1])
    other = loaded.generate(PROMPTS, SEEDS, SHORT)
    assert [c.token_ids for c in other] != [c.token_ids for c in expected[12]]
    load(loaded, weights[0], full=True)
    same(loaded.generate(PROMPTS, SEEDS, SHORT), expected[12])
