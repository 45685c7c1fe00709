"""The tiny model is a folder that Hugging Face tools load, with equal bytes for equal seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.backends.torch.tiny import build_tiny_model
from storage.serialization import digest_file


def digests(folder: Path) -> dict[str, str]:
    return {path.name: digest_file(path)[0] for path in sorted(folder.iterdir())}


def test_equal_seeds_give_equal_bytes_and_other_seeds_other_weights(tmp_path: Path, tiny_folder: Path) -> None:
    again = digests(build_tiny_model(tmp_path / "again", seed=0))
    other = digests(build_tiny_model(tmp_path / "other", seed=1))
    assert again == digests(tiny_folder)
    assert {name for name in other if other[name] != again[name]} == {"model.safetensors"}


def test_the_random_state_is_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    build_tiny_model(tmp_path, seed=3, hidden=64, layers=1)
    assert torch.equal(before, torch.get_rng_state())


def test_it_loads_as_any_model_does(tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 3_000_000
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == len(tokenizer) == 259
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    logits = model(torch.tensor([tokenizer.encode("hello")])).logits
    assert logits.shape == (1, 5, 259) and logits.isfinite().all()


@pytest.mark.parametrize("text", ["", "héllo wörld", "日本語 🎉", "a\n\tb  c\r\n", "\0\x7f", " leading and trailing "])
def test_every_text_round_trips_one_token_per_byte(tiny_folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_template_marks_what_the_assistant_wrote(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == "yo<|im_end|>"


@pytest.mark.parametrize(("hidden", "layers"), [(100, 1), (32, 1), (64, 0)])
def test_impossible_sizes_are_refused(tmp_path: Path, hidden: int, layers: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        build_tiny_model(tmp_path, seed=0, hidden=hidden, layers=layers)
