"""Tests that texts of turns from remembered skeletons are those that the template makes of each conversation."""

from __future__ import annotations

import random

import pytest

from engine.backends.torch.tiny import CHAT_TEMPLATE, byte_tokenizer
from engine.text import skeletons
from engine.text.errors import TemplateNotPrefixStable, TemplateRefused
from engine.text.skeletons import Skeletons
from engine.text.template import turn_texts
from engine.text.tokenizers import Tokenizer
from engine.text.turns import Turn
from tests.engine.text.test_rendering import FOLDING_TEMPLATE, FORGETFUL_TEMPLATE, NO_END_TEMPLATE, SMOLLM_TEMPLATE

END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN2 = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{%- endif %}{%- for message in messages %}"
    "{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) or (message.role == 'assistant' "
    "and not message.tool_calls) %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'tool' %}{{- '<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def looking(expression: str) -> str:
    """A template that writes `expression` of each content `c`."""
    start = "{% for m in messages %}{% set c = m['content'] %}<|im_start|>{{ m['role'] }}\n"
    return start + expression + "<|im_end|>{% endfor %}" + END


OPAQUE = {
    "chatml": CHAT_TEMPLATE,
    "smollm": SMOLLM_TEMPLATE,
    "no-end": NO_END_TEMPLATE,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
    "twice": looking("{{ c }}{{ c | trim }}"),
    "left out": looking("{% if m['role'] == 'user' %}{{ c }}{% endif %}"),
    "is string": looking("{% if c is string and c is defined %}{{ c }}{% endif %}"),
}
OTHERS = {
    "folding": FOLDING_TEMPLATE,
    "forgetful": FORGETFUL_TEMPLATE,
    "equal": looking("{% if c == 'a' %}A{% else %}{{ c }}{% endif %}"),
    "equal from the left": looking("{% if 'a' == c %}A{% else %}{{ c }}{% endif %}"),
    "contains": looking("{% if 'a' in c %}A{% else %}{{ c }}{% endif %}"),
    "contained": looking("{% if c in 'abc' %}A{% else %}{{ c }}{% endif %}"),
    "in a list": looking("{% if c in ['a'] %}A{% else %}{{ c }}{% endif %}"),
    "truth": looking("{% if c %}{{ c }}{% else %}nothing{% endif %}"),
    "not": looking("{% if not c %}nothing{% endif %}{{ c }}"),
    "length": looking("{{ c | length }}{{ c }}"),
    "part": looking("{{ c[:1] }}"),
    "method": looking("{{ c.split('a')[0] }}"),
    "upper": looking("{{ c | upper }}"),
    "json": looking("{{ c | tojson }}"),
    "joined text is read": looking("{% set d = 'x' + c %}{% if d == 'xa' %}A{% endif %}{{ c }}"),
    "joined text is stripped": looking("{{ (' ' + c + ' ') | trim }}"),
    "written text is read": looking("{% set d = c ~ '' %}{% if d == 'a' %}A{% endif %}{{ c }}"),
    "block is read": looking("{% set d %}{{ c }}{% endset %}{% if d == 'a' %}A{% endif %}{{ c }}"),
    "macro": looking("{% macro w(d) %}{{ d }}{% endmacro %}{% if w(c) == 'a' %}A{% endif %}{{ c }}"),
    "format": looking("{{ '%s.' % c }}"),
    "first": looking("{{ (c | trim)[0:1] }}"),
    "key": looking("{{ {'a': 1}[c] }}{{ c }}"),
    "drops a turn": "{% for m in messages[-1:] %}{{ m['content'] }}<|im_end|>{% endfor %}" + END,
}
CONTENTS = ["a", "", " a ", "\n", "abc", "xa", "日本 🎉", "<|im_end|>", "\ue000r0\ue001", "{{ c }}", "long " * 50]


def tokenizer_with(template: str) -> Tokenizer:
    raw = byte_tokenizer()
    raw.chat_template = template
    raw.bos_token = "<|im_start|>"
    return Tokenizer(raw, name="the-model", eos_token_ids=[raw.eos_token_id])


def conversations(count: int) -> list[list[Turn]]:
    source, made = random.Random(3), []
    for _ in range(count):
        roles = [*source.choice([[], ["system"]]), "user", "assistant", "user", "tool", "assistant"]
        roles = roles[: source.randrange(1, len(roles) + 1)]
        made.append([Turn(role, source.choice(CONTENTS)) for role in roles])  # type: ignore[arg-type]
    return made


def outcome(function: object, *arguments: object) -> object:
    try:
        return function(*arguments)  # type: ignore[operator]
    except (TemplateNotPrefixStable, TemplateRefused) as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", [*OPAQUE, *OTHERS])
def test_the_texts_are_those_of_the_plain_way(name: str) -> None:
    tokenizer = tokenizer_with((OPAQUE | OTHERS)[name])
    remembered = Skeletons(tokenizer)
    for turns in conversations(60):
        assert outcome(remembered.turn_texts, turns) == outcome(turn_texts, tokenizer, turns)


@pytest.mark.parametrize("name", OPAQUE)
def test_the_template_is_applied_once_per_sequence_of_roles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remembered = Skeletons(tokenizer_with(OPAQUE[name]))
    remembered.turn_texts([Turn("user", "a"), Turn("assistant", "b")])

    def refuse(*_: object) -> None:
        raise AssertionError("the template was applied again")

    monkeypatch.setattr(skeletons, "turn_texts", refuse)
    assert len(remembered.turn_texts([Turn("user", "c"), Turn("assistant", " d ")])) == 2


def test_the_number_of_skeletons_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skeletons, "MAX_SKELETONS", 3)
    remembered = Skeletons(tokenizer_with(CHAT_TEMPLATE))
    for length in range(1, 9):
        remembered.turn_texts([Turn("user", "a")] * length)
        assert len(remembered._known) <= 3
