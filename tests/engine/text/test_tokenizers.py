"""Loading tokenizers: from a folder or a store, offline, without torch, and with errors that say what is missing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ChatTemplateMissing, TokenizerMissing
from engine.text.rendering import Renderer
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.text.tokenizers import load_tokenizer
from storage.registry.models import publish_model
from storage.store.artifacts import Provenance
from storage.store.objects import open_store

PROVENANCE = Provenance(code_version="test", config_digest="0", seed=0)


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's folder to break."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def test_a_tokenizer_encodes_what_is_there_and_no_more(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    assert tokenizer.vocab_size == 259
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [1, 2]
    assert tokenizer.decode(tokenizer.encode("hé<|im_end|>"), skip_special=True) == "hé"
    assert tokenizer.decode(tokenizer.encode("hé<|im_end|>"), skip_special=False) == "hé<|im_end|>"


def test_generation_config_adds_ids_that_end_a_turn(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_tokenizer(folder).eos_token_ids == (2, 7)
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder).eos_token_ids == (2,)


@pytest.mark.parametrize("nested", [False, True])
def test_without_a_generation_config_the_models_config_adds_ids(folder: Path, nested: bool) -> None:
    """As transformers does: the generation config has precedence over the config, also over that inside it."""
    config = json.loads((folder / "config.json").read_text())
    if nested:
        config = config | {"eos_token_id": None, "text_config": {"eos_token_id": [7, 2]}}
    else:
        config = config | {"eos_token_id": 7}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder).eos_token_ids == (2, 7)


def test_the_token_that_the_template_writes_after_an_answer_ends_a_turn(folder: Path) -> None:
    """A base model whose tokenizer and configs name <|pad|>, and whose template is ChatML."""
    for name, key, value in [
        ("tokenizer_config.json", "eos_token", "<|pad|>"),
        ("generation_config.json", "eos_token_id", 0),
        ("config.json", "eos_token_id", 0),
    ]:
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {key: value}))
    assert load_tokenizer(folder).eos_token_ids == (0, 2)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace("<|im_end|>", ""))
    assert load_tokenizer(folder).eos_token_ids == (0,)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert load_tokenizer(folder).eos_token_ids == (0,)


def test_masks_prompts_and_texts_use_every_end_of_turn(folder: Path) -> None:
    """The template ends turns with 2, and the configs say 7: a sampled 7 and a sampled 2 both end the turn."""
    for name in ("generation_config.json", "config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {"eos_token_id": 7}))
    renderer = Renderer(load_tokenizer(folder))
    encode = renderer.tokenizer.encode
    thread = StringThread(turns=[("user", "Why?")]).assistant("So.")
    turn = renderer.tokenize(thread).turns[-1]
    trained = [token for token, weight in zip(turn.token_ids, turn.weights, strict=True) if weight > 0]
    assert trained == [*encode("So."), 2]
    for end in (2, 7):
        assert renderer.decode_completion([*encode("So."), end]) == "So."
        answered = renderer.with_completion(renderer.prompt(thread.user("And?")), [*encode("So."), end], [-1.0] * 4)
        appended = renderer.append(answered, "user", "Oh.").turns[-1].token_ids
        assert list(appended) == encode("\n<|im_start|>user\nOh.<|im_end|>\n")  # no second end of turn


@pytest.mark.parametrize("text", ["{", "[1]", 5000 * "[", '{"eos_token_id": "two"}', '{"eos_token_id": {}}'])
def test_a_generation_config_that_names_no_ids_is_refused(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(TokenizerMissing, match=r"generation_config\.json of .* eos_token_id"):
        load_tokenizer(folder)


def test_no_folder_no_tokenizer_broken_tokenizer(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match="not a folder"):
        load_tokenizer(tmp_path / "absent")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerMissing, match="cannot be loaded"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerMissing, match=r"holds \[.*config\.json.*but no tokenizer"):
        load_tokenizer(folder)


def test_no_end_of_sequence_token(folder: Path) -> None:
    for name, key in (("tokenizer_config.json", "eos_token"), ("config.json", "eos_token_id")):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({k: v for k, v in config.items() if k != key}))
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerMissing, match="end-of-sequence"):
        load_tokenizer(folder)


def test_no_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a")
    with pytest.raises(ChatTemplateMissing, match=r"chat_template\.jinja"):
        Renderer(tokenizer)
    with pytest.raises(ChatTemplateMissing):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], generation_prompt=True)


@pytest.mark.parametrize("url", ["file", "memory"])
def test_the_renderer_of_a_stored_model(tiny_folder: Path, tmp_path: Path, url: str) -> None:
    store = open_store(f"memory://{tmp_path.name}" if url == "memory" else str(tmp_path / "store"))
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    files = {path.name: path for path in copy.iterdir()}
    model = publish_model(store, f"tiny-{url}", "1", files, provenance=PROVENANCE)
    thread = StringThread().user("hi").assistant("yo")
    renderer = renderer_of(store, model)
    assert renderer.tokenize(thread) == Renderer(load_tokenizer(tiny_folder)).tokenize(thread)
    assert renderer_of(store, model) is renderer


def test_all_of_it_works_without_torch(tiny_folder: Path) -> None:
    script = f"""
import sys
sys.modules["torch"] = None  # as if it were not installed
from pathlib import Path
import engine.losses.spec, tasks.batches.advantages, flows.training.schedules
from engine.text.rendering import Renderer
from engine.text.threads import StringThread
from engine.text.tokenizers import load_tokenizer
thread = StringThread().user("hi")
print(len(Renderer(load_tokenizer(Path({str(tiny_folder)!r}))).prompt_ids(thread)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    # <|im_start|> user \\n hi <|im_end|> \\n <|im_start|> assistant \\n: 1 + 4 + 1 + 2 + 1 + 1 + 1 + 9 + 1
    assert done.stdout.strip() == "21", done.stderr


def test_importing_the_text_layer_does_not_import_torch() -> None:
    modules = "engine.text.threads, engine.text.rendering, engine.text.tokenizers, engine.losses.spec"
    script = f"import sys, {modules}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False False"
