"""The process of an agent that is a function: calls it with its task and a client, and prints its reward.

    python -m tasks.environments.agent_main package.module:run <task.json

It imports little, because each episode starts it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.import_paths import load_object


async def _reward(function: Callable[[dict[str, Any], Any], Awaitable[Any]], task: dict[str, Any]) -> Any:
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise SystemExit(f"a client for the agent needs the openai package ({error}): pip install openai") from error
    # The engine answers in the order of its queue, however long that takes.
    async with AsyncOpenAI(timeout=None) as client:
        return await function(task, client)


def _as_json(reward: Any) -> Any:
    """A reward as JSON values: grades become their numbers."""
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        return [_as_json(part) for part in reward]
    return getattr(reward, "value", reward)


def main() -> None:
    """Runs the function that the first argument names."""
    task = json.load(sys.stdin)
    reward = asyncio.run(_reward(load_object(sys.argv[1]), task))
    # The reward is the last line, whatever the agent has printed. float: for numbers of numpy and torch.
    print(f"\n{json.dumps(_as_json(reward), default=float)}", flush=True)


if __name__ == "__main__":
    main()
