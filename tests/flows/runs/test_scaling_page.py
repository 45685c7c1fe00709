"""Tests of docs/scaling.md: its engine config is valid, and its manifest has the shape that KubeRay reads."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from engine.specs.engine import LocalEngineSpec

PAGE = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.M | re.S)


def test_the_engine_config_is_valid() -> None:
    (text,) = blocks("toml")
    spec = LocalEngineSpec.model_validate(tomllib.loads(text))
    assert (spec.uses_ray, spec.ranks(16), spec.replicas) == (True, 8, 4)


def test_the_manifest_is_a_ray_cluster_of_head_and_workers() -> None:
    (manifest,) = [yaml.safe_load(text) for text in blocks("yaml") if "RayCluster" in text]
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    spec = manifest["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    (group,) = spec["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for template in (spec["headGroupSpec"]["template"], group["template"]):
        (container,) = template["spec"]["containers"]
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][0]
