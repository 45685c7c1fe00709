"""Texts of turns without a call of the chat template per conversation.

Most templates write the content of a message without looking at it. For them, what the template writes around the
contents depends on the roles only. It is computed once per sequence of roles, by applying the template to placeholders
in place of the contents. A placeholder notices when the template looks at it; such templates are applied to each
conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError, nodes

from engine.text.errors import TemplateNotPrefixStable, TemplateRefused
from engine.text.template import TurnText, turn_texts
from engine.text.tokenizers import Tokenizer
from engine.text.turns import Turn

MAX_SKELETONS = 256
"""Number of sequences of roles that are remembered."""

_PLACEHOLDER = re.compile("\ue000(r|s)([0-9]+)\ue001")
"""A content as it is (r) or without white space at its ends (s), by its turn."""
_ALLOWED_NODES: tuple[type[nodes.Node], ...] = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.CondExpr, nodes.Assign, nodes.NSRef,
    nodes.Name, nodes.Const, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Add, nodes.Mod, nodes.And, nodes.Or,
    nodes.Not, nodes.Keyword, nodes.ExprStmt,
)  # fmt: skip
"""What a template may consist of. Each of these calls a method of a placeholder that it looks at."""
_ALLOWED_TESTS = frozenset({"defined", "undefined", "none", "string", "mapping"})
_ALLOWED_FUNCTIONS = frozenset({"raise_exception", "namespace"})


class _Placeholder(str):
    """Stands for a content. It may be written, joined with other text, and stripped; everything else is noted."""

    reads: list[str]

    def __new__(cls, text: str, reads: list[str]) -> _Placeholder:
        placeholder = str.__new__(cls, text)
        placeholder.reads = reads
        return placeholder

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> _Placeholder:
        return _Placeholder("".join((self, other)), self.reads)

    def __radd__(self, other: str) -> _Placeholder:
        return _Placeholder("".join((other, self)), self.reads)

    def strip(self, chars: str | None = None, /) -> _Placeholder:  # type: ignore[override]
        match = re.fullmatch(_PLACEHOLDER, "".join((self, "")))
        if match is None or chars is not None:
            self.reads.append("strip")
            return self
        return _Placeholder(f"\ue000s{match[2]}\ue001", self.reads)


def _noted(name: str) -> Callable[..., Any]:
    def method(self: _Placeholder, *args: Any, **kwargs: Any) -> Any:
        self.reads.append(name)
        return getattr(str, name)(self, *args, **kwargs) if hasattr(str, name) else True

    return method


_NOT_READS = {
    "__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__init_subclass__", "__subclasshook__",
    "__doc__", "__getnewargs__",
}  # fmt: skip
for _name in {*dir(str), "__bool__", "__rmod__"} - vars(_Placeholder).keys() - _NOT_READS:
    setattr(_Placeholder, _name, _noted(_name))


def _is_traceable(template: Any, parse: Callable[[str], nodes.Template]) -> bool:
    """Whether every part of the template is such that a placeholder notices when it is looked at."""
    if not isinstance(template, str):
        return False
    try:
        tree = parse(template)
    except TemplateError:
        return False
    return all(_is_allowed(node) for node in [tree, *tree.find_all(nodes.Node)])


def _is_allowed(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Compare):
        # `content in "text"` reads the content without a call of its methods.
        return all(operand.op not in ("in", "notin") for operand in node.ops) or isinstance(node.expr, nodes.Const)
    if isinstance(node, nodes.Filter):
        return node.name == "trim" and not node.args and not node.kwargs
    if isinstance(node, nodes.Test):
        return node.name in _ALLOWED_TESTS
    if isinstance(node, nodes.Call):
        # {% generation %} of transformers writes its block as it is.
        if isinstance(node.node, nodes.ExtensionAttribute):
            return node.node.name == "_generation_support"
        return isinstance(node.node, nodes.Name) and node.node.name in _ALLOWED_FUNCTIONS
    if isinstance(node, nodes.CallBlock):
        return isinstance(node.call.node, nodes.ExtensionAttribute)
    return isinstance(node, (*_ALLOWED_NODES, nodes.Operand, nodes.ExtensionAttribute))


class Skeletons:
    """The texts of turns for one tokenizer. What its template writes is remembered for each sequence of roles."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The check for image tokens in a content needs each content.
        is_text_model = tokenizer.images is None
        self._is_traceable = is_text_model and _is_traceable(tokenizer.chat_template, tokenizer.parse_template)
        self._known: dict[tuple[str, ...], list[tuple[list[str], list[str]]] | None] = {}

    def turn_texts(self, turns: Sequence[Turn]) -> list[TurnText]:
        """Returns `engine.text.template.turn_texts`, and raises its errors."""
        contents = [turn.content for turn in turns if type(turn.content) is str]
        if not self._is_traceable or not turns or len(contents) != len(turns):
            return turn_texts(self._tokenizer, turns)
        roles = tuple(turn.role for turn in turns)
        if roles not in self._known:
            if len(self._known) >= MAX_SKELETONS:
                self._known.clear()
            self._known[roles] = self._skeleton(turns)
        skeleton = self._known[roles]
        if skeleton is None:
            return turn_texts(self._tokenizer, turns)
        return [TurnText(_filled(header, contents), _filled(body, contents)) for header, body in skeleton]

    def _skeleton(self, turns: Sequence[Turn]) -> list[tuple[list[str], list[str]]] | None:
        """Returns the header and the body of each turn, split at the placeholders. None if the template looks at a
        content or fails."""
        reads: list[str] = []
        placeholders = []
        for index, turn in enumerate(turns):
            placeholders.append(Turn(turn.role, _Placeholder(f"\ue000r{index}\ue001", reads)))
        try:
            texts = turn_texts(self._tokenizer, placeholders)
        except (TemplateRefused, TemplateNotPrefixStable):
            return None
        if reads:
            return None
        return [(_PLACEHOLDER.split(header), _PLACEHOLDER.split(body)) for header, body in texts]


def _filled(pieces: list[str], contents: Sequence[str]) -> str:
    """The text of `pieces`: text, then r or s, number of a turn, text, and so on."""
    filled = pieces[:1]
    for index in range(1, len(pieces), 3):
        content = contents[int(pieces[index + 1])]
        filled += [content if pieces[index] == "r" else content.strip(), pieces[index + 2]]
    return "".join(filled)
