"""Builds the extension once for a source and a torch, into a cache that all processes share."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

NAME = "raysharding_sim"
SOURCES = sorted(Path(__file__).with_name("sim").iterdir())


def why_unavailable() -> str | None:
    """Return why the extension cannot be built here; `None` if it can, or has been."""
    if _library().exists():
        return None
    missing = [tool for tool in ("c++", "ninja") if shutil.which(tool) is None]
    return f"no {' and no '.join(missing)} here" if missing else None


def _library() -> Path:
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "raysharding" / f"sim-{digest.hexdigest()[:16]}" / f"{NAME}.so"


@functools.cache
def load_extension() -> Any:
    """Load the extension; the first process builds it, in one to two minutes, while others wait."""
    library = _library()
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _build(library)
    spec: Any = importlib.util.spec_from_file_location(NAME, library)
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _build(library: Path) -> None:
    from torch.utils import cpp_extension

    scratch = library.parent / "build"
    scratch.mkdir(exist_ok=True)
    sources = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    cpp_extension.load(NAME, sources, extra_cflags=["-O1", "-g0"], build_directory=str(scratch), is_python_module=False)
    os.replace(scratch / library.name, library)
