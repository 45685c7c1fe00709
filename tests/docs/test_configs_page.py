"""Tests of docs/configs.md: it is up to date, and has every field of the forms with its description.

`ostinato config --markdown > docs/configs.md` writes the page.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from typer.testing import CliRunner

from flows.cli.config import CONFIGS
from flows.cli.main import app
from flows.configs.forms import FURTHER
from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "configs.md"


def test_the_page_is_up_to_date() -> None:
    printed = CliRunner().invoke(app, ["config", "--markdown"])
    assert PAGE.read_text() == printed.stdout, "stale: run ostinato config --markdown > docs/configs.md"


def text_of(token: Token) -> str:
    return "".join(child.content for child in token.children or ())


@cache
def groups_of_page() -> dict[str, dict[str, str]]:
    """Class name -> key -> meaning, as a browser shows them."""
    groups: dict[str, dict[str, str]] = {}
    cells: list[str] = []
    before = ""
    for token in MarkdownIt("commonmark", {}).enable("table").parse(PAGE.read_text()):
        if token.type == "inline" and "Class: " in token.content:
            keys = groups[token.content.rpartition("`.")[0].rpartition(".")[2]] = {}
        elif token.type == "tr_open":
            cells = []
        # the cells of a heading follow th_open
        elif token.type == "inline" and before == "td_open":
            cells.append(text_of(token))
        elif token.type == "tr_close" and len(cells) == 4:
            keys[cells[0]] = cells[3]
        before = token.type
    return groups


def fields_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The fields of a group of a form, also those that it folds."""
    fields = dict(schema["properties"])
    folded = fields.pop(FURTHER, None)
    return fields | folded["anyOf"][0]["properties"] if folded else fields


@pytest.mark.parametrize("flow", CONFIGS)
def test_every_field_of_a_form_is_on_the_page(flow: str) -> None:
    config = CONFIGS[flow]
    schema = config.model_json_schema()
    groups = {**schema.get("$defs", {}), config.__name__: schema}
    records = {name: group for name, group in groups.items() if "properties" in group}
    assert len(records) > 5
    for name, group in records.items():
        fields = fields_of(group)
        keys = groups_of_page()[name]
        assert keys.keys() == fields.keys(), name
        for field, body in fields.items():
            # a group in a form may have the description of its class
            if "description" in body and field != "kind":
                assert keys[field] == " ".join(body["description"].split()).replace("`", ""), (name, field)
