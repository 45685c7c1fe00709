"""How the JSON schema of a record reads as a form: Prefect draws one from it, for people who start a flow in a browser.

The schema says the same as before to a validator. What changes is what a form makes of it: titles that people read,
unions as a choice (Prefect's form knows anyOf, and shows a JSON editor for oneOf), one possible value as a menu of one.
"""

from __future__ import annotations

import re
from typing import Any

WORDS = {
    "adamw": "AdamW",
    "deepspeed": "DeepSpeed",
    "dpo": "DPO",
    "gae": "GAE",
    "gib": "GiB",
    "grpo": "GRPO",
    "gspo": "GSPO",
    "http": "HTTP",
    "id": "ID",
    "ids": "IDs",
    "kl": "KL",
    "lora": "LoRA",
    "lr": "Learning rate",
    "mib": "MiB",
    "nan": "NaN",
    "ppo": "PPO",
    "rslora": "rsLoRA",
    "sft": "SFT",
    "url": "URL",
    "vllm": "vLLM",
}
"""Parts of names that are not written as their letters are."""
_SUFFIXES = ("Config", "Spec")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+")


def as_form(schema: dict[str, Any], name: str) -> None:
    """Changes the schema of the record class `name` in place."""
    if schema.get("title") == name:
        schema["title"] = class_title(name)
    for field, body in schema.get("properties", {}).items():
        _plain(body)
        if body.get("title") in (None, field.replace("_", " ").title()):  # nobody gave it another
            body["title"] = field_title(field)


def class_title(name: str) -> str:
    """GRPOAlgorithm -> GRPO algorithm, FileDataset -> File dataset, LocalEngineSpec -> Local engine."""
    for suffix in _SUFFIXES:
        if name != suffix:
            name = name.removesuffix(suffix)
    return _sentence(_PARTS.findall(name.replace("DeepSpeed", "Deepspeed")))


def field_title(name: str) -> str:
    """samples_per_batch -> Samples per batch, kl_beta -> KL beta, lr -> Learning rate."""
    return _sentence(name.split("_"))


def _sentence(parts: list[str]) -> str:
    words = [WORDS.get(part.lower(), part.lower()) for part in parts if part]
    return " ".join([words[0][:1].upper() + words[0][1:] if words[0].islower() else words[0], *words[1:]])


def _plain(schema: dict[str, Any]) -> None:
    if "const" in schema:
        schema["enum"] = [schema["const"]]
    if "oneOf" in schema:  # kinds exclude one another anyway
        schema["anyOf"] = schema.pop("oneOf")
    if "anyOf" in schema:
        schema["anyOf"] = [flat for option in schema["anyOf"] for flat in _flat(option)]
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            _plain(inner)


def _flat(option: dict[str, Any]) -> list[dict[str, Any]]:
    """A union within a union is one: `A | B | None` is a choice of three."""
    _plain(option)
    only_a_union = "anyOf" in option and not option.keys() - {"anyOf", "discriminator"}
    return list(option["anyOf"]) if only_a_union else [option]
