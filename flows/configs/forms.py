"""The base class of the configs that Prefect shows as a form.

Prefect draws the form from the JSON schema of the config. The schema here accepts the same values as pydantic's, and
the form is easier to read: titles are words, a union is a choice (the form supports anyOf, and shows a JSON editor
for oneOf), a constant is a menu with one entry, and the fields are in the order that a person fills them in.

A form always shows the fields without a default, FLOW_FIELDS_SHOWN and GROUP_FIELDS_SHOWN. It hides the rest until a
person opens it: the other groups of a flow are optional, and the other fields of a group are in an optional object,
"further settings". `FormConfig` accepts both this nesting and the flat layout of a config file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import ConfigDict, GetJsonSchemaHandler, JsonValue, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from storage.secrets import refuse_secrets
from storage.serialization import Frozen

Schema = dict[str, Any]
REQUIRED_IN_FORM: dict[str, JsonValue] = {"required_in_form": True}
"""`Field(None, json_schema_extra=REQUIRED_IN_FORM)`: the form requires this field, and None is allowed."""

WORDS = {
    "adamw": "AdamW",
    "deepspeed": "DeepSpeed",
    "gae": "GAE",
    "gib": "GiB",
    "gspo": "GSPO",
    "http": "HTTP",
    "id": "ID",
    "ids": "IDs",
    "kl": "KL",
    "lora": "LoRA",
    "lr": "learning rate",
    "mib": "MiB",
    "nan": "NaN",
    "rft": "RFT",
    "rslora": "rsLoRA",
    "dora": "DoRA",
    "sft": "SFT",
    "simpo": "SimPO",
    "url": "URL",
    "vllm": "vLLM",
}
"""Words with a special spelling in titles. A word in capitals stays as it is."""
FLOW_FIELDS_SHOWN = frozenset({
    "run", "seed", "model", "data", "environment", "agent", "sampling", "algorithm", "sft", "gspo", "optimizer",
})  # fmt: skip
"""Fields of a flow's config that a form shows unfolded, although they have a default."""
GROUP_FIELDS_SHOWN = frozenset({
    "kind", "heldout", "max_new_tokens", "algorithm", "steps", "samples_per_batch", "completions_per_sample",
    "optimizer", "lr", "weight",
})  # fmt: skip
"""Fields of groups that a form shows unfolded, although they have a default."""
FURTHER = "further settings"
"""Key of the object with the other fields of a group. Because of the space, no field can have this name."""
MAX_DEPTH = 16
"""Levels of nesting of a config. Deeper values are arguments of the user's code, which may be recursive."""
MARKS_OF_A_FLOW = frozenset({"engine", "storage"})
"""Fields by which the config of a flow is recognised within the config of another flow."""
CHECK_KEYS = ("if", "then", "else")
UNION_KEYS = frozenset({"anyOf", "discriminator", *CHECK_KEYS})
"""Keys of the schema of a union without labels."""
_SUFFIXES = ("Config", "Spec")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+")


class FormConfig(Frozen):
    """Base class of a flow's config. Its JSON schema, with all nested definitions, is adapted to Prefect's form."""

    # pydantic's own text of an error would show the whole config, with an address that is refused for its password
    model_config = ConfigDict(hide_input_in_errors=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        definitions = [schema, *_definitions_in(schema, handler.resolve_ref_schema, seen=set())]
        for definition in definitions:
            # A definition with FURTHER was folded before.
            if "properties" in definition and FURTHER not in definition["properties"]:
                _adapt_fields(definition)
                is_flow = definition is schema or definition["properties"].keys() >= MARKS_OF_A_FLOW
                _fold(definition, handler.resolve_ref_schema, is_flow=is_flow)
        return reference

    @model_validator(mode="before")
    @classmethod
    def _from_form(cls, values: Any) -> Any:
        """Merges the further settings of a form into their groups. Drops a group that is None, so that it has its
        default. Raises SecretInURL for an address with a password."""
        refuse_secrets(values)
        if not isinstance(values, dict):
            return values
        flat = merge_further(values)
        for name, field in cls.model_fields.items():
            if flat.get(name, field.default) is None and isinstance(field.default, Frozen):
                del flat[name]
        return flat


def merge_further(values: Any, depth: int = 0) -> Any:
    """Merges the further settings of every group into the group. Returns a copy. What is deeper than MAX_DEPTH stays as
    it is, and so do further settings that are no object: the validation of the group refuses them."""
    if depth > MAX_DEPTH:
        return values
    if isinstance(values, list):
        return [merge_further(value, depth + 1) for value in values]
    if not isinstance(values, dict):
        return values
    flat = {name: merge_further(value, depth + 1) for name, value in values.items()}
    if flat.get(FURTHER, {}) is None:
        del flat[FURTHER]
    elif isinstance(flat.get(FURTHER), dict):
        flat |= flat.pop(FURTHER)
    return flat


def _definitions_in(schema: Any, resolve: Callable[[Schema], Schema], *, seen: set[str]) -> list[Schema]:
    """Every definition that a schema refers to, directly or through others. `seen` holds the references met so far."""
    definitions = []
    if isinstance(schema, list):
        for item in schema:
            definitions += _definitions_in(item, resolve, seen=seen)
    elif isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            definition = resolve(schema)
            definitions += [definition, *_definitions_in(definition, resolve, seen=seen)]
        for item in schema.values():
            definitions += _definitions_in(item, resolve, seen=seen)
    return definitions


def _adapt_fields(definition: Schema) -> None:
    """Gives the definition and its fields readable titles, and shows constants as menus and unions as choices."""
    definition["title"] = class_title(definition["title"])
    for field, body in definition["properties"].items():
        _adapt_value(body)
        has_default_title = body.get("title") in (None, field.replace("_", " ").title())
        if has_default_title:
            body["title"] = field_title(field)


def _fold(definition: Schema, resolve: Callable[[Schema], Schema], *, is_flow: bool) -> None:
    """Folds the fields of a definition that the form does not show at once."""
    fields: dict[str, Schema] = definition["properties"]
    _require_marked(definition)
    always_shown = {*definition.get("required", ()), *(FLOW_FIELDS_SHOWN if is_flow else GROUP_FIELDS_SHOWN)}
    shown = {name: body for name, body in fields.items() if name in always_shown}
    folded = {name: body for name, body in fields.items() if name not in always_shown}
    # A group with nothing to show but its kind stays flat.
    if not shown.keys() - {"kind"}:
        return
    for body in shown.values():
        _keep_shown_defaults(body, resolve)
    if is_flow:  # each group is folded by itself
        first = {name: shown.pop(name) for name in ("run", "seed") if name in shown}
        definition["properties"] = first | shown | {name: _optional(body, resolve) for name, body in folded.items()}
    elif folded:
        definition["properties"] = shown | {FURTHER: _further_settings(folded)}
        # the flat layout stays valid, for clients of Prefect's API
        definition["patternProperties"] = {f"^{name}$": body for name, body in folded.items()}


def _require_marked(definition: Schema) -> None:
    """Makes the fields marked with REQUIRED_IN_FORM required, without a default."""
    for name, body in definition["properties"].items():
        if body.pop("required_in_form", False):
            body.pop("default", None)
            definition.setdefault("required", []).append(name)


def _further_settings(fields: dict[str, Schema]) -> Schema:
    """An optional object with these fields. None means that every field has its default."""
    title = "Further settings"
    names = ", ".join(body["title"] for body in fields.values())
    record = {"type": "object", "title": title, "properties": fields, "additionalProperties": False}
    return {"title": title, "description": f"{names}.", "anyOf": [record, {"type": "null"}], "default": None}


def _keep_shown_defaults(body: Schema, resolve: Callable[[Schema], Schema]) -> None:
    """Reduces the default of a group to its fields in GROUP_FIELDS_SHOWN."""
    default = body.get("default")
    if "$ref" in body and isinstance(default, dict):
        shown = resolve(body)["properties"].keys() & GROUP_FIELDS_SHOWN
        body["default"] = {name: value for name, value in default.items() if name in shown and value is not None}


def _optional(body: Schema, resolve: Callable[[Schema], Schema]) -> Schema:
    """Makes a group optional: None means its defaults. Other schemas are returned unchanged."""
    if not isinstance(body.get("default"), dict):
        return body
    labels: Schema = {name: body[name] for name in ("title", "description") if name in body}
    values = {name: value for name, value in body.items() if name not in (*labels, "default")}
    if "$ref" in values and "description" not in labels:
        labels["description"] = resolve(values).get("description", "")
    options = values.get("anyOf", [values])
    return {**labels, "anyOf": [*options, {"type": "null"}], "default": None}


def class_title(name: str) -> str:
    """GRPOAlgorithm -> GRPO algorithm, FileDataset -> File dataset, LocalEngineSpec -> Local engine. A title stays
    as it is."""
    if " " in name or name in WORDS.values():
        return name
    for suffix in _SUFFIXES:
        if name != suffix:
            name = name.removesuffix(suffix)
    return _title(_PARTS.findall(name.replace("DeepSpeed", "Deepspeed").replace("SimPO", "Simpo")))


def field_title(name: str) -> str:
    """samples_per_batch -> Samples per batch, kl_beta -> KL beta, lr -> Learning rate."""
    return _title([part for part in name.split("_") if part])


def _title(parts: list[str]) -> str:
    words = [part if part.isupper() and len(part) > 1 else WORDS.get(part.lower(), part.lower()) for part in parts]
    return " ".join([words[0][:1].upper() + words[0][1:] if words[0].islower() else words[0], *words[1:]])


def _adapt_value(schema: Schema) -> None:
    """Shows a constant as a menu with one entry and a union as a choice, in this schema and in those of its items."""
    if "const" in schema:
        schema["enum"] = [schema["const"]]
    if "oneOf" in schema:  # the kinds of a discriminated union exclude one another
        schema["anyOf"] = schema.pop("oneOf")
        schema.update(_check_by_kind(schema.get("discriminator", {}).get("mapping", {})))
    if "anyOf" in schema:
        options: list[Schema] = []
        for option in schema["anyOf"]:
            _adapt_value(option)
            # `A | B | None` is one choice of three
            if "anyOf" in option and not option.keys() - UNION_KEYS:
                options.extend(option["anyOf"])
                schema.update({name: option[name] for name in CHECK_KEYS if name in option})
            else:
                options.append(option)
        schema["anyOf"] = options
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            _adapt_value(inner)


def _check_by_kind(kinds: dict[str, str]) -> Schema:
    """Keywords that also check a group by the definition of its kind: if it has the first kind, then by the first
    definition, else if it has the second one, and so on. The form shows such an error at its field, and that of the
    choice alone as "not valid under any of the given schemas"."""
    check: Schema = {}
    for kind, reference in kinds.items():
        condition = {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
        check = {"if": condition, "then": {"$ref": reference}} | ({"else": check} if check else {})
    return check
