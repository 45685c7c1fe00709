"""Tests of rendering by the model's own template: the token ids of the text, the trained tokens, and unchanged sampled
ids."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from engine.backends.torch.tiny import CHAT_TEMPLATE, byte_tokenizer
from engine.errors import (
    ChatTemplateMissing,
    TemplateNotPrefixStable,
    TemplateRefused,
    ThreadError,
    UnsupportedFragment,
)
from engine.text.fragments import ImageFragment, ReasoningFragment, TextFragment, ToolCallFragment
from engine.text.rendering import Renderer
from engine.text.threads import StringThread, TokenizedThread
from engine.text.tokenizers import Tokenizer

# SmolLM2's, word for word: it writes a system prompt of its own when there is none
SMOLLM_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# refuses a system turn alone, and folds it into the user's
FOLDING_TEMPLATE = (
    "{% if messages|length == 1 and messages[0]['role'] == 'system' %}{{ raise_exception('no user turn') }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'system' %}{% else %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# drops the reasoning of all but the last turn, as Qwen3's does
FORGETFUL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] and loop.last %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer with two merges: "ab" is one token, and so are two line breaks."""
    vocabulary = {t: i for i, t in enumerate(["<|pad|>", "<|im_start|>", "<|im_end|>"])}
    for token in [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "ĊĊ"]:
        vocabulary[token] = len(vocabulary)
    raw = RawTokenizer(BPE(vocab=vocabulary, merges=[("a", "b"), ("Ċ", "Ċ")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|pad|>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|pad|>")


def renderer_with(template: str | None, raw: PreTrainedTokenizerFast | None = None) -> Renderer:
    raw = raw or byte_tokenizer()
    raw.chat_template = template
    return Renderer(Tokenizer(raw, name="the-model", eos_token_ids=[raw.eos_token_id]))


@pytest.fixture(scope="module")
def chatml() -> Renderer:
    return renderer_with(CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def merging() -> Renderer:
    return renderer_with(CHAT_TEMPLATE, merging_tokenizer())


def trained_text(renderer: Renderer, tokenized: TokenizedThread) -> list[str]:
    """The runs of trained tokens, decoded."""
    runs: list[list[int]] = [[]]
    for token, weight in zip(tokenized.token_ids, tokenized.weights, strict=True):
        if weight > 0:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [renderer.tokenizer.decode(run, skip_special=False) for run in runs if run]


def turn_texts(renderer: Renderer, tokenized: TokenizedThread) -> list[str]:
    return [renderer.tokenizer.decode(turn.token_ids, skip_special=False) for turn in tokenized.turns]


THREADS = [
    StringThread().user("hi"),
    StringThread().system("Be brief.").user("hi").assistant("yo"),
    StringThread().user("a").assistant("b").user("c").assistant("d"),
    StringThread().user("日本 🎉\n\n").assistant("\n\nabab \n").tool("ab").assistant(""),
    StringThread().user("  ").assistant("\n").user("\nab"),
]
RENDERERS: dict[str, Callable[[], Renderer]] = {
    "chatml": lambda: renderer_with(CHAT_TEMPLATE),
    "smollm": lambda: renderer_with(SMOLLM_TEMPLATE),
    "merging": lambda: renderer_with(CHAT_TEMPLATE, merging_tokenizer()),
    "merging-smollm": lambda: renderer_with(SMOLLM_TEMPLATE, merging_tokenizer()),
    "folding": lambda: renderer_with(FOLDING_TEMPLATE),
    "no-end": lambda: renderer_with(NO_END_TEMPLATE),
}


@pytest.mark.parametrize("thread", THREADS, ids=range(len(THREADS)))
@pytest.mark.parametrize("make", RENDERERS.values(), ids=RENDERERS)
class TestEveryTemplate:
    def test_the_ids_are_those_of_the_whole_text(self, make, thread: StringThread) -> None:
        renderer = make()
        text = renderer.tokenizer.apply_chat_template(thread.messages(), generation_prompt=False)
        assert renderer.tokenize(thread).token_ids == renderer.tokenizer.encode(text)

    def test_text_comes_back_as_it_was(self, make, thread: StringThread) -> None:
        renderer, told = make(), thread.with_metadata({"n": 1})
        back = renderer.detokenize(renderer.tokenize(told))
        assert (back.turns, back.metadata) == (told.turns, told.metadata)

    def test_the_first_token_is_never_trained(self, make, thread: StringThread) -> None:
        tokens, weights = make().serialize(make().tokenize(thread))
        assert len(tokens) == len(weights) and weights[0] == 0

    def test_the_prompt_is_the_whole_text_and_the_header(self, make, thread: StringThread) -> None:
        renderer, prompt = make(), thread.user("?")
        text = renderer.tokenizer.apply_chat_template(prompt.messages(), generation_prompt=True)
        assert renderer.prompt_ids(prompt) == renderer.tokenizer.encode(text)
        opened = renderer.prompt(prompt)
        assert opened.token_ids == renderer.prompt_ids(prompt)
        assert renderer.prompt(renderer.tokenize(prompt)).token_ids == opened.token_ids
        assert set(opened.weights) == {0}


class TestWhatIsTrained:
    def test_content_and_end_of_turn_but_neither_header_nor_line_break(self, chatml: Renderer) -> None:
        thread = StringThread().system("s").user("u").assistant("first").user("v").assistant("second")
        assert trained_text(chatml, chatml.tokenize(thread)) == ["first<|im_end|>", "second<|im_end|>"]
        assert chatml.detokenize(chatml.tokenize(thread)) == thread

    def test_turns_of_weight_zero_are_not(self, chatml: Renderer) -> None:
        thread = StringThread().user("u").assistant("first").user("v").assistant("second")
        tokenized = chatml.tokenize(thread.with_weight_last_assistant_turn())
        assert trained_text(chatml, tokenized) == ["second<|im_end|>"]
        assert chatml.detokenize(tokenized) == thread.with_weight_last_assistant_turn()

    def test_the_weight_of_the_turn_is_the_weight_of_its_tokens(self, chatml: Renderer) -> None:
        thread = StringThread([("user", "u"), ("assistant", "ab")], weights=[0, 0.25])
        assert [w for w in chatml.tokenize(thread).weights if w] == [0.25] * 3

    def test_an_empty_answer_trains_its_end(self, chatml: Renderer) -> None:
        assert trained_text(chatml, chatml.tokenize(StringThread().user("u").assistant(""))) == ["<|im_end|>"]

    def test_a_prompt_trains_nothing(self, chatml: Renderer) -> None:
        assert set(chatml.tokenize(StringThread().system("s").user("u")).weights) == {0}

    def test_without_a_known_end_of_turn_the_white_space_after_is_left_out(self) -> None:
        renderer = renderer_with(NO_END_TEMPLATE)
        assert trained_text(renderer, renderer.tokenize(StringThread().user("u").assistant("yes"))) == ["yes"]

    def test_a_token_across_the_border_counts_as_content(self, merging: Renderer) -> None:
        # "assistant\n" + "\nx": the two line breaks are one token, the first piece of what the model has to say
        tokenized = merging.tokenize(StringThread().user("u").assistant("\nx"))
        assert trained_text(merging, tokenized) == ["\n\nx<|im_end|>"]

    def test_a_system_prompt_of_the_template_belongs_to_the_first_turn(self) -> None:
        renderer = renderer_with(SMOLLM_TEMPLATE)
        tokenized = renderer.tokenize(StringThread().user("u").assistant("x"))
        first, second = turn_texts(renderer, tokenized)
        assert first.startswith("<|im_start|>system\nYou are") and first.endswith("<|im_start|>user\nu<|im_end|>\n")
        assert second == "<|im_start|>assistant\nx<|im_end|>\n"
        assert trained_text(renderer, tokenized) == ["x<|im_end|>"]

    def test_a_system_turn_the_template_refuses_alone_counts_with_the_next(self) -> None:
        renderer = renderer_with(FOLDING_TEMPLATE)
        tokenized = renderer.tokenize(StringThread().system("s").user("u").assistant("x"))
        assert turn_texts(renderer, tokenized) == [
            "",
            "<|im_start|>user\ns\n\nu<|im_end|>\n",
            "<|im_start|>assistant\nx<|im_end|>\n",
        ]


class TestSampledTurns:
    ASKED = StringThread([("user", "u")], {"n": 1})

    def sampled(self, renderer: Renderer, *tokens: str) -> tuple[list[int], list[float]]:
        ids = [i for token in tokens for i in renderer.tokenizer.encode(token)]
        return ids, [-0.5 * (n + 1) for n in range(len(ids))]

    def test_ids_that_would_be_tokenised_otherwise_are_kept(self, merging: Renderer) -> None:
        ids, logprobs = self.sampled(merging, "a", "b", "<|im_end|>")
        assert merging.tokenizer.encode("ab<|im_end|>") != ids  # one token fewer: the trap this test is about
        done = merging.with_completion(merging.prompt(self.ASKED), ids, logprobs)
        assert done.token_ids == merging.prompt_ids(self.ASKED) + ids
        assert done.weights == [0.0] * len(merging.prompt_ids(self.ASKED)) + [1.0] * 3
        assert done.logprobs == logprobs
        assert done.len_last_turn() == 3
        assert merging.detokenize(done) == self.ASKED.assistant("ab")

    def test_earlier_answers_in_a_prompt_are_context(self, chatml: Renderer) -> None:
        prompt_thread = StringThread().user("u").assistant("old").user("v")
        ids, logprobs = self.sampled(chatml, "new<|im_end|>")
        for prompt in (chatml.prompt(prompt_thread), chatml.prompt(chatml.tokenize(prompt_thread))):
            done = chatml.with_completion(prompt, ids, logprobs)
            assert trained_text(chatml, done) == ["new<|im_end|>"]
            assert chatml.detokenize(done) == prompt_thread.assistant("new").with_weight_last_assistant_turn()

    def test_a_conversation_goes_on_after_sampled_ids(self, merging: Renderer) -> None:
        ids, logprobs = self.sampled(merging, "a", "b", "<|im_end|>")
        done = merging.with_completion(merging.prompt(self.ASKED), ids, logprobs)
        again = merging.prompt(merging.append(done, "user", "more"))
        assert again.token_ids == done.token_ids + merging.tokenizer.encode(
            "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
        )
        assert again.logprobs == logprobs
        twice = merging.with_completion(again, ids, logprobs)
        assert trained_text(merging, twice) == ["ab<|im_end|>", "ab<|im_end|>"]
        assert twice.logprobs == logprobs * 2
        assert merging.detokenize(twice) == self.ASKED.assistant("ab").user("more").assistant("ab")

    def test_an_answer_cut_short_is_closed_untrained(self, chatml: Renderer) -> None:
        ids, logprobs = self.sampled(chatml, "cut")
        done = chatml.with_completion(chatml.prompt(self.ASKED), ids, logprobs)
        more = chatml.append(done, "user", "more")
        assert chatml.tokenizer.decode(more.token_ids, skip_special=False) == (
            "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\ncut<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
        )
        assert trained_text(chatml, more) == ["cut"]

    def test_append_to_text_is_tokenize(self, chatml: Renderer) -> None:
        thread = StringThread().user("u").assistant("x")
        assert chatml.append(chatml.tokenize(self.ASKED), "assistant", "x").turns == chatml.tokenize(thread).turns

    def test_the_text_of_a_completion_has_no_specials(self, chatml: Renderer) -> None:
        decode, encode = chatml.decode_completion, chatml.tokenizer.encode
        assert decode(encode("héllo<|im_end|>")) == decode(encode("héllo")) == "héllo"
        assert decode(encode("a<|im_start|>b<|im_end|>")) == "ab"
        assert decode([]) == decode(encode("<|im_end|>")) == ""

    def test_a_bad_completion(self, chatml: Renderer) -> None:
        opened = chatml.prompt(self.ASKED)
        with pytest.raises(ThreadError, match="1 logprobs"):
            chatml.with_completion(opened, [5, 6], [-1.0])
        with pytest.raises(ThreadError, match="at least one id"):
            chatml.with_completion(opened, [], [])
        with pytest.raises(ThreadError, match="no open assistant turn"):
            chatml.with_completion(chatml.tokenize(self.ASKED), [5], [-1.0])
        with pytest.raises(ThreadError, match="no open assistant turn"):
            chatml.with_completion(chatml.with_completion(opened, [5], [-1.0]), [5], [-1.0])
        with pytest.raises(ThreadError, match="is open"):
            chatml.append(opened, "user", "x")
        assert chatml.prompt(opened) is opened


class TestRefusals:
    def test_no_template(self) -> None:
        with pytest.raises(ChatTemplateMissing, match="the-model"):
            renderer_with(None)

    def test_no_turns(self, chatml: Renderer) -> None:
        for call in (chatml.tokenize, chatml.prompt, chatml.prompt_ids):
            with pytest.raises(ThreadError, match="no turns"):
                call(StringThread())

    def test_nothing_to_answer(self, chatml: Renderer) -> None:
        thread = StringThread().user("u").assistant("x")
        for call in (chatml.prompt, chatml.prompt_ids):
            with pytest.raises(ThreadError, match="last turn is the assistant's"):
                call(thread)
        with pytest.raises(ThreadError, match="last turn is the assistant's"):
            chatml.prompt(chatml.tokenize(thread))

    def test_nothing_before_the_answer(self, chatml: Renderer) -> None:
        with pytest.raises(ThreadError, match="begins with the assistant"):
            chatml.tokenize(StringThread().assistant("x"))

    def test_a_template_that_forgets_is_named(self) -> None:
        renderer = renderer_with(FORGETFUL_TEMPLATE)
        thought = [ReasoningFragment(text="hmm"), TextFragment(text="x")]
        assert trained_text(renderer, renderer.tokenize(StringThread().user("u").assistant(thought))) == [
            "<think>hmm</think>x<|im_end|>"
        ]
        with pytest.raises(TemplateNotPrefixStable, match=r"the-model rewrites earlier text.*'<think>hmm"):
            renderer.tokenize(StringThread().user("u").assistant(thought).user("v"))

    def test_a_template_whose_prompt_is_not_what_it_trains(self) -> None:
        renderer = renderer_with(CHAT_TEMPLATE.replace("'<|im_start|>assistant\\n'", "'<|im_start|>model\\n'"))
        with pytest.raises(TemplateNotPrefixStable, match="adding turn 1"):
            renderer.tokenize(StringThread().user("u").assistant("x"))

    def test_a_template_that_raises_says_why(self) -> None:
        renderer = renderer_with("{{ raise_exception('roles must alternate') }}")
        with pytest.raises(TemplateRefused, match=r"the-model.*'user'.*roles must alternate"):
            renderer.prompt_ids(StringThread().user("u"))
        with pytest.raises(TemplateRefused):
            renderer.tokenize(StringThread().system("s"))

    @pytest.mark.parametrize(
        ("template", "error"),
        [
            ("{{ 10.0 ** 1000 }}", "OverflowError"),
            ("{{ 1 // 0 }}", "ZeroDivisionError"),
            ("{{ messages[0].content.encode('ascii') }}", "UnicodeEncodeError"),
            ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ],
    )
    def test_whatever_a_template_raises_is_named(self, template: str, error: str) -> None:
        with pytest.raises(TemplateRefused, match=f"the-model.*'user'.*{error}"):
            renderer_with(template).prompt_ids(StringThread().user("ü"))

    def test_what_the_template_would_lose(self, chatml: Renderer) -> None:
        call = StringThread().user("u").assistant([ToolCallFragment(id="1", name="zoom"), TextFragment(text="x")])
        thought = StringThread().user("u").assistant([ReasoningFragment(text="hmm"), TextFragment(text="x")])
        image = StringThread().user([ImageFragment(url="a.png")])
        for thread, what in ((call, "zoom"), (thought, "reasoning of turn 1"), (image, "image")):
            with pytest.raises(UnsupportedFragment, match=what):
                chatml.tokenize(thread)
        with pytest.raises(UnsupportedFragment, match="zoom"):
            chatml.prompt_ids(call.user("v"))
        with pytest.raises(UnsupportedFragment, match="image"):
            chatml.prompt_ids(image)
