"""Tests of the public names of `flows` and `tasks.graders`: which there are, and what importing the packages loads."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOWS = {
    "DPO", "Dataset", "Distillation", "ENVGRPO", "ENVGSPO", "ENVPPO", "GRPO", "GSPO", "Grader", "InputConfig", "KTO",
    "Model", "ORPO", "PPO", "RFT", "RecipeContext", "RewardModelling", "SFT", "SimPO", "dataset_kinds",
    "get_prod_logger", "recipe_main",
}  # fmt: skip
GRADERS = {
    "BaseGrader", "BinaryJudgeGrader", "BinaryShot", "CodeGrader", "CombinedGrader", "ExactMatch", "FunctionGrader",
    "Grade", "IgnoreGradeException", "LabelMatch", "LastNumber", "MathsGrader", "RangeJudgeGrader",
    "ReasoningGymGrader", "RegexMatch",
}  # fmt: skip
PACKAGES = pytest.mark.parametrize(("package", "names"), [("flows", FLOWS), ("tasks.graders", GRADERS)])


@PACKAGES
def test_the_public_names(package: str, names: set[str]) -> None:
    module = import_module(package)
    assert set(module.__all__) == names == set(dir(module))
    for name in names:
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'GRPPO'"):
        module.GRPPO  # noqa: B018


def test_importing_the_packages_loads_no_heavy_library() -> None:
    code = (
        "import sys, flows, tasks.graders; from flows import callbacks as _;"
        "loaded = {'torch', 'transformers'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    bare = "import sys, flows, tasks.graders; assert not {'torch', 'prefect', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", bare], cwd=ROOT, check=True)
