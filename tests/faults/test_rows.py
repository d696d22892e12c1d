"""Every fault has a test, the tests named for it exist, and the quick cut of the suite runs at least one of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.faults.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]


def functions(path: str) -> dict[str, bool]:
    """Test function of a file → whether the quick cut leaves out all of it."""
    tree = ast.parse((ROOT / path).read_text())
    is_full = any(isinstance(node, ast.Assign) and "mark.full" in ast.unparse(node) for node in tree.body)
    return {
        node.name: is_full or any(ast.unparse(decorator) == "pytest.mark.full" for decorator in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


def test_there_are_thirty_three_rows() -> None:
    assert list(ROWS) == list(range(1, 34))


@pytest.mark.parametrize("number", ROWS)
def test_a_row_has_tests_that_exist(number: int) -> None:
    row = ROWS[number]
    assert row.tests, f"no test injects {row.fault!r}"
    left_out = []
    for test in row.tests:
        path, _, name = test.partition("::")
        assert name in functions(path), f"{test} does not exist"
        left_out.append(functions(path)[name])
    assert not all(left_out), f"the quick cut has no test of {row.fault!r}"
