"""The kinds of input of the fuzz campaigns: Arrow bodies of the wire, and files, replies and configs of others.

A case is bytes that depend only on (kind, seed, number). To use one is to do with it what a run would.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.errors import BadSpec, SampleTooLong
from tests.fuzz import mutations

WIRE_LIMIT_MIB = 256
"""Most memory of a decoded Arrow body here. Damaged headers announce any size, and that size may be allocated."""
IMPORTS_MIB = 250
"""Memory of the imports of a child that decodes bodies, and room for the allocators."""
HOSTILE_LIMIT_MIB = 1024


@dataclass(frozen=True)
class Input:
    """A kind of input."""

    case: Callable[[int, int], bytes]
    """(seed, number) -> the case."""
    use: Callable[[bytes, Path], object]
    """Uses a case. The folder is empty at first, and the only one in which files may be written."""
    refusals: tuple[type[BaseException], ...]
    """Errors with a sentence for the user. Any other error is a defect."""
    most_mib: int = HOSTILE_LIMIT_MIB
    """Most memory of a process that uses the cases."""
    cases_per_child: int = 1_000


HOSTILE = ("hub model", "hub dataset", "parquet", "stored answers", "verl config", "config", "judge", "reward server")
"""Kinds of what other programs and people give. Their modules are imported by the child that uses them."""
_MODULES = {"hub": "hub_replies", "parquet": "parquet_files", "stored": "parquet_files", "verl": "config_files"}
_MODULES |= {"config": "config_files", "judge": "judge_replies", "reward": "judge_replies"}


def input_of(kind: str) -> Input:
    """The input of this kind: one of HOSTILE, or a kind of body of tests.fuzz.mutations."""
    if kind in mutations.KINDS:
        decode = mutations.KINDS[kind][1]
        return Input(
            partial(mutations.case, kind), lambda data, folder: decode(data), (BadSpec, SampleTooLong),
            WIRE_LIMIT_MIB + IMPORTS_MIB, 20_000,
        )  # fmt: skip
    module = importlib.import_module(f"tests.fuzz.{_MODULES[kind.split()[0]]}")
    found: Input = module.INPUTS[kind]
    return found
