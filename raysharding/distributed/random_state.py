"""The random generators of a rank, as a JSON value: torch's, its device's, numpy's and Python's global ones."""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of this process's generators, the current CUDA device's too; 20 KB of JSON."""
    version, words, gauss = random.getstate()
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    state = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [legacy["state"]["key"].tolist(), legacy["state"]["pos"], legacy["has_gauss"], legacy["gauss"]],
    }
    return state | ({"cuda": _text(torch.cuda.get_rng_state())} if torch.cuda.is_initialized() else {})


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` gave, as far as this process has such generators.

    Raises:
        ValueError: It is something else; some generators may have been set.
        KeyError: As before.
        TypeError: As before.
    """
    torch.set_rng_state(_tensor(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    key, position, has_gauss, value = state["numpy"]
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, value))
    if torch.cuda.is_initialized() and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def seed_apart(state: Mapping[str, Any], rank: int) -> None:
    """Seed the generators of a rank that no state was saved of: by a saved one and the rank, so always alike."""
    seed = zlib.crc32(f"{state['torch']}, rank {rank}".encode())
    torch.manual_seed(seed)  # CUDA's, too
    random.seed(seed)
    np.random.seed(seed)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
