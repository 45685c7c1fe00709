"""Tests of episodes with a scripted sampler: their tokens, segments and endings, and unusual environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest

from engine.backends.torch.tiny import byte_tokenizer
from engine.errors import SampleTooLong
from engine.protocol import Completion
from engine.text.rendering import Renderer
from engine.text.threads import StringThread
from engine.text.tokenizers import Tokenizer
from tasks.environments.base import Environment, EnvironmentFactory, Grades, Limit, Reaction, turn_grade
from tasks.environments.episodes import Episode, EpisodeLimits, EpisodePlayer
from tasks.environments.runner import EnvironmentRunner
from tasks.evaluation.heldout import row_of_episode
from tasks.graders.base import Grade, IgnoreGradeException

END = "<|im_end|>"
PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


class Scripted(Environment):
    """Reacts as the test says; `asked` counts the calls of all environments of a factory."""

    def __init__(self, react: Callable[[Scripted, StringThread], Any], asked: list[str]) -> None:
        self.react, self.asked, self.turns = react, asked, 0
        self.closed = False

    async def react_to(self, thread: StringThread) -> Reaction:
        self.asked.append(thread.last_content())
        self.turns += 1
        reaction = self.react(self, thread)
        return await reaction if asyncio.iscoroutine(reaction) else reaction

    async def on_limit(self, thread: StringThread, limit: Limit) -> Grades | None:
        return {"turns": -1.0, "tokens": -2.0, "time": -3.0}[limit]

    async def close(self) -> None:
        self.closed = True


class Factory(EnvironmentFactory):
    def __init__(self, react: Callable[[Scripted, StringThread], Any]) -> None:
        self.react, self.made, self.asked = react, list[Scripted](), list[str]()

    def create_environment(self, metadata: Mapping[str, Any]) -> Environment:
        self.made.append(Scripted(self.react, self.asked))
        return self.made[-1]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    raw = byte_tokenizer()
    return Renderer(Tokenizer(raw, name="tiny", eos_token_ids=[raw.eos_token_id]))

SHORT = EpisodeLimits(turns=2, tokens=None, seconds=None, new_tokens=3)


def row_of_file(index: int) -> str:
    return f"row {index + 1} of a.jsonl"


class Sampler:
    """Answers "a0", "a1", … of each episode, each with its end of turn, and keeps what it was asked."""

    def __init__(self, renderer: Renderer, *, cut: bool = False) -> None:
        self.renderer, self.cut = renderer, cut
        self.batches: list[list[str]] = []

    async def __call__(self, prompts: list[list[int]], live: list[Episode]) -> list[Completion]:
        self.batches.append([self.renderer.tokenizer.decode(ids, skip_special=False) for ids in prompts])
        collected = []
        for episode in live:
            ids = self.renderer.tokenizer.encode(f"a{episode.turn}" + ("" if self.cut else END))
            collected.append(Completion(ids, [-0.5 - episode.turn] * len(ids), "length" if self.cut else "eos"))
        return collected


def play(
    renderer: Renderer, factory: Factory, *, count: int = 1, sampler: Sampler | None = None, **limits: Any
) -> tuple[list[Episode], Sampler]:
    sampler = sampler or Sampler(renderer)
    row = {"id": "p", "index": 0, "thread": StringThread([("user", "q")], {"m": 1}).to_json()}
    bounds = EpisodeLimits(**({"turns": 4, "tokens": None, "seconds": None, "new_tokens": 3} | limits))

    async def run() -> list[Episode]:
        episodes = [Episode(row, n, environment=EnvironmentRunner(factory, seed=n, seconds=5)) for n in range(count)]
        await EpisodePlayer(renderer, bounds, concurrency=2, name_row=row_of_file).play(episodes, sampler)
        return episodes

    return asyncio.run(run()), sampler


def text_of(renderer: Renderer, episode: Episode, segment: int = 0) -> str:
    return renderer.tokenizer.decode(episode.segments[segment].tokenized.token_ids, skip_special=False)


def trained(renderer: Renderer, episode: Episode, segment: int = 0) -> str:
    tokenized = episode.segments[segment].tokenized
    ids = [token for token, weight in zip(tokenized.token_ids, tokenized.weights, strict=True) if weight > 0]
    return renderer.tokenizer.decode(ids, skip_special=False)


def three_turns(environment: Scripted, thread: StringThread) -> Reaction:
    return (None, 1.0) if environment.turns == 3 else (thread.user(f"e{environment.turns}"), None)


# -- tokens ------------------------------------------------------------------------------------------------------


def test_a_trajectory_is_one_sequence_and_only_the_answers_are_trained(renderer: Renderer) -> None:
    (episode,), sampler = play(renderer, Factory(three_turns))
    whole = (
        PROMPT + f"a0{END}\n<|im_start|>user\ne1{END}\n<|im_start|>assistant\na1{END}\n<|im_start|>user\ne2{END}\n"
        f"<|im_start|>assistant\na2{END}"
    )
    assert text_of(renderer, episode) == whole
    assert trained(renderer, episode) == f"a0{END}a1{END}a2{END}"
    assert episode.segments[0].tokenized.logprobs == [-0.5] * 3 + [-1.5] * 3 + [-2.5] * 3
    assert episode.segments[0].turn_tokens == [3, 3, 3]
    assert episode.segments[0].grades == {2: 1.0}
    assert (episode.ending, episode.status, episode.turn, len(episode.segments)) == ("environment", "ok", 3, 1)
    # every prompt that was sampled from is the beginning of the sequence that is trained
    assert all(whole.startswith(prompt) for (prompt,) in sampler.batches)


def test_an_answer_that_was_cut_is_closed_by_the_environments_tokens(renderer: Renderer) -> None:
    (episode,), _ = play(renderer, Factory(three_turns), sampler=Sampler(renderer, cut=True), turns=2)
    assert text_of(renderer, episode).startswith(PROMPT + f"a0{END}\n<|im_start|>user\ne1")
    assert trained(renderer, episode) == "a0a1"


def test_live_episodes_take_their_turns_in_one_batch(renderer: Renderer) -> None:
    def react(environment: Scripted, thread: StringThread) -> Reaction:
        # `random` is seeded with the number of the episode: 0 and 1 differ in how long they last
        length = 1 + environment.random.randrange(3) if environment.turns == 1 else environment.left  # type: ignore[attr-defined]
        environment.left = length - 1  # type: ignore[attr-defined]
        return (None, 0.0) if length == 1 else (thread.user("on"), None)

    episodes, sampler = play(renderer, Factory(react), count=5)
    lengths = [episode.turn for episode in episodes]
    assert len(set(lengths)) > 1
    assert [len(batch) for batch in sampler.batches] == [
        sum(length > turn for length in lengths) for turn in range(max(lengths))
    ]


# -- segments ----------------------------------------------------------------------------------------------------


def test_a_rewritten_history_begins_a_new_segment(renderer: Renderer) -> None:
    def react(environment: Scripted, thread: StringThread) -> Reaction:
        if environment.turns == 2:
            summary = [("user", "so far: a0, a1"), ("assistant", "I see"), ("user", "go on")]
            return StringThread(summary, thread.metadata), 0.5
        return (None, 1.0) if environment.turns == 4 else (thread.user("e"), None)

    (episode,), _ = play(renderer, Factory(react))
    first, second = episode.segments
    assert trained(renderer, episode, 0) == f"a0{END}a1{END}"
    assert trained(renderer, episode, 1) == f"a2{END}a3{END}"  # "I see" was not sampled: it is context
    assert text_of(renderer, episode, 1).startswith("<|im_start|>user\nso far: a0, a1")
    assert (first.first_turn, second.first_turn) == (0, 2)
    assert (first.grades, second.grades) == ({1: 0.5}, {3: 1.0})
    assert len(second.tokenized.logprobs) == 6


def test_the_row_of_an_evaluation_repeats_nothing_of_a_rewritten_history(renderer: Renderer) -> None:
    def react(environment: Scripted, thread: StringThread) -> Reaction:
        if environment.turns == 2:
            return StringThread([("user", "q"), ("user", "so far: a0, a1")], thread.metadata), 0.5
        return (None, 1.0) if environment.turns == 3 else (thread.user("e"), None)

    (episode,), _ = play(renderer, Factory(react))
    row = row_of_episode(renderer, episode)
    assert row["text"] == "assistant: a0\nuser: e\nassistant: a1\nuser: so far: a0, a1\nassistant: a2"
    assert (row["reward"], row["status"]) == (1.5, "ok")


def test_a_changed_answer_is_a_rewritten_history(renderer: Renderer) -> None:
    def react(environment: Scripted, thread: StringThread) -> Reaction:
        if environment.turns == 2:
            return None, 1.0
        return StringThread([*thread.turns[:-1], ("assistant", "a0 "), ("user", "e")]), None

    (episode,), _ = play(renderer, Factory(react))
    assert len(episode.segments) == 2
    assert trained(renderer, episode, 1) == f"a1{END}"


# -- limits ------------------------------------------------------------------------------------------------------


def forever(environment: Scripted, thread: StringThread) -> Reaction:
    return thread.user("e"), 1.0


def test_turns_are_limited_and_the_environment_may_grade_the_end(renderer: Renderer) -> None:
    (episode,), _ = play(renderer, Factory(forever), turns=2)
    assert (episode.ending, episode.turn, episode.status) == ("turns", 2, "ok")
    assert episode.segments[0].grades == {0: 1.0, 1: 0.0}  # its grade and that of on_limit are parts of one
    assert trained(renderer, episode) == f"a0{END}a1{END}"


def test_tokens_are_limited_before_they_are_drawn(renderer: Renderer) -> None:
    (free,), _ = play(renderer, Factory(forever), turns=3)
    whole = len(free.segments[0].tokenized)  # three answers of 3 tokens
    (same,), _ = play(renderer, Factory(forever), turns=3, tokens=whole)
    assert same.ending == "turns"
    (cut,), sampler = play(renderer, Factory(forever), turns=3, tokens=whole - 1)
    assert (cut.ending, cut.turn) == ("tokens", 2)
    assert trained(renderer, cut) == f"a0{END}a1{END}"
    assert cut.segments[0].grades == {0: 1.0, 1: -1.0}
    assert len(sampler.batches) == 2


def test_a_segment_that_would_not_fit_is_not_begun(renderer: Renderer) -> None:
    def react(environment: Scripted, thread: StringThread) -> Reaction:
        return StringThread([("user", "x" * 200)]), 1.0

    (episode,), _ = play(renderer, Factory(react), tokens=150)
    assert (episode.ending, len(episode.segments)) == ("tokens", 1)
    assert trained(renderer, episode) == f"a0{END}"


def test_the_environments_time_is_limited(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr("tasks.environments.runner.monotonic", lambda: float(next(now)))
    # begin and each reaction take a second by this clock
    (episode,), _ = play(renderer, Factory(forever), turns=100, seconds=3.0)
    assert (episode.ending, episode.turn) == ("time", 2)


def test_a_first_prompt_that_is_too_long_is_an_error_or_dropped(renderer: Renderer) -> None:
    length = len(renderer.tokenizer.encode(PROMPT))
    message = f"the first prompt of p .row 1 of a.jsonl. has {length} tokens, at most {length - 1}"
    with pytest.raises(SampleTooLong, match=message):
        play(renderer, Factory(three_turns), first_prompt=length - 1)
    (dropped,), sampler = play(renderer, Factory(three_turns), first_prompt=length - 1, drop_too_long=True)
    assert dropped.ending == "too_long" and not sampler.batches
    (played,), _ = play(renderer, Factory(three_turns), first_prompt=length)
    assert played.ending == "environment"


# -- failures ----------------------------------------------------------------------------------------------------


def fails(times: int, error: Exception) -> tuple[Factory, list[int]]:
    """A factory whose environments raise in the second turn, `times` times over all of them."""
    left = [times]

    def react(environment: Scripted, thread: StringThread) -> Reaction:
        if environment.turns == 2 and left[0]:
            left[0] -= 1
            raise error
        return three_turns(environment, thread)

    return Factory(react), left


def test_a_failure_is_tried_again_on_a_new_environment_that_has_seen_the_same(renderer: Renderer) -> None:
    (smooth,), _ = play(renderer, Factory(three_turns))
    factory, _ = fails(1, RuntimeError("boom"))
    (episode,), sampler = play(renderer, factory)
    assert episode.status == "ok"
    assert episode.segments[0].tokenized == smooth.segments[0].tokenized
    assert factory.asked == ["a0", "a1", "a0", "a1", "a2"]  # seen again after the failure, but not sampled again
    assert len(sampler.batches) == 3
    assert [one.closed for one in factory.made] == [True, True]


def test_two_failures_mask_their_episode_alone(renderer: Renderer) -> None:
    def react(environment: Scripted, thread: StringThread) -> Reaction:
        if environment.turns == 1 and environment.random.random() == Random(0).random():  # seeded by the number
            raise RuntimeError("boom")
        return three_turns(environment, thread)

    first, second = play(renderer, Factory(react), count=2)[0]
    assert (first.status, first.ending) == ("masked", "masked")
    assert first.reason == "RuntimeError: boom (2 attempts, the first: RuntimeError: boom)"
    assert (second.status, second.turn) == ("ok", 3)


def test_an_environment_that_hangs_is_masked_and_cannot_hold_the_run(renderer: Renderer) -> None:
    async def hang() -> Reaction:
        while True:  # swallows its cancellation
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return None, 1.0

    factory = Factory(lambda environment, thread: hang())
    row = {"id": "p", "index": 0, "thread": StringThread([("user", "q")]).to_json()}

    async def run() -> Episode:
        episode = Episode(row, 0, environment=EnvironmentRunner(factory, seed=0, seconds=0.05))
        players = EpisodePlayer(renderer, SHORT, concurrency=1, name_row=row_of_file)
        await players.play([episode], Sampler(renderer))
        return episode

    episode = asyncio.run(run())
    assert episode.status == "masked"
    late = "TimeoutError: no answer after 0.05 s"
    assert episode.reason == f"{late} (2 attempts, the first: {late})"


def test_an_environment_that_reacts_otherwise_when_it_is_asked_again_is_masked(renderer: Renderer) -> None:
    calls = [0]

    def react(environment: Scripted, thread: StringThread) -> Reaction:
        calls[0] += 1
        if environment.turns == 2:
            raise RuntimeError("boom")
        return thread.user(f"call {calls[0]}"), None

    (episode,), _ = play(renderer, Factory(react))
    assert episode.status == "masked"
    assert "use self.random for all randomness" in str(episode.reason)


def test_an_environment_may_decline_an_episode(renderer: Renderer) -> None:
    def react(environment: Scripted, thread: StringThread) -> Reaction:
        raise IgnoreGradeException("off topic")

    factory = Factory(react)
    (episode,), _ = play(renderer, factory)
    assert (episode.status, episode.reason, len(factory.asked)) == ("ignored", "off topic", 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda thread: thread.user("e"), "expected .next thread or None, grades or None."),
        (lambda thread: ("more", None), "react_to gave str as the next conversation"),
        (lambda thread: (thread, None), "the last turn is the assistant's"),
        (lambda thread: (None, float("nan")), "a reward is nan; expected a number from"),
        (lambda thread: (None, [1.0, 1e308, 1e308]), "a reward is 1e.308; expected a number from -1e.15 to 1e.15"),
        (lambda thread: (None, "good"), "returned 'good' .str.; expected a number or a Grade"),
    ],
    ids=["no pair", "no thread", "nothing new", "nan", "large", "text"],
)
def test_a_reaction_that_is_none_is_never_a_reward(
    given: Callable[[StringThread], Any], message: str, renderer: Renderer
) -> None:
    (episode,), _ = play(renderer, Factory(lambda environment, thread: given(thread)))
    assert episode.status == "masked"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(episode.reason)


def test_the_parts_of_a_grade_are_added_up() -> None:
    assert turn_grade([0.5, Grade(value=0.25, grader_key="k"), True]) == 1.75
    assert turn_grade(Grade(value=2, grader_key="k")) == 2.0
    assert turn_grade([]) is None and turn_grade(None) is None
