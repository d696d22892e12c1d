"""The exported names exist, are described, and say what is exported."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from types import ModuleType

import pytest

import raysharding

MODULES = ["raysharding", *(found.name for found in pkgutil.walk_packages(raysharding.__path__, "raysharding."))]


def exported() -> list[tuple[str, str]]:
    """(module, name) for every `__all__` of the package."""
    modules = [import_module(name) for name in MODULES]
    return [(module.__name__, name) for module in modules for name in getattr(module, "__all__", ())]


@pytest.mark.parametrize(("module", "name"), exported())
def test_exported_name_is_there_and_described(module: str, name: str) -> None:
    value = getattr(import_module(module), name)
    if inspect.isclass(value) or inspect.isroutine(value):
        own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        assert own, f"{module}.{name} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_module_says_what_lives_there(name: str) -> None:
    assert (import_module(name).__doc__ or "").strip()


def test_packages_declare_what_they_export() -> None:
    packages = [module for module in map(import_module, MODULES) if hasattr(module, "__path__")]
    assert [package.__name__ for package in packages if not hasattr(package, "__all__")] == []


def test_top_level_names() -> None:
    assert set(raysharding.__all__) >= {
        "ShardedModelGroup",
        "Call",
        "Split",
        "PerRank",
        "Out",
        "Sharding",
        "Loading",
        "Placement",
        "Timeouts",
        "LoadReport",
        "SaveReport",
        "current_worker",
        "__version__",
    }
    errors = import_module("raysharding.errors")
    assert set(raysharding.__all__) >= set(_error_names(errors))
    assert list(raysharding.__all__) == sorted(set(raysharding.__all__))
    assert set(raysharding.__all__) <= set(dir(raysharding))


def _error_names(errors: ModuleType) -> list[str]:
    classes = inspect.getmembers(errors, inspect.isclass)
    return [name for name, value in classes if issubclass(value, errors.RayshardingError)]


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ShardedGroup'"):
        raysharding.ShardedGroup  # noqa: B018
