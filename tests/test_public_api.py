"""The exported names exist, are described, and say what is exported."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import raysharding

ROOT = Path(__file__).resolve().parents[1]
MODULES = ["raysharding", *(found.name for found in pkgutil.walk_packages(raysharding.__path__, "raysharding."))]
PUBLIC = {
    "raysharding",
    "raysharding.batch",
    "raysharding.callbacks",
    "raysharding.checkpoint",
    "raysharding.cli",
    "raysharding.config",
    "raysharding.distributed",
    "raysharding.distributed.accelerate_compat",
    "raysharding.distributed.fsdp",
    "raysharding.distributed.sharding",
    "raysharding.errors",
    "raysharding.group",
    "raysharding.group.callbacks",
    "raysharding.worker",
}
"""What users import. All else may move without a word."""


def exported() -> list[tuple[str, str]]:
    """(module, name) for every `__all__` that is public."""
    return [(name, one) for name in sorted(PUBLIC) for one in getattr(import_module(name), "__all__", ())]


def test_exported_names_are_there_and_described() -> None:
    for name in sorted(PUBLIC):
        module = import_module(name)
        assert hasattr(module, "__all__") or not hasattr(module, "__path__"), f"{name} does not say what it exports"
    for name, one in exported():
        value = getattr(import_module(name), one)
        if inspect.isclass(value) or inspect.isroutine(value):
            own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
            assert own, f"{name}.{one} has no docstring"


def test_modules_say_what_lives_there() -> None:
    assert [name for name in MODULES if not (import_module(name).__doc__ or "").strip()] == []


def prose() -> Iterator[tuple[str, str]]:
    """(where, text) of all that people read: documents, examples, and the package's docstrings and messages."""
    for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md"):
        yield name, (ROOT / name).read_text()
    for path in sorted(path for folder in ("docs", "examples", "cluster") for path in (ROOT / folder).rglob("*")):
        if path.suffix in (".md", ".py", ".sh", ".yaml", ".ipynb"):
            yield str(path.relative_to(ROOT)), path.read_text()
    for path in sorted((ROOT / "raysharding").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def test_people_are_sent_to_public_modules_only() -> None:
    private = set(MODULES) - PUBLIC
    found = [
        f"{where}: {path}"
        for where, text in prose()
        for path in re.findall(r"\braysharding(?:\.[a-z_]+)+", text)
        if any(path == name or path.startswith(f"{name}.") for name in private)
    ]
    assert found == []


def test_top_level_names() -> None:
    named = "Call LoadReport Loading Out PerRank Placement Same SaveReport ShardedModelGroup Sharding Split Timeouts"
    assert set(raysharding.__all__) >= {*named.split(), "current_worker", "__version__"}
    errors = import_module("raysharding.errors")
    assert set(raysharding.__all__) >= set(_error_names(errors))
    assert list(raysharding.__all__) == sorted(set(raysharding.__all__))
    assert set(raysharding.__all__) <= set(dir(raysharding))


def _error_names(errors: ModuleType) -> list[str]:
    classes = inspect.getmembers(errors, inspect.isclass)
    return [name for name, value in classes if issubclass(value, errors.RayshardingError)]


def test_the_old_name_of_callbacks_has_the_same_callbacks() -> None:
    new, old = import_module("raysharding.callbacks"), import_module("raysharding.group.callbacks")
    assert {name: getattr(old, name) for name in old.__all__} == {name: getattr(new, name) for name in new.__all__}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ShardedGroup'"):
        raysharding.ShardedGroup  # noqa: B018
