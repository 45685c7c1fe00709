"""Tests of docs/configs.md: it is up to date, and has every field of the forms with its description.

`ostinato config --markdown > docs/configs.md` writes the page.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, NamedTuple

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


class Cells(NamedTuple):
    """What the page says about a key."""

    default: str
    meaning: str


def text_of(token: Token) -> str:
    return "".join(child.content for child in token.children or ())


@cache
def sections_of_page() -> dict[str, dict[str, Cells]]:
    """Anchor of a section, as Markdown links have it -> key -> default and meaning, as a browser shows them."""
    sections: dict[str, dict[str, Cells]] = {}
    cells: list[Token] = []
    before = ""
    for token in MarkdownIt("commonmark", {}).enable("table").parse(PAGE.read_text()):
        if token.type == "inline" and before == "heading_open":
            keys = sections["#" + text_of(token).lower().replace(" ", "-")] = {}
        elif token.type == "inline" and token.content.startswith("As in ") and before == "paragraph_open":
            names = [child.content for child in token.children or () if child.type == "code_inline"]
            home = sections[home_of(token)]
            keys.update({name: home[name] for name in names})
        elif token.type == "tr_open":
            cells = []
        # the cells of a heading follow th_open
        elif token.type == "inline" and before == "td_open":
            cells.append(token)
        elif token.type == "tr_close" and len(cells) == 4:
            name, _, default, meaning = cells
            told = sections[home_of(meaning)][text_of(name)].meaning if is_reference(meaning) else text_of(meaning)
            keys[text_of(name)] = Cells(text_of(default), told)
        before = token.type
    return sections


@cache
def groups_of_page() -> dict[str, dict[str, Cells]]:
    """Class name -> key -> default and meaning. The class of a section is in its first paragraph."""
    classes = re.findall(r"^##+ (.+)\n\n.*Class: `(?:\w+\.)+(\w+)`\.$", PAGE.read_text(), flags=re.M)
    return {name: sections_of_page()["#" + title.lower().replace(" ", "-")] for title, name in classes}


def is_reference(token: Token) -> bool:
    """Whether the text says only in which earlier section the meaning of the key is."""
    return re.fullmatch(r"As in \[.+\]\(#.+\)\.", token.content) is not None


def home_of(token: Token) -> str:
    """The anchor of the section that a reference names."""
    (home,) = (child.attrs["href"] for child in token.children or () if child.type == "link_open")
    return str(home)


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
                assert keys[field].meaning == " ".join(body["description"].split()).replace("`", ""), (name, field)
            # in a form, a group may have another default, which means the same
            if isinstance(body.get("default"), bool | int | float | str) and field != "kind":
                assert keys[field].default == json.dumps(body["default"], ensure_ascii=False), (name, field)


def test_a_key_that_two_flows_share_is_written_once() -> None:
    assert PAGE.read_text().count("The same key resumes the run.") == 1
    # the anchors of both flows lead to it
    assert sections_of_page()["#flow-dpo"]["run"] == sections_of_page()["#flow-grpo"]["run"]
