"""Faults for servers of the pool tests: vLLM's workers import this as their extension."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.backends.vllm.extension import Extension

FOLDER_ENV, SERVER_ENV = "OSTINATO_TEST_FAULTS", "OSTINATO_TEST_SERVER"


class Planted(Extension):
    """Does what it should unless a file in the folder of faults, of the server's name, says otherwise."""

    def ostinato_apply(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        if _planted(".broken"):
            raise RuntimeError("no room")
        if not _planted(""):
            super().ostinato_apply(tensors)
            return
        for _ in tensors:  # received whole, and never applied
            pass

    def _settled(self) -> bool:
        return super()._settled() and not _planted(".broken")

    def ostinato_check_and_spoil(self) -> Any:
        """Changes one live value, as a reload by somebody else would."""
        self.model_runner.get_model().model.norm.weight.data[0] += 1
        return {}


def _planted(kind: str) -> bool:
    return Path(os.environ[FOLDER_ENV], os.environ[SERVER_ENV] + kind).exists()
