"""`lazy_names`: a package whose names are imported on first use (PEP 562), so that its import costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from raysharding.gc_pause import paused_gc


def lazy_names(
    package: str, names: Sequence[str], homes: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    Args:
        package: Name of the package, which type checkers find to import the names under `TYPE_CHECKING`.
        names: The names.
        homes: Its modules that hold the names, each before its importers: a name costs no more than the import of its
            own module.
    """
    module = sys.modules[package]

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = (import_module(f"{package}.{home}") for home in homes)
        with paused_gc():
            value = next(getattr(home, name) for home in found if hasattr(home, name))
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *names})
