"""The base class of the configs that Prefect shows as a form.

Prefect draws the form from the JSON schema of the config. The schema here accepts the same values as pydantic's, and
the form is easier to read: titles are words, a union is a choice (the form supports anyOf, and shows a JSON editor
for oneOf), a constant is a menu with one entry, and the fields are in the order that a person fills them in.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from storage.serialization import Frozen

Schema = dict[str, Any]

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


class FormConfig(Frozen):
    """Base class of a flow's config. Its JSON schema, with all nested definitions, is adapted to Prefect's form."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        _adapt(schema)
        _adapt_definitions(schema, handler.resolve_ref_schema, seen=set())
        cls._order_fields(schema)
        return reference

    @classmethod
    def _order_fields(cls, schema: Schema) -> None:
        """Moves the fields of the base class behind those of its subclass: what must be filled in comes first."""
        for base in cls.__mro__[1:]:
            if issubclass(base, FormConfig) and FormConfig in base.__bases__:
                inherited = {name: schema["properties"].pop(name) for name in base.model_fields}
                schema["properties"].update(inherited)


def _adapt_definitions(schema: Any, resolve: Callable[[Schema], Schema], *, seen: set[str]) -> None:
    """Adapts every definition that a schema refers to, directly or through other definitions. `seen` holds the
    references that are done."""
    if isinstance(schema, list):
        for item in schema:
            _adapt_definitions(item, resolve, seen=seen)
    elif isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            definition = resolve(schema)
            _adapt(definition)
            _adapt_definitions(definition, resolve, seen=seen)
        for item in schema.values():
            _adapt_definitions(item, resolve, seen=seen)


def _adapt(definition: Schema) -> None:
    if "properties" not in definition:
        return
    definition["title"] = class_title(definition["title"])
    for field, body in definition["properties"].items():
        _adapt_value(body)
        has_default_title = body.get("title") in (None, field.replace("_", " ").title())
        if has_default_title:
            body["title"] = field_title(field)


def class_title(name: str) -> str:
    """GRPOAlgorithm -> GRPO algorithm, FileDataset -> File dataset, LocalEngineSpec -> Local engine. A title stays
    as it is."""
    if " " in name or name in WORDS.values():
        return name
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


def _adapt_value(schema: Schema) -> None:
    """Shows a constant as a menu with one entry and a union as a choice, in this schema and in those of its items."""
    if "const" in schema:
        schema["enum"] = [schema["const"]]
    if "oneOf" in schema:  # the kinds of a discriminated union exclude one another
        schema["anyOf"] = schema.pop("oneOf")
    if "anyOf" in schema:
        options: list[Schema] = []
        for option in schema["anyOf"]:
            options.extend(_without_nesting(option))
        schema["anyOf"] = options
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            _adapt_value(inner)


def _without_nesting(option: Schema) -> list[Schema]:
    """The options of a union within a union: `A | B | None` is one choice of three."""
    _adapt_value(option)
    only_a_union = "anyOf" in option and not option.keys() - {"anyOf", "discriminator"}
    return list(option["anyOf"]) if only_a_union else [option]
