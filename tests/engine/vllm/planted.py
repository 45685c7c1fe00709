"""Faults for replicas of the pool tests: vLLM's workers import this as their extension."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.backends.vllm.extension import Extension
from engine.backends.vllm.replica_actor import REPLICA_ENV

PLANTED = f"{__name__}.Planted"
FOLDER_ENV = "OSTINATO_TEST_FAULTS"
"""Set before Ray starts: its workers inherit the environment."""


class Planted(Extension):
    """Does what it should unless a file in the folder of faults, of the replica's name, says otherwise."""

    def ostinato_apply(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        if _planted(".broken"):
            raise RuntimeError("no room")
        if not _planted(""):
            super().ostinato_apply(tensors)
            return
        for _ in tensors:  # received whole, and never applied
            pass

    def _finish_reload(self) -> bool:
        return super()._finish_reload() and not _planted(".broken")

    def ostinato_check_and_spoil(self) -> Any:
        """Changes one live value, as a reload by somebody else would."""
        self.model_runner.get_model().model.norm.weight.data[0] += 1
        return {}


def _planted(kind: str) -> bool:
    return Path(os.environ[FOLDER_ENV], os.environ[REPLICA_ENV] + kind).exists()
