"""Conversion of a GGUF file, whose weights are quantised, to a plain Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from engine.errors import BadModelFolder


def convert_gguf(gguf: Path, folder: Path) -> Path:
    """Writes `folder` with config, tokenizer and dequantised bfloat16 safetensors. The folder appears whole or not at
    all.

    Raises:
        BadModelFolder: `gguf` is not a file.
    """
    if not gguf.is_file():
        raise BadModelFolder(f"{gguf} is not a file; give a GGUF file")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # Without `dequantize` the model loads, but refuses to be saved (transformers 5.19).
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.config._name_or_path = ""  # the config would contain a path of this machine
    # Write under another name first, so that a folder of this name is always complete.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder
