"""The name of a flow run: the one that a person gave it, or else the title of its config.

Prefect stores only the name itself, and not whether a person typed it. The server, the command line and the form each
make up a name where none is given, so a name that one of them may have made up does not count as given:

- The server and the command line make two words of the package coolname, `calm-otter`. The title replaces them.
- The form fills its field with a Greek letter and words from a long list, `beta4-vega-reach`. A person may type a name
  of this form, too (`beta-low`), so the title is added to it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import coolname
from coolname.loader import load_config
from prefect.runtime import flow_run

FORM_NAME = re.compile(
    r"(alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|"
    r"chi|psi|omega)\d{0,4}-[a-z-]+"
)
"""Names that the form of Prefect's UI makes up."""


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
