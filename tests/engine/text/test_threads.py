"""Threads in text: immutable, checked, equal after JSON."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import PermanentEngineError, ThreadError
from engine.text.fragments import (
    ImageFragment,
    ReasoningFragment,
    TextFragment,
    ToolCallFragment,
    ToolResponseFragment,
)
from engine.text.threads import StringThread, TokenizedThread, TokenizedTurn
from storage.serialization import Frozen

ASKED = StringThread(turns=[("system", "Be brief."), ("user", "2+3?")], metadata={"answer": "5", "tags": ["sum"]})
TALK = ASKED.assistant("5").user("and 1?").assistant("6")


class TestAppending:
    def test_a_new_thread_is_returned_and_the_old_one_stays(self) -> None:
        longer = ASKED.assistant("5")
        assert [turn.role for turn in ASKED.turns] == ["system", "user"]
        assert longer.get_turns() == [("system", "Be brief."), ("user", "2+3?"), ("assistant", "5")]
        assert longer.metadata == ASKED.metadata

    def test_every_role(self) -> None:
        thread = StringThread().system("s").user("u").assistant("a").tool("t")
        assert [tuple(turn) for turn in thread.turns] == [
            ("system", "s"),
            ("user", "u"),
            ("assistant", "a"),
            ("tool", "t"),
        ]

    def test_fields_cannot_be_set(self) -> None:
        with pytest.raises(ValidationError):
            ASKED.turns = ()  # type: ignore[misc]

    def test_threads_share_no_metadata(self) -> None:
        metadata = {"a": [1]}
        first = StringThread([("user", "x")], metadata)
        second = first.assistant("y")
        metadata["a"].append(2)
        second.metadata["a"].append(3)  # type: ignore[union-attr]
        assert first.metadata == {"a": [1]}

    def test_with_metadata(self) -> None:
        assert TALK.with_metadata({"n": 1}).metadata == {"n": 1}
        assert TALK.with_metadata({"n": 1}).turns == TALK.turns


class TestReading:
    def test_last_content_and_completion(self) -> None:
        assert ASKED.last_content() == "2+3?" and ASKED.completion() is None
        assert TALK.last_content() == TALK.completion() == "6"
        assert StringThread().completion() is None

    def test_the_last_content_of_nothing(self) -> None:
        with pytest.raises(ThreadError, match="no turns"):
            StringThread().last_content()

    def test_messages_are_what_templates_take(self) -> None:
        assert ASKED.messages() == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]

    def test_equality_is_by_value(self) -> None:
        assert StringThread([("user", "x")]) == StringThread([["user", "x"]]) == StringThread().user("x")
        assert StringThread([("user", "x")]) != StringThread([("user", "x")], {"a": 1})


class TestWeights:
    def test_by_default_every_assistant_turn_is_trained_and_nothing_else(self) -> None:
        assert TALK.get_turn_weights() == [0, 0, 1, 0, 1]
        assert TALK.tool("t").get_turn_weights() == [0, 0, 1, 0, 1, 0]

    def test_all_last_and_from_index(self) -> None:
        assert TALK.with_weight_last_assistant_turn().get_turn_weights() == [0, 0, 0, 0, 1]
        assert TALK.with_weight_last_assistant_turn().with_weight_all_assistant_turns() == TALK
        assert TALK.with_weight_assistant_turns_from_index(2).get_turn_weights() == [0, 0, 1, 0, 1]
        assert TALK.with_weight_assistant_turns_from_index(3).get_turn_weights() == [0, 0, 0, 0, 1]
        assert TALK.with_weight_assistant_turns_from_index(5).get_turn_weights() == [0, 0, 0, 0, 0]

    def test_the_last_assistant_turn_need_not_be_the_last_turn(self) -> None:
        assert TALK.user("thanks").with_weight_last_assistant_turn().get_turn_weights() == [0, 0, 0, 0, 1, 0]

    def test_weights_set_before_an_append_stay_with_their_turns(self) -> None:
        longer = TALK.with_weight_last_assistant_turn().user("x").assistant("y")
        assert longer.get_turn_weights() == [0, 0, 0, 0, 1, 0, 1]

    def test_given_weights(self) -> None:
        assert StringThread(TALK.turns, weights=[0, 0, 0.5, 0, 0]).get_turn_weights() == [0, 0, 0.5, 0, 0]

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ([1.0], "for 5 turns"),
            ([0, 0, -1, 0, 0], "turn 2"),
            ([0, 0, float("nan"), 0, 0], "turn 2"),
            ([0, 0, True, 0, 0], "turn 2"),
            ([0, 0, "1", 0, 0], "turn 2"),
            ([0, 1, 0, 0, 0], r"turn 1 \(user\)"),
            (1.0, "for 5 turns"),
        ],
    )
    def test_bad_weights(self, weights: Any, message: str) -> None:
        with pytest.raises(ThreadError, match=message):
            StringThread(TALK.turns, weights=weights)

    def test_nothing_to_train(self) -> None:
        with pytest.raises(ThreadError, match="assistant turn to train"):
            ASKED.with_weight_last_assistant_turn()
        with pytest.raises(ThreadError, match="0 or more"):
            TALK.with_weight_assistant_turns_from_index(-1)


FRAGMENTS = (
    StringThread()
    .user([TextFragment(text="What is "), ImageFragment(url="https://example.org/a.png"), TextFragment(text="?")])
    .assistant(
        [
            ReasoningFragment(text="I look."),
            TextFragment(text="A "),
            TextFragment(text="cat."),
            ToolCallFragment(id="c1", name="zoom", arguments={"x": 2}),
        ]
    )
    .tool([ToolResponseFragment(id="c1", text="whiskers", name="zoom"), ToolResponseFragment(id="c2", text="tail")])
)


class TestFragments:
    def test_text_leaves_reasoning_and_calls_out(self) -> None:
        assert [turn.text for turn in FRAGMENTS.turns] == ["What is ?", "A cat.", "whiskerstail"]

    def test_messages(self) -> None:
        assert FRAGMENTS.messages() == [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is "},
                    {"type": "image", "url": "https://example.org/a.png"},
                    {"type": "text", "text": "?"},
                ],
            },
            {
                "role": "assistant",
                "content": "A cat.",
                "reasoning_content": "I look.",
                "tool_calls": [{"type": "function", "id": "c1", "function": {"name": "zoom", "arguments": {"x": 2}}}],
            },
            {"role": "tool", "content": "whiskers", "tool_call_id": "c1", "name": "zoom"},
            {"role": "tool", "content": "tail", "tool_call_id": "c2"},
        ]

    def test_dictionaries_are_fragments_too(self) -> None:
        assert StringThread().user([{"kind": "text", "text": "x"}]) == StringThread().user([TextFragment(text="x")])

    @pytest.mark.parametrize(
        ("role", "fragment"),
        [
            ("user", ReasoningFragment(text="x")),
            ("user", ToolCallFragment(id="1", name="f")),
            ("assistant", ToolResponseFragment(id="1", text="x")),
            ("system", ImageFragment(url="x")),
        ],
    )
    def test_a_fragment_in_the_wrong_role(self, role: str, fragment: Frozen) -> None:
        with pytest.raises(ThreadError, match="expected it in a turn of"):
            StringThread([(role, [fragment])])


class TestJson:
    @pytest.mark.parametrize(
        "thread",
        [StringThread(), ASKED, TALK, TALK.with_weight_last_assistant_turn(), FRAGMENTS, StringThread().user('🎉 \n"')],
    )
    def test_round_trip(self, thread: StringThread) -> None:
        assert StringThread.from_json(thread.to_json()) == thread
        assert "\n" not in thread.to_json()
        assert pickle.loads(pickle.dumps(thread)) == thread

    def test_equal_threads_give_equal_bytes(self) -> None:
        first = StringThread([("user", "x")], {"a": 1, "b": 2})
        second = StringThread([("user", "x")], {"b": 2, "a": 1}).with_weight_all_assistant_turns()
        assert first.to_json() == second.to_json()

    def test_it_is_plain(self) -> None:
        assert StringThread().user("é").to_json() == (
            '{"metadata":{},"turns":[{"content":"é","role":"user"}],"weights":null}'
        )

    def test_a_thread_is_a_field_of_other_models(self) -> None:
        class Holder(Frozen):
            threads: tuple[StringThread, ...]

        holder = Holder(threads=(TALK.with_weight_last_assistant_turn(), FRAGMENTS))
        assert Holder.model_validate_json(holder.model_dump_json()) == holder

    @pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"turns": [], "extra": 1}', '{"metadata": {}}', b"\xff"])
    def test_bad_json(self, text: str | bytes) -> None:
        with pytest.raises(ThreadError):
            StringThread.from_json(text)


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([("bot", "x")], "'bot'; expected one of system, user, assistant, tool"),
        ([("user", "x"), ("User", "x")], "turn 1"),
        ([(["user"], "x")], "role of turn 0"),
        ([("user", None)], "content of turn 0"),
        ([("user", 3)], "content of turn 0"),
        ([("user", b"x")], "content of turn 0"),
        ([("user", [])], "at least one fragment"),
        ([("user", ["x"])], "fragment 0"),
        ([("user", [{"kind": "video"}])], "fragment 0"),
        ([("user", "\ud800")], "surrogate"),
        ([("assistant", [ReasoningFragment(text="\ud800")])], "surrogate"),
        ([("user",)], "turn 0"),
        (["user"], "turn 0"),
        ([{"role": "user", "content": "x", "name": "y"}], "turn 0"),
        ("user", "expected a list"),
        ({"user": "x"}, "expected a list"),
        (None, "expected a list"),
    ],
    ids=str,
)
def test_what_is_no_conversation(turns: Any, message: str) -> None:
    with pytest.raises(ThreadError, match=message) as raised:
        StringThread(turns=turns)
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, PermanentEngineError)


@pytest.mark.parametrize("metadata", [{1: "a"}, {"a": (1,)}, {"a": {1}}, {"a": float("nan")}, {"a": "\ud800"}, [1]])
def test_metadata_json_cannot_say(metadata: Any) -> None:
    with pytest.raises(ThreadError, match="metadata"):
        StringThread([("user", "x")], metadata)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(ValidationError, match="extra_forbidden"):
        StringThread([("user", "x")], weight=1)  # type: ignore[arg-type]


class TestTokenized:
    PROMPT = TokenizedTurn("user", (1, 5, 2), (0.0, 0.0, 0.0), content="x")
    SAMPLED = TokenizedTurn("assistant", (1, 7, 8, 9, 2), (0.0, 0.0, 1.0, 1.0, 1.0), header=2, logprobs=(-1, -2, -3))

    def test_flat_views(self) -> None:
        thread = TokenizedThread((self.PROMPT, self.SAMPLED))
        assert len(thread) == 8
        assert thread.token_ids == [1, 5, 2, 1, 7, 8, 9, 2]
        assert thread.weights == [0, 0, 0, 0, 0, 1, 1, 1]
        assert thread.logprobs == [-1, -2, -3]
        assert thread.len_last_turn() == 3

    def test_logprobs_are_those_of_trained_tokens(self) -> None:
        part = TokenizedTurn("assistant", (1, 7, 8, 9), (0.0, 1.0, 0.0, 1.0), header=1, logprobs=(-1, -2, -3))
        assert TokenizedThread((self.PROMPT, part)).logprobs == [-1, -3]

    def test_a_trained_turn_that_was_not_sampled_has_none(self) -> None:
        text = TokenizedTurn("assistant", (1, 7), (0.0, 1.0), header=1, content="x")
        with pytest.raises(ThreadError, match="turn 1"):
            _ = TokenizedThread((self.PROMPT, text)).logprobs

    def test_lengths_must_agree(self) -> None:
        with pytest.raises(ThreadError, match="one weight each"):
            TokenizedTurn("user", (1, 2), (0.0,))
        with pytest.raises(ThreadError, match="give one each"):
            TokenizedTurn("assistant", (1, 2, 3), (0.0, 1.0, 1.0), header=1, logprobs=(-1.0,))

    def test_the_last_turn_of_nothing(self) -> None:
        with pytest.raises(ThreadError, match="no turn"):
            TokenizedThread(()).len_last_turn()
