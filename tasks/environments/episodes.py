"""Plays episodes of a policy with environments concurrently, with one batch of the engine per turn.

The tokens of a segment are those of the sampler and those of the environment's turns, rendered once. Nothing is
tokenized a second time. If the environment or the chat template rewrites the earlier conversation, a new segment
begins, and its first tokens are the conversation so far as context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import SampleTooLong, TextError
from engine.protocol import Completion, StopReason
from engine.text.rendering import Renderer
from engine.text.threads import StringThread, TokenizedThread
from tasks.datasets.naming import NameRow
from tasks.environments.base import Limit
from tasks.environments.runner import EnvironmentRunner, EpisodeFailed
from tasks.graders.base import IgnoreGradeException
from tasks.reports.clock import timed

Ending = Literal["environment", "agent", "turns", "tokens", "time", "masked", "ignored", "too_long"]
"""What ended an episode: the environment or the agent itself, a limit, a failure (masked), a refusal to grade it
(ignored), or a first prompt that is too long."""
Generate = Callable[[list[list[int]], list["Episode"]], Awaitable[list[Completion]]]
"""Generates one completion for each prompt (token ids). The second argument holds the episode of each prompt."""


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of an episode."""

    turns: int
    """Largest number of answers in an episode."""
    tokens: int | None
    """Largest number of tokens in a segment, including the next answer; None: no limit."""
    seconds: float | None
    """Time that the environment may take in the whole episode, without sampling; None: no limit."""
    new_tokens: int
    """Largest number of tokens in an answer."""
    first_prompt: int | None = None
    """Largest number of tokens in the first prompt; None: only `tokens` limits it."""
    drop_too_long: bool = False
    """Whether to leave an episode out if its first prompt is too long, instead of failing."""


@dataclass
class EpisodeSegment:
    """A part of an episode whose tokens form one sequence."""

    tokenized: TokenizedThread
    first_turn: int
    """Number of the episode's answers before this segment."""
    turn_tokens: list[int] = field(default_factory=list)
    """Number of sampled tokens in each answer."""
    stop_reasons: list[StopReason] = field(default_factory=list)
    """Why each answer ended."""
    grades: dict[int, float] = field(default_factory=dict)
    """Turn of the episode, from 0 -> its grade."""
    policy_states: list[str] = field(default_factory=list)
    """The state of the policy of each part of the answers, where it may change at a token."""
    policy_tokens: list[int] = field(default_factory=list)
    """Number of tokens of each of these parts."""


@dataclass
class Trajectory:
    """The answers to one prompt, and how it ended. `row` is the prompt's row of the dataset, and `number` the number
    among the trajectories of this prompt."""

    row: dict[str, Any]
    number: int
    segments: list[EpisodeSegment] = field(default_factory=list)
    turn: int = 0
    """Number of answers that are complete: those to which the environment has reacted."""
    ending: Ending | None = None
    reason: str | None = None
    failed_attempts: int = 0
    """How often the agent that plays it failed."""

    @property
    def status(self) -> str:
        return self.ending if self.ending in ("masked", "ignored") else "ok"

    def end(self, ending: Ending, reason: str | None = None) -> None:
        self.ending, self.reason = ending, reason


@dataclass
class Episode(Trajectory):
    """A trajectory that is played with an environment, turn by turn."""

    environment: EnvironmentRunner = field(kw_only=True)
    answer: Completion | None = None
    """The last completion."""

    @property
    def current_segment(self) -> EpisodeSegment:
        return self.segments[-1]


class EpisodePlayer:
    """Plays episodes to their ends. An exception of an environment masks its episode and is not raised."""

    def __init__(self, renderer: Renderer, limits: EpisodeLimits, *, concurrency: int, name_row: NameRow) -> None:
        self.renderer, self.limits, self.name_row = renderer, limits, name_row
        self._concurrency_limit = asyncio.Semaphore(concurrency)

    async def play(self, episodes: Sequence[Episode], generate: Generate) -> None:
        """Play all episodes. One call of `generate` per turn serves all episodes that have not ended.

        Raises SampleTooLong for a first prompt that is too long, and the exceptions of `generate`.
        """
        try:
            # Create the environments and render the first prompts.
            await self._run_concurrently(episodes, self._begin)
            for episode in episodes:
                self._check_first_prompt(episode)

            # Play turn by turn.
            while live := [episode for episode in episodes if episode.ending is None]:
                prompts = [self.renderer.serialize(episode.current_segment.tokenized)[0] for episode in live]
                completions = await generate(prompts, live)
                for episode, completion in zip(live, completions, strict=True):
                    episode.answer = completion
                await self._run_concurrently(live, self._finish_turn)
        finally:
            await asyncio.gather(*(episode.environment.close() for episode in episodes))

    async def _run_concurrently(self, episodes: Sequence[Episode], act: Callable[[Episode], Awaitable[None]]) -> None:
        """Run `act` for all episodes. A failure ends its episode."""

        async def run(episode: Episode) -> None:
            async with self._concurrency_limit:
                try:
                    await act(episode)
                except EpisodeFailed as failure:
                    episode.end("masked", str(failure))
                except IgnoreGradeException as declined:
                    episode.end("ignored", str(declined))

        with timed("grade"):
            async with asyncio.TaskGroup() as group:
                for episode in episodes:
                    group.create_task(run(episode))

    async def _begin(self, episode: Episode) -> None:
        """Create the environment and open the first segment."""
        prompt = StringThread.from_json(str(episode.row["thread"]))
        has_native_tools = self.renderer.tokenizer.tool_format.is_native
        opening = await episode.environment.begin(prompt, has_native_tools=has_native_tools)
        self._open_segment(episode, opening)

    def _check_first_prompt(self, episode: Episode) -> None:
        """Raise SampleTooLong, or end the episode, if its first prompt is too long."""
        if episode.ending is not None:
            return
        # The prompt and the first answer must fit together.
        length = len(episode.current_segment.tokenized)
        bounds = []
        if self.limits.first_prompt is not None:
            bounds.append(self.limits.first_prompt)
        if self.limits.tokens is not None:
            bounds.append(self.limits.tokens - self.limits.new_tokens)
        limit = min(bounds, default=None)
        if limit is None or length <= limit:
            return
        if not self.limits.drop_too_long:
            raise SampleTooLong(
                f"the first prompt of {episode.row['id']} ({self.name_row(episode.row['index'])}) has {length} tokens, "
                f"at most {limit} are allowed (max_prompt_tokens, or max_tokens and the model's context less "
                "max_new_tokens); set truncation to drop, or raise the limit"
            )
        episode.end("too_long", f"{length} tokens, at most {limit}")

    async def _finish_turn(self, episode: Episode) -> None:
        """Append the answer to the segment, let the environment react, and open the next turn or end the episode."""
        # Append the answer.
        completion = episode.answer
        if completion is None or not completion.token_ids:
            raise EpisodeFailed("the sampler returned no token")
        segment = episode.current_segment
        segment.tokenized = self.renderer.with_completion(segment.tokenized, completion.token_ids, completion.logprobs)
        segment.turn_tokens.append(len(completion.token_ids))
        segment.stop_reasons.append(completion.stop_reason)

        # Let the environment react.
        thread = self.renderer.detokenize(segment.tokenized)
        following, grade = await episode.environment.react(thread)
        turn, episode.turn = episode.turn, episode.turn + 1
        if grade is not None:
            segment.grades[turn] = grade
        if following is None:
            episode.end("environment")
            return

        # Open the next turn, or end the episode at a limit. The environment may then add to the grade of the last turn.
        limit = self._open_next_turn(episode, thread, following)
        if limit is None:
            return
        limit_grade = await episode.environment.grade_at_limit(thread, limit)
        if limit_grade is not None:
            segment.grades[turn] = segment.grades.get(turn, 0.0) + limit_grade
        episode.end(limit)

    def _open_next_turn(self, episode: Episode, thread: StringThread, following: StringThread) -> Limit | None:
        """Open the next turn, or return the limit that forbids it and leave the episode as it is."""
        if episode.turn >= self.limits.turns:
            return "turns"
        if self.limits.seconds is not None and episode.environment.spent >= self.limits.seconds:
            return "time"

        # Extend the segment or open another one.
        segment_count = len(episode.segments)
        before = episode.current_segment.tokenized
        extended = self._extended(before, thread, following)
        if extended is None:
            self._open_segment(episode, following)
        else:
            episode.current_segment.tokenized = extended

        # Undo it if the next answer would not fit.
        length = len(episode.current_segment.tokenized) + self.limits.new_tokens
        if self.limits.tokens is None or length <= self.limits.tokens:
            return None
        del episode.segments[segment_count:]
        episode.current_segment.tokenized = before
        return "tokens"

    def _extended(
        self, tokenized: TokenizedThread, thread: StringThread, following: StringThread
    ) -> TokenizedThread | None:
        """The tokens so far, the new turns, and the opening of the assistant's next turn.

        None if `following` does not begin with `thread`, has other tools, or if the chat template renders earlier turns
        differently once more turns follow.
        """
        # Only the new turns are tokenized: the tokens of the earlier ones must stay those that were sampled.
        played = len(thread.turns)
        if following.turns[:played] != thread.turns or following.tools != thread.tools:
            return None
        try:
            return self.renderer.extended(tokenized, following.turns[played:])
        except TextError as error:
            raise EpisodeFailed(f"the environment's conversation cannot be answered: {error}") from error

    def _open_segment(self, episode: Episode, thread: StringThread) -> None:
        """Begin a segment with `thread` as its context."""
        try:
            tokenized = self.renderer.prompt(thread)
        except TextError as error:
            raise EpisodeFailed(f"the environment's conversation cannot be answered: {error}") from error
        episode.segments.append(EpisodeSegment(tokenized, first_turn=episode.turn))
