"""The message of a cancelled flow run: how many steps are committed, and how the run goes on.

For a flow run of a worker, Prefect's runner sets the state Cancelled with a message of its own, after all hooks. The
hook therefore starts this module as a process that waits for that state and then gives it our message:

    python -m flows.ops.cancellation FLOW_RUN_ID MESSAGE
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Literal
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelled

from storage.chain.listing import committed_steps
from storage.store.objects import ObjectStore

NEXT_ACTION = {"deployed": "Retry", "terminal": "The same command"}
"""What continues a cancelled run, by where it was started."""
WAIT_SECONDS = 60.0
"""How long the process waits for the state of the runner."""
POLL_SECONDS = 0.2


def cancellation_message(store: ObjectStore, run: str, started: Literal["deployed", "terminal"]) -> str:
    """Returns the message of a cancelled run."""
    steps = sum(committed_steps(store, run).values())
    if steps == 0:
        return f"cancelled; no step is committed. {NEXT_ACTION[started]} begins the run again"
    count = "1 step is" if steps == 1 else f"{steps} steps are"
    return f"cancelled; {count} committed. {NEXT_ACTION[started]} continues after them"


def start_message_process(flow_run: UUID, message: str) -> None:
    """Starts the process that gives the flow run its message once the runner has set the state Cancelled.

    The process outlives this one, and holds none of its pipes."""
    subprocess.Popen(
        [sys.executable, "-m", __name__, str(flow_run), message],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def set_message_when_cancelled(flow_run: UUID, message: str, *, seconds: float = WAIT_SECONDS) -> bool:
    """Waits until the flow run is Cancelled and sets the message of the state. Returns whether it was set.

    A run that goes on, or that does not become Cancelled within `seconds`, is left unchanged."""
    deadline = time.monotonic() + seconds
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            state = client.read_flow_run(flow_run).state
            if state is not None and state.type == StateType.CANCELLED:
                client.set_flow_run_state(flow_run, Cancelled(message=message), force=True)
                return True
            if state is None or state.type != StateType.CANCELLING:
                return False
            time.sleep(POLL_SECONDS)
    return False


if __name__ == "__main__":
    set_message_when_cancelled(UUID(sys.argv[1]), sys.argv[2])
