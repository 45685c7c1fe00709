"""The site of the docs: it builds without a broken link or reference, and names the classes that a recipe imports."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from engine.handles import ModelBuilder
from flows.dpo import DPO
from flows.grpo import GRPO
from tasks.graders.judges import BinaryJudgeGrader
from tests.docs.markdown import ROOT

pytest.importorskip("mkdocs")  # the environment of vLLM has none

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from mkdocs.structure.pages import Page

DOCUMENTED = {
    ModelBuilder.with_adapter: "models", GRPO: "training", DPO: "training", BinaryJudgeGrader: "graders",
}  # fmt: skip
"""Objects, and the page of the reference that describes them."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in strict mode: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


def test_the_reference_shows_the_arguments(site: Path) -> None:
    for documented, page in DOCUMENTED.items():
        text = (site / "reference" / f"{page}.html").read_text()
        assert f'id="{documented.__module__}.{documented.__qualname__}"' in text
        if inspect.isfunction(documented):
            assert all(name in text for name in inspect.signature(documented).parameters)


def test_the_files_that_a_page_links_to_are_in_the_site(site: Path) -> None:
    assert 'href="examples/automations/notify.yaml"' in (site / "operations.html").read_text()
    assert (site / "examples/automations/notify.yaml").is_file()
    assert 'href="recipes.html"' in (site / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["[gone](gone.md)", "[gone](recipes.md#gone)", "[gone][flows.gone]", "::: flows.recipe.gone"]
)
def test_a_broken_reference_is_an_error(line: str, tmp_path: Path) -> None:
    def add_line(markdown: str, page: Page, **_: object) -> str:
        return f"{markdown}\n\n{line}\n" if page.file.src_uri == "glossary.md" else markdown

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    config.plugins._register_event("page_markdown", add_line, plugin_name="add_line")
    with pytest.raises(Abort):
        build(config)
