"""Agents: programs that play an episode by calling the policy through OpenAI's API, and grade it themselves.

An agent is an async function `run(task, client) -> reward`, or any command. It runs in a process of its own, with the
address of its session in OPENAI_BASE_URL and its task as JSON on standard input. Its reward is the last line of its
output as JSON, or what it posted to OPENAI_BASE_URL/reward.

The process is not a sandbox: it can read and write the files of this user. Its time, memory and output are limited, and
its process group is killed when the episode or the worker ends. A process that leaves the group is not killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio import StreamReader
from asyncio.subprocess import PIPE, Process
from time import monotonic
from typing import Literal

from pydantic import JsonValue

from engine.http.openai.sessions import Session, SessionLimit, reward_of
from tasks.child_process import GUARDED_COMMAND, no_proxy_with_loopback
from tasks.environments.base import turn_grade
from tasks.environments.spec import AgentSpec, search_path

MAX_OUTPUT = 64 << 10
"""Bytes of an agent's output that are kept, from its end."""
SHOWN_OUTPUT = 500
"""Characters of the output that an error shows."""
POLL_SECONDS = 0.05
"""Seconds between two looks at the time and the session of a running agent."""
CLOSE_SECONDS = 2.0
"""Seconds in which the output of a killed agent must end."""
AgentEnding = Literal["agent", "time"] | SessionLimit


class AgentFailed(Exception):
    """An attempt of an agent gave no reward."""


class AgentAttempt:
    """One process of an agent, and the session that it calls."""

    def __init__(
        self, spec: AgentSpec, session: Session, url: str, *, seconds: float, memory_mib: int | None
    ) -> None:
        """`url` is the session's. `seconds` limits the time without that in which the agent waits for answers."""
        self.spec, self.session, self.url = spec, session, url
        self.seconds, self.memory_mib = seconds, memory_mib
        self._output, self._errors = bytearray(), bytearray()

    async def run(self, task: dict[str, JsonValue]) -> tuple[AgentEnding, float | None]:
        """Runs the agent to its end. Returns what ended it, and its reward. A limit may end it without a reward.

        Raises AgentFailed, and the error of the session if the policy cannot be called.
        """
        # The processes of the agent end with this process: then the write end closes.
        pipe, write_end = os.pipe()
        try:
            process = await self._start(pipe)
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(pipe)
        assert process.stdin and process.stdout and process.stderr
        readers = [
            asyncio.create_task(_keep_end(process.stdout, self._output)),
            asyncio.create_task(_keep_end(process.stderr, self._errors)),
        ]
        try:
            # An agent that reads no task closes its standard input.
            with contextlib.suppress(ConnectionError):
                process.stdin.write(json.dumps(task).encode())
                process.stdin.close()
            in_time = await self._wait(process)
        finally:
            os.close(write_end)
            await _kill_group(process)
            # A process that left the group may hold the output open.
            await asyncio.wait(readers, timeout=CLOSE_SECONDS)
            for reader in readers:
                reader.cancel()
            process._transport.close()  # type: ignore[attr-defined]  # the streams have no method that closes them
        if self.session.failure is not None:
            raise self.session.failure
        return self._result(process.returncode, in_time=in_time)

    async def _start(self, pipe: int) -> Process:
        memory = (self.memory_mib or 0) << 20
        guard = [sys.executable, "-c", GUARDED_COMMAND, str(pipe), str(memory)]
        return await asyncio.create_subprocess_exec(
            *guard, *self.spec.words, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True,
            pass_fds=(pipe,), env=self._variables(),
        )  # fmt: skip

    def _variables(self) -> dict[str, str]:
        # The tokens of this project's services are left out. All other variables pass, also keys such as HF_TOKEN:
        # an agent may need its keys.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("OSTINATO_")}
        if self.spec.path is not None:
            # The function is importable there as it is here.
            inherited["PYTHONPATH"] = os.pathsep.join(folder for folder in sys.path if folder)
        return inherited | {
            "PATH": search_path(),
            # HTTP clients would otherwise send the calls to a proxy that the environment names.
            "NO_PROXY": no_proxy_with_loopback("NO_PROXY"),
            "no_proxy": no_proxy_with_loopback("no_proxy"),
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_KEY": self.session.id,
            "OPENAI_MODEL": self.session.served.model_id,
            # A set of strings has the same order in each attempt.
            "PYTHONHASHSEED": "0",
        }

    async def _wait(self, process: Process) -> bool:
        """Waits until the process ends. False: the time is over, or the session has failed."""
        started = monotonic()
        # Not by `process.wait`, which also waits until every process that inherited the output has ended.
        while process.returncode is None:
            spent = monotonic() - started - self.session.seconds_waited
            if spent >= self.seconds or self.session.failure is not None:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    def _result(self, status: int | None, *, in_time: bool) -> tuple[AgentEnding, float | None]:
        """What the end of the process means."""
        posted = reward_of(self.session.reward)
        limit: AgentEnding | None = self.session.limit_reached if in_time else "time"
        if not in_time or (status != 0 and limit is not None):
            # A limit that acts again in each attempt is no failure. What was posted before it counts.
            assert limit is not None
            return limit, self._grade(posted)
        if status != 0:
            raise AgentFailed(f"the agent ended with status {status}: {self._shown(self._errors or self._output)}")
        printed = self._printed_reward()
        reward = posted if printed is None else printed
        if reward is None:
            raise AgentFailed(
                "the agent gave no reward: the last line of its output is no number and no JSON object with a "
                f"reward, and nothing was posted to OPENAI_BASE_URL/reward: {self._shown(self._output)}"
            )
        return limit or "agent", self._grade(reward)

    def _grade(self, reward: float | list[float] | None) -> float | None:
        try:
            return turn_grade(reward)
        except (TypeError, ValueError, OverflowError) as error:  # OverflowError: an int beyond the range of floats
            raise AgentFailed(f"the agent's reward cannot be used: {error}") from error

    def _printed_reward(self) -> float | list[float] | None:
        """The reward in the last line of the output."""
        lines = self._output.decode(errors="replace").rstrip().splitlines()
        if not lines:
            return None
        try:
            return reward_of(json.loads(lines[-1]))
        except (ValueError, RecursionError):
            return None

    @staticmethod
    def _shown(output: bytearray) -> str:
        """The end of an output, for an error."""
        text = output.decode(errors="replace").strip()
        return text[-SHOWN_OUTPUT:] or "it printed nothing"


async def _keep_end(stream: StreamReader, kept: bytearray) -> None:
    """Reads a stream to its end into `kept`, of which only the last MAX_OUTPUT bytes stay."""
    while chunk := await stream.read(MAX_OUTPUT):
        kept += chunk
        del kept[:-MAX_OUTPUT]


async def _kill_group(process: Process) -> None:
    """Kills the agent and all processes of its group."""
    # The process is the leader of its own session, so its id is that of the process group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    while process.returncode is None:
        await asyncio.sleep(POLL_SECONDS)
