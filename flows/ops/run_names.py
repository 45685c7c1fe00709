"""The name of a flow run: the one that a person gave it, or else the title of its config. And the key of a run whose
config gives none: all attempts of one flow run get the same key.

Prefect stores only the name itself, and not whether a person typed it. The server, the command line and the form each
make up a name where none is given, so a name that one of them may have made up does not count as given:

- The server and the command line make two words of the package coolname, `calm-otter`. The title replaces them.
- The form fills its field with a Greek letter and words from a long list, `beta4-vega-reach`. A person may type a name
  of this form, too (`beta-low`), so the title is added to it.
"""

from __future__ import annotations

import os
import re
from datetime import UTC
from functools import cache
from pathlib import Path
from typing import Any

import coolname
from coolname.loader import load_config
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.runtime import flow_run

FORM_NAME = re.compile(
    r"(alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|"
    r"chi|psi|omega)\d{0,4}-[a-z-]+"
)
"""Names that the form of Prefect's UI makes up."""

ID_LETTERS = 8
EVALUATION_KEY_PREFIX = "evaluation-"
"""Start of the key of an evaluation. A digest of its inputs follows."""


def flow_run_title() -> str:
    """Returns the name of the current flow run. Prefect calls it at the start of every attempt."""
    config: Any = flow_run.parameters["config"]
    return title_unless_named(flow_run.name or "", config.title)


def title_unless_named(name: str, title: str) -> str:
    """Returns the name if a person gave it, the title if the server made it up, and both if the form may have.

    The result is unchanged by a second call, so a retry keeps it.
    """
    if not name or name == title or _is_made_by_server(name):
        return title
    if FORM_NAME.fullmatch(name):
        return f"{name}: {title}"
    return name


def _is_made_by_server(name: str) -> bool:
    words = name.split("-")
    return len(words) == 2 and _coolname_words().issuperset(words)


@cache
def _coolname_words() -> frozenset[str]:
    """All words that coolname combines."""
    lists: dict[str, dict[str, Any]] = load_config(Path(coolname.__file__).with_name("data"))
    words: set[str] = set()
    for body in lists.values():
        words.update(body.get("words", ()))
    return frozenset(words)


def current_run_key(flow_name: str) -> str:
    """Returns the key of the current flow run, or a random key outside a flow run."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    if flow_run is None:
        # outside Prefect, every call is a new run
        return f"{flow_name}-{os.urandom(ID_LETTERS // 2).hex()}"
    return run_key_of(flow_name, flow_run)


def run_key_of(flow_name: str, flow_run: FlowRun) -> str:
    """Returns the key of a flow run, made of values that Prefect keeps over retries.

    The key is `<flow>-<first 8 letters of the flow run's id>`. For a run that a schedule started it is
    `<flow>-<first 8 letters of the deployment's id>/<scheduled time, UTC>`.
    """
    scheduled_time = flow_run.expected_start_time
    if flow_run.auto_scheduled and scheduled_time is not None and flow_run.deployment_id is not None:
        # a schedule that fires twice for one time gets one run
        time_text = scheduled_time.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        return f"{flow_name}-{str(flow_run.deployment_id)[:ID_LETTERS]}/{time_text}"
    return f"{flow_name}-{str(flow_run.id)[:ID_LETTERS]}"


def expected_run_key(flow_name: str, flow_run: FlowRun) -> str:
    """Returns the key of the run that a flow run has or will have: that of its config, or else its own."""
    config = (flow_run.parameters or {}).get("config")
    configured = config.get("run") if isinstance(config, dict) else None
    return str(configured or run_key_of(flow_name, flow_run))
