"""Writes the files of a published model in other formats: a Hugging Face folder in another type, its adapter alone, or
a GGUF file for llama.cpp and the programs that are built on it.

The package gguf knows the file format and the names of tensors, but converts no model. llama.cpp's script does, and is
in no package. What it does for the Llama family is here: the rows of the query and key projections are in the order
that llama.cpp's rotary embedding expects, and a byte-level BPE tokenizer is written with the name of its splitting.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.backends.weight_files.tensor_files import cast_model, read_tensors, shapes_of
from engine.errors import BadModelFolder, BadSpec
from engine.models.folder import CONFIG_FILE, SUFFIX, dtype_of_config, read_config
from engine.protocol import ExportFormat

if TYPE_CHECKING:
    from gguf import GGUFWriter

ADAPTER = "adapter/"
"""Beginning of the names of the adapter's files in a published model."""
ARCHITECTURE = "LlamaForCausalLM"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens in a GGUF file."""
LLAMA_3_SPLIT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
"""Beginning of the pattern by which the tokenizer of Llama 3 splits a text."""


def export_files(files: Mapping[str, Path], out: Path, form: ExportFormat, *, name: str) -> Path:
    """Writes a published model, given its files by name, to the new folder `out`, or for gguf to the new file `out`.

    `name` is the model's name within a GGUF file. Raises BadSpec for an `out` that exists, a model without an adapter,
    and a model that has no GGUF form here.
    """
    if out.exists():
        raise BadSpec(f"{out} exists already; give another path, or remove it")
    if form == "gguf":
        return _write_gguf(files, out, name)
    if form == "adapter":
        chosen = {file.removeprefix(ADAPTER): path for file, path in files.items() if file.startswith(ADAPTER)}
        if not chosen:
            raise BadSpec(f"{name} has no adapter: all of its weights were trained; give another format")
    else:
        whole = {file: path for file, path in files.items() if not file.startswith(ADAPTER)}
        partial = out.with_name(f"{out.name}.cast")
        chosen = cast_model(whole, partial, form)
    # the folder appears as a whole
    complete = out.with_name(f"{out.name}.partial")
    shutil.rmtree(complete, ignore_errors=True)
    complete.mkdir(parents=True)
    for file, path in chosen.items():
        shutil.copyfile(path, complete / file)
    complete.rename(out)
    shutil.rmtree(out.with_name(f"{out.name}.cast"), ignore_errors=True)
    return out


def _write_gguf(files: Mapping[str, Path], out: Path, name: str) -> Path:
    """Writes a model of the Llama family as a GGUF file, in the type of its weights. Vectors are in float32, as
    llama.cpp requires. Raises BadSpec for other models and tokenizers."""
    try:
        import gguf
    except ImportError as error:
        raise BadSpec("a GGUF file is written by the package gguf: pip install gguf") from error

    config = read_config(files[CONFIG_FILE])
    _check_is_llama(config, name)
    tokenizer = json.loads(files["tokenizer.json"].read_text(encoding="utf-8"))
    splitting = _splitting_name(tokenizer, name)
    dtype = dtype_of_config(config)
    types = {
        "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
        "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
        "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    }
    matrix_type, file_type = types[dtype]
    partial = out.with_name(f"{out.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    writer.add_name(name)
    writer.add_file_type(file_type)
    _add_shape(writer, config)
    _add_tokenizer(writer, files, tokenizer, splitting, int(config["vocab_size"]))
    # the shapes of all tensors come first, and the tensors follow in the same order, so that one at a time is in memory
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, int(config["num_hidden_layers"]))
    files_of_tensors = [files[file] for file in sorted(files) if file.endswith(SUFFIX) and not file.startswith(ADAPTER)]
    type_of = {True: matrix_type, False: gguf.GGMLQuantizationType.F32}
    for path in files_of_tensors:
        for hf_name, shape in shapes_of(path).items():
            gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
            if gguf_name is None:
                raise BadSpec(f"{name}: the tensor {hf_name} has no place in a GGUF file of the Llama family")
            data_type = type_of[len(shape) > 1]
            nbytes = math.prod(shape) * gguf.GGML_QUANT_SIZES[data_type][1]
            writer.add_tensor_info(gguf_name, shape, np.dtype(np.float32), nbytes, raw_dtype=data_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for path in files_of_tensors:
        for hf_name, tensor in read_tensors(path):
            data = _in_rotary_order(hf_name, tensor.float(), config).contiguous().numpy()
            writer.write_tensor_data(gguf.quants.quantize(data, type_of[data.ndim > 1]))
    writer.close()
    partial.rename(out)
    return out


def _check_is_llama(config: Mapping[str, Any], name: str) -> None:
    """Raises BadSpec for a model of another family, and for one with scaled rotary embeddings."""
    if config.get("architectures") != [ARCHITECTURE]:
        architectures = ", ".join(config.get("architectures") or ["none"])
        raise BadSpec(
            f"{name} is of the architecture {architectures}, and GGUF files are written of {ARCHITECTURE} alone; "
            "export float16 and convert it with llama.cpp's convert_hf_to_gguf.py"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise BadSpec(
            f"{name} scales its rotary embeddings ({kind}), which is not written to GGUF files here; export float16 "
            "and convert it with llama.cpp's convert_hf_to_gguf.py"
        )


def _splitting_name(tokenizer: Mapping[str, Any], name: str) -> str:
    """The name that llama.cpp has for the way in which a tokenizer splits a text before its merges. Raises BadSpec for
    a tokenizer that is no byte-level BPE, or splits in another way."""
    steps = tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    if tokenizer.get("model", {}).get("type") == "BPE" and kinds and kinds[-1] == "ByteLevel":
        if kinds == ["ByteLevel"]:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"]:
            return "smollm"
        pattern = steps[0].get("pattern", {}).get("Regex", "") if kinds == ["Split", "ByteLevel"] else ""
        if pattern.startswith(LLAMA_3_SPLIT):
            return "llama-bpe"
    raise BadSpec(
        f"{name}: the tokenizer (it splits by {', '.join(map(str, kinds)) or 'nothing'}) is not written to GGUF files "
        "here; expected the byte-level BPE of GPT-2, SmolLM or Llama 3"
    )


def _add_shape(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = int(config["num_attention_heads"])
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    rope = config.get("rope_parameters") or {}
    writer.add_vocab_size(int(config["vocab_size"]))
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10000.0))))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))


def _add_tokenizer(
    writer: GGUFWriter, files: Mapping[str, Path], tokenizer: Mapping[str, Any], splitting: str, vocabulary: int
) -> None:
    """Adds the tokens by id, the merges, the special tokens and the chat template."""
    tokens = {int(index): token for token, index in tokenizer["model"]["vocab"].items()}
    kinds = dict.fromkeys(tokens, NORMAL)
    for added in tokenizer.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    # rows of the embedding without a token
    for index in range(vocabulary):
        tokens.setdefault(index, f"[PAD{index}]")
        kinds.setdefault(index, UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list([tokens[index] for index in sorted(tokens)])
    writer.add_token_types([kinds[index] for index in sorted(tokens)])
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in tokenizer["model"]["merges"]]
    if merges:
        writer.add_token_merges(merges)
    settings = read_config(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
    ids = {token: index for index, token in tokens.items()}
    for setting, add in (
        ("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):  # fmt: skip
        token = settings.get(setting)
        text = token.get("content") if isinstance(token, dict) else token
        if text in ids:
            add(ids[text])
    template = settings.get("chat_template")
    if "chat_template.jinja" in files:
        template = files["chat_template.jinja"].read_text(encoding="utf-8")
    if isinstance(template, str):
        writer.add_chat_template(template)


def _in_rotary_order(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """The rows of a query or key projection in llama.cpp's order: it rotates neighbours, row 2i with row 2i + 1 of a
    head, where transformers rotates row i with row i + half a head. Other tensors are returned as they are."""
    heads = int(config["num_attention_heads"])
    if ".k_proj." in name:
        heads = int(config.get("num_key_value_heads") or heads)
    elif ".q_proj." not in name:
        return tensor
    if tensor.shape[0] % (2 * heads):
        raise BadModelFolder(f"{name} has {tensor.shape[0]} rows, which {heads} heads cannot share")
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return torch.swapaxes(halves, 1, 2).reshape(tensor.shape)
