"""The folder in which a reader tries the examples of a page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import workspace
from tests.docs.markdown import ROOT, all_blocks
from tests.fixtures.spawning import own_engines

MODELS = {
    ".ostinato/models/smollm2-135m-instruct": "tiny_folder",
    "models/SmolVLM-256M-Instruct": "vision_folder",
}
"""The models of the examples, and the fixtures of the tiny models that replace them."""
SECRETS = ("engine-token", ".engine-token")
"""Files that commands name and no page shows."""


@pytest.fixture
def open_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Path]]:
    """Makes the folder of a page the working directory: with the page's files, the models and the examples."""

    def open_folder(page: str) -> Path:
        (tmp_path / "examples").symlink_to(ROOT / "examples")
        for path, fixture in MODELS.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).symlink_to(request.getfixturevalue(fixture))
        for block in all_blocks():
            if block.page == page and block.file_name:
                (tmp_path / block.file_name).write_text(block.text)
        for name in SECRETS:
            (tmp_path / name).touch()
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    # a later test must not get the modules, the engines and the stores of this one
    with own_engines():
        yield open_folder
    workspace._open_store.cache_clear()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
