"""Tests that messages are plain text: logs, states of flow runs and terminals show backticks as they are."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITH_BACKTICKS = {
    "engine/text/tool_calls.py", "flows/cli/config.py", "flows/configs/keys.py",
    "flows/evaluation.py", "flows/promotion/model_card.py", "flows/recurring.py", "flows/sweep.py",
    "tasks/evaluation/model_comparison.py", "tasks/graders/code.py", "tasks/graders/json_schema.py",
    "flows/verl/shell.py", "tasks/loggers/services.py", "tasks/report.py", "tasks/reports/flow_run_page.py",
    "tasks/reports/table_cells.py",
}  # fmt: skip
"""Modules that write or read Markdown, or a syntax that has backticks: queries and shell scripts."""
WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def lines_with_backticks(module: Path) -> list[int]:
    """The lines of the string constants with a backtick, without docstrings."""
    nodes = list(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))
    docstrings = set()
    for node in nodes:
        if isinstance(node, WITH_DOCSTRING):
            docstrings |= {id(line.value) for line in node.body if isinstance(line, ast.Expr)}
    strings = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.lineno for node in strings if "`" in node.value and id(node) not in docstrings]


def test_messages_have_no_backticks() -> None:
    modules = [path for part in ("flows", "tasks", "engine", "storage") for path in (ROOT / part).rglob("*.py")]
    names = {str(path.relative_to(ROOT)): path for path in modules}
    found = {name: lines_with_backticks(path) for name, path in names.items() if name not in WITH_BACKTICKS}
    assert {name: lines for name, lines in found.items() if lines} == {}
