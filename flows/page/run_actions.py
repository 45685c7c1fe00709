"""Cancels, retries, forks and verifies runs for the page. One lock per run: of two windows that act at once, the second
finds that the run has changed, and nothing happens twice."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor

from prefect.client.schemas.responses import SetStateStatus
from prefect.states import AwaitingRetry, Cancelling, State

from flows.page.run_data import RunReader, RunView
from flows.page.shared import Page, PageError
from flows.runs.code_version import code_version
from storage.chain.fork import ForkInfo, fork_run


class RunActions:
    """What the buttons of a run's page do."""

    def __init__(self, page: Page, reader: RunReader) -> None:
        self.page, self.reader = page, reader
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._verifying = threading.Lock()
        self._verifications: dict[str, tuple[subprocess.Popen[str], Future[tuple[str, str]]]] = {}
        self._reader = ThreadPoolExecutor(1)

    def cancel(self, name: str, seen: str) -> RunView:
        """Cancels the flow run as Prefect's UI does. `seen`: id of the state that the user saw. Raises PageError."""
        return self._set_state(name, seen, Cancelling(message="cancelled on Ostinato's page"), "cancelled")

    def retry(self, name: str, seen: str) -> RunView:
        """Schedules the flow run again: it continues after its last committed step. Raises PageError."""
        return self._set_state(name, seen, AwaitingRetry(message="retried on Ostinato's page"), "retried")

    def _set_state(self, name: str, seen: str, state: State, verb: str) -> RunView:
        key = self.reader.read(name, steps=False).key
        with self._locks[key]:
            view = self.reader.read(name, steps=False)
            flow_run = view.flow_run
            if flow_run is None or flow_run.state is None:
                what = f"Prefect at {self.page.settings.server} does not have the flow run of {key}: it was not {verb}."
                raise PageError(what, "In the terminal that runs it: Ctrl-C, and the same command continues it.", 409)
            if str(flow_run.state.id) != seen:
                what = f"Run {key} has changed since this page was shown: it is {view.state} now. It was not {verb}."
                raise PageError(what, "Look at the run again, and decide then.", 409)
            if not (view.can_cancel if state.is_cancelling() else view.can_retry):
                what = f"Run {key} is {view.state}, so it cannot be {verb}."
                raise PageError(what, "A run that was started in a terminal continues by the same command.", 409)
            with self.page.prefect() as client:
                result = client.set_flow_run_state(flow_run.id, state)
            # a run without a process is Cancelled at once, which the server reports as another state than was asked for
            is_cancelled = state.is_cancelling() and result.state is not None and result.state.is_cancelled()
            if result.status != SetStateStatus.ACCEPT and not is_cancelled:
                reason = getattr(result.details, "reason", None) or result.status.value
                raise PageError(f"Prefect refused: {reason}. Run {key} was not {verb}.", "Look at its state.", 409)
            return view

    def fork(self, run: str, new: str, step: int, stage: str) -> ForkInfo:
        """Creates a run that shares the history of `run` up to a step, as 'ostinato fork' does. Raises StorageError."""
        with self._locks[new]:
            return fork_run(self.page.store, run, new, step=step, stage=stage or None, code_version=code_version())

    def verify(self, run: str, *, whole: bool) -> None:
        """Starts 'ostinato verify' in a process of its own, because it loads a model. Raises PageError."""
        with self._verifying:
            if any(not output.done() for _, output in self._verifications.values()):
                raise PageError("Another verification is running.", "Wait until it has ended.", 409)
            command = [sys.executable, "-m", "flows.cli.main", "verify", "--storage", self.page.settings.storage]
            command += ["--json", *(() if whole else ("--sample", "1")), "--", run]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
            # a report is larger than a pipe, so the process ends only if it is read
            self._verifications[run] = process, self._reader.submit(process.communicate)

    def verification(self, run: str) -> list[str] | None:
        """The result of the run's verification in lines, [] while it goes on, and None if there was none."""
        if run not in self._verifications:
            return None
        output = self._verifications[run][1]
        return _verification_lines(*output.result()) if output.done() else []

    def close(self) -> None:
        """Ends what still runs."""
        for process, _ in self._verifications.values():
            process.kill()


def _verification_lines(output: str, errors: str) -> list[str]:
    """What 'ostinato verify --json' found, in words."""
    try:
        report = json.loads(output)
    except ValueError:
        return [f"The verification failed: {errors.strip()[-2000:] or 'it was ended'}"]
    lines = []
    for chain in report["chains"]:
        outcome = "differs" if chain["problems"] else "equal to the byte"
        lines.append(f"{chain['chain']}: {outcome}, {chain['redone']} of {chain['steps']} steps redone")
        lines += [f"{problem['what']} {problem['what_to_do']}" for problem in chain["problems"]]
    return lines
