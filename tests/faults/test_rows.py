"""`rows.md`: every fault has a test, the tests named for it exist, and the quick cut of the suite runs one of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROWS = [line.split("|")[1:4] for line in (HERE / "rows.md").read_text().splitlines() if re.match(r"\| \d", line)]


def functions(path: Path) -> dict[str, bool]:
    """Test function of a file → True if the quick cut leaves out all of it."""
    tree = ast.parse(path.read_text())
    is_full = any(isinstance(node, ast.Assign) and "mark.full" in ast.unparse(node) for node in tree.body)
    return {
        node.name: is_full or any(ast.unparse(decorator) == "pytest.mark.full" for decorator in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


def test_there_are_thirty_three_rows() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 34))


@pytest.mark.parametrize(("number", "fault", "tests"), ROWS)
def test_a_row_has_tests_that_exist(number: str, fault: str, tests: str) -> None:
    left_out = []
    for path, name in re.findall(r"`(\S+?)::(\w+)`", tests):
        found = functions(HERE.parent / path)
        assert name in found, f"{path}::{name} does not exist"
        left_out.append(found[name])
    assert len(left_out) == tests.count("::")
    assert not all(left_out), f"the quick cut has no test of {fault}"
