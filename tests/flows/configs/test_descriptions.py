"""Tests that every field of a form has a description."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema

from flows.ops.deployments import deployments_in, find_prefect_yaml

ENTRYPOINTS = [entry["entrypoint"] for entry in deployments_in(find_prefect_yaml())]


def undescribed(schema: dict[str, Any], where: str, groups: dict[str, Any]) -> Iterator[str]:
    """Places of properties without a description, their own or of the group that they are; but for `kind`, whose menu
    says all."""
    for name, field in schema.get("properties", {}).items():
        refs = [part["$ref"].rpartition("/")[2] for part in (field, *field.get("allOf", ())) if "$ref" in part]
        if name != "kind" and not field.get("description") and not any(groups[ref].get("description") for ref in refs):
            yield f"{where}.{name}"


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_every_field_of_a_form_is_described(entrypoint: str) -> None:
    module, _, name = entrypoint.rpartition(".")
    flow = getattr(import_module(module), name)
    assert isinstance(flow, Flow)
    schema = parameter_schema(flow).model_dump_for_openapi()
    groups = schema["definitions"]
    assert len(groups) > 5
    missing = [*undescribed(schema, name, groups)]
    for group, definition in groups.items():
        missing += undescribed(definition, group, groups)
    assert missing == []
