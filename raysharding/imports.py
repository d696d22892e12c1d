"""`lazy_names`: a package whose names are imported on first use (PEP 562), so that its import costs nothing.

`paused_gc`: Python's cyclic garbage collector, paused while an import or a load makes many objects that stay.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the cyclic garbage collector, also of the other threads of the process.

    It traverses all objects of the process repeatedly as their number grows: most of the time of a load of 20,000
    tensors, and a quarter of that of importing torch and transformers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
