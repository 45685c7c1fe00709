"""Episodes of a policy with environments, played side by side: one batch of the engine per turn.

The tokens of a segment are the sampler's own and what the environment added after them, rendered once; nothing is
tokenised again. Where the environment rewrites the conversation, or the chat template does, a new segment begins: what
came before is its context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import SampleTooLong
from engine.protocol import Completion
from engine.text.errors import TemplateNotPrefixStable, TextError
from engine.text.rendering import Renderer
from engine.text.threads import StringThread, TokenizedThread
from tasks.datasets.naming import NameRow
from tasks.environments.base import Limit
from tasks.environments.runner import EnvironmentRunner, EpisodeFailed
from tasks.graders.base import IgnoreGradeException
from tasks.reports.clock import timed

Ending = Literal["environment", "turns", "tokens", "time", "masked", "ignored", "too_long"]
Generate = Callable[[list[list[int]], list["Episode"]], Awaitable[list[Completion]]]
"""One completion of each prompt of token ids; the episode of each comes with it."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Where an episode ends at the latest."""

    turns: int
    tokens: int | None
    """Of a segment, the answer to come included; None: no limit."""
    seconds: float | None
    """Of the environment's own time, over the whole episode."""
    new_tokens: int
    """What an answer may take."""
    first_prompt: int | None = None
    """Tokens of the first prompt; None: what `tokens` leaves."""
    drop_too_long: bool = False
    """Leave an episode out whose first prompt is too long, instead of failing."""


@dataclass
class EpisodeSegment:
    """A stretch of an episode whose tokens follow one another."""

    tokenized: TokenizedThread
    first_turn: int
    turn_tokens: list[int] = field(default_factory=list)
    """Sampled tokens of each answer."""
    grades: dict[int, float] = field(default_factory=dict)
    """Turn of the episode -> its grade."""


@dataclass
class Episode:
    """One episode. `row` is the dataset's, `number` tells it from the others of its prompt."""

    row: dict[str, Any]
    number: int
    environment: EnvironmentRunner
    segments: list[EpisodeSegment] = field(default_factory=list)
    turn: int = 0
    """Answers that the environment has reacted to."""
    answer: Completion | None = None
    """What was sampled last."""
    ending: Ending | None = None
    reason: str | None = None

    @property
    def now(self) -> EpisodeSegment:
        return self.segments[-1]

    @property
    def status(self) -> str:
        return self.ending if self.ending in ("masked", "ignored") else "ok"

    def end(self, ending: Ending, reason: str | None = None) -> None:
        self.ending, self.reason = ending, reason


class EpisodePlayer:
    """Plays episodes to their ends. No exception of an environment leaves it: such an episode is masked."""

    def __init__(self, renderer: Renderer, limits: EpisodeLimits, *, concurrency: int, name_row: NameRow) -> None:
        self.renderer, self.limits, self.name_row = renderer, limits, name_row
        self._gate = asyncio.Semaphore(concurrency)

    async def play(self, episodes: Sequence[Episode], generate: Generate) -> None:
        """Every live episode takes its next turn in one call of `generate`, until none is left.

        Raises SampleTooLong for a first prompt that is too long, and what `generate` raises.
        """
        try:
            await self._each(episodes, self._begin)
            for episode in episodes:
                self._check_first(episode)
            while live := [episode for episode in episodes if episode.ending is None]:
                prompts = [self.renderer.serialize(episode.now.tokenized)[0] for episode in live]
                for episode, done in zip(live, await generate(prompts, live), strict=True):
                    episode.answer = done
                await self._each(live, self._turn)
        finally:
            await asyncio.gather(*(episode.environment.close() for episode in episodes))

    async def _each(self, episodes: Sequence[Episode], act: Callable[[Episode], Awaitable[None]]) -> None:
        async def one(episode: Episode) -> None:
            async with self._gate:
                try:
                    await act(episode)
                except EpisodeFailed as failure:
                    episode.end("masked", str(failure))
                except IgnoreGradeException as declined:
                    episode.end("ignored", str(declined))

        with timed("grade"):
            async with asyncio.TaskGroup() as group:
                for episode in episodes:
                    group.create_task(one(episode))

    async def _begin(self, episode: Episode) -> None:
        opening = await episode.environment.begin(StringThread.from_json(str(episode.row["thread"])))
        self._open(episode, opening)

    def _check_first(self, episode: Episode) -> None:
        if episode.ending is not None:
            return
        length = len(episode.now.tokenized)
        bounds = [self.limits.first_prompt]
        if self.limits.tokens is not None:
            bounds.append(self.limits.tokens - self.limits.new_tokens)
        limit = min((bound for bound in bounds if bound is not None), default=None)
        if limit is None or length <= limit:
            return
        if not self.limits.drop_too_long:
            raise SampleTooLong(
                f"the first prompt of {episode.row['id']} ({self.name_row(episode.row['index'])}) has {length} tokens, "
                f"at most {limit} are allowed (max_prompt_tokens, or max_tokens and the model's context less "
                "max_new_tokens); set truncation to drop, or raise the limit"
            )
        episode.end("too_long", f"{length} tokens, at most {limit}")

    async def _turn(self, episode: Episode) -> None:
        """Takes the answer in and lets the environment react."""
        done = episode.answer
        if done is None or not done.token_ids:
            raise EpisodeFailed("the sampler drew no token")
        segment = episode.now
        segment.tokenized = self.renderer.with_completion(segment.tokenized, done.token_ids, done.logprobs)
        segment.turn_tokens.append(len(done.token_ids))
        thread = self.renderer.detokenize(segment.tokenized)
        following, grade = await episode.environment.react(thread)
        turn, episode.turn = episode.turn, episode.turn + 1
        if grade is not None:
            segment.grades[turn] = grade
        if following is None:
            episode.end("environment")
            return
        limit = self._go_on(episode, thread, following)
        if limit is None:
            return
        more = await episode.environment.limited(thread, limit)
        if more is not None:
            segment.grades[turn] = segment.grades.get(turn, 0.0) + more
        episode.end(limit)

    def _go_on(self, episode: Episode, thread: StringThread, following: StringThread) -> Limit | None:
        """Opens the next turn, or says which limit forbids it."""
        if episode.turn >= self.limits.turns:
            return "turns"
        if self.limits.seconds is not None and episode.environment.spent >= self.limits.seconds:
            return "time"
        opened = self._extended(episode.now.tokenized, thread, following)
        count = len(episode.segments)
        before = episode.now.tokenized
        if opened is None:
            self._open(episode, following)
        else:
            episode.now.tokenized = opened
        if self.limits.tokens is None or len(episode.now.tokenized) + self.limits.new_tokens <= self.limits.tokens:
            return None
        del episode.segments[count:]
        episode.now.tokenized = before
        return "tokens"

    def _extended(
        self, tokenized: TokenizedThread, thread: StringThread, following: StringThread
    ) -> TokenizedThread | None:
        """The tokens so far and the new turns after them, opened; None when `following` is another conversation, or the
        chat template writes what was there in another way once more turns follow."""
        played = len(thread.turns)
        if following.turns[:played] != thread.turns:
            return None
        try:
            for role, content in following.turns[played:]:
                tokenized = self.renderer.append(tokenized, role, content)
            return self.renderer.prompt(tokenized)
        except TemplateNotPrefixStable:
            return None
        except TextError as error:
            raise EpisodeFailed(f"the environment's conversation cannot be answered: {error}") from error

    def _open(self, episode: Episode, thread: StringThread) -> None:
        """Begins a segment."""
        try:
            tokenized = self.renderer.prompt(thread)
        except TextError as error:
            raise EpisodeFailed(f"the environment's conversation cannot be answered: {error}") from error
        episode.segments.append(EpisodeSegment(tokenized, first_turn=episode.turn))
