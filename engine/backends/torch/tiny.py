"""A tiny model of a real architecture, built offline in under a second, for tests and the demo.

It has random weights, a byte-level tokenizer (every UTF-8 text decodes to itself) and a ChatML template. Equal seeds
give equal bytes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
HEAD_SIZE = 32
CONTEXT_TOKENS = 4096

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tiny_model(folder: Path, *, seed: int, hidden: int = 128, layers: int = 4) -> Path:
    """Writes a plain Hugging Face folder (Llama, about a million float32 parameters by default) and returns it.

    `hidden` must be a multiple of 64: pairs of query heads of size 32 share a key-value head. The global random state
    does not change. Raises ValueError for another `hidden`, or without layers.
    """
    if hidden < 2 * HEAD_SIZE or hidden % (2 * HEAD_SIZE) or layers < 1:
        raise ValueError(
            f"hidden={hidden}, layers={layers} was given; give a hidden that is a multiple of {2 * HEAD_SIZE}, and at "
            "least one layer"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE // 2,
        head_dim=HEAD_SIZE,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,  # as SmolLM2 does
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    # Draw the weights without a change of the global random state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with three special tokens, then one id per byte: 259 ids, no merges. Any text decodes to itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, START, END, *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = [AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)]
    tokenizer.add_special_tokens(special_tokens)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
