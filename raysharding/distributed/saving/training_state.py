"""Training state in a save: the position in the data, and the random generators of every rank.

Format of `training/raysharding.training.json`: {"format_version": 1, "position": `Position.as_dict` or null, "random":
[`random_state` of each rank]}. It is beside the folder `optimizer`, and is loaded together with it.

`random_state` is a JSON value with the global generators of a rank: of torch, its device, numpy and Python.
"""

from __future__ import annotations

import base64
import json
import os
import random
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from raysharding.checkpoint.format import TRAINING_FOLDER, TRAINING_NAME
from raysharding.checkpoint.storage import join_path
from raysharding.checkpoint.writing import write_file
from raysharding.data import Position
from raysharding.distributed.comm import (
    accelerator_in_use,
    agree,
    agreeing,
    device_module,
    from_rank_0,
    get_rank,
    get_world_size,
)
from raysharding.distributed.saving.optimizer_state import FORMAT_VERSION, beside, read_own_json
from raysharding.errors import CheckpointError


def random_state() -> dict[str, Any]:
    """Return the state of this process's generators, including the current accelerator's; 20 KB of JSON."""
    version, words, gauss = random.getstate()
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    state = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [legacy["state"]["key"].tolist(), legacy["state"]["pos"], legacy["has_gauss"], legacy["gauss"]],
    }
    device = accelerator_in_use()
    return state if device is None else state | {device.type: _text(device_module(device).get_rng_state(device))}


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the result of `random_state`, as far as this process has such generators.

    Raises:
        ValueError: `state` is invalid; some generators may have been set.
        KeyError: As ValueError.
        TypeError: As ValueError.
    """
    torch.set_rng_state(_tensor(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    key, position, has_gauss, value = state["numpy"]
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, value))
    device = accelerator_in_use()
    if device is not None and device.type in state:
        device_module(device).set_rng_state(_tensor(state[device.type]), device)


def seed_apart(state: Mapping[str, Any], rank: int) -> None:
    """Seed the generators of a rank without saved state, deterministically from a saved state and the rank."""
    seed = zlib.crc32(f"{state['torch']}, rank {rank}".encode())
    torch.manual_seed(seed)  # an accelerator's, too
    random.seed(seed)
    np.random.seed(seed)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def training_state(position: Position | None) -> dict[str, Any]:
    """Return the training state of a save, as a JSON value; collective.

    Args:
        position: Position of the run; rank 0's is used. `None` without a run over data.
    """
    states = agree(None, random_state())
    where = None if position is None else position.as_dict()
    return {"format_version": FORMAT_VERSION, "position": where, "random": states}


def write_training(staging: str, state: Mapping[str, Any]) -> None:
    """Write the result of `training_state` into a save. One rank calls this.

    Raises:
        CheckpointError: The disk is full or failed.
    """
    text = json.dumps(state, separators=(",", ":"))
    write_file(staging, f"{TRAINING_FOLDER}/{TRAINING_NAME}", text.encode("ascii"))


def load_training(checkpoint: str | os.PathLike[str]) -> Position | None:
    """Restore the generators of this rank, and return the position of the run; collective.

    At a larger world size, ranks without saved generators are seeded from a saved state.

    Args:
        checkpoint: Path or URI of a save, or of a file in it, which rank 0 reads.

    Returns:
        The position; `None` if the save has none.

    Raises:
        CheckpointError: On every rank, if the file is unreadable, or has another format than `write_training` writes.
    """
    fields = from_rank_0(partial(_read, checkpoint))
    if fields is None:
        return None
    states, rank = fields["random"], get_rank()
    # Otherwise the other ranks would go on without a rank whose state is damaged.
    with agreeing():
        try:
            if len(states) == get_world_size():
                restore_random_state(states[rank])
            elif states:
                seed_apart(states[0], rank)
        except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
            path = join_path(beside(checkpoint, TRAINING_FOLDER), TRAINING_NAME)
            what = f"holds no state of random generators that torch takes ({error!r})"
            raise CheckpointError(what, path=path) from error
    return None if fields["position"] is None else Position.from_dict(fields["position"])


def position_of(checkpoint: str | os.PathLike[str]) -> Position | None:
    """Return the position of the run in a save that this process sees; `None` without a run.

    Raises:
        CheckpointError: The file is unreadable, or has another format than `write_training` writes.
    """
    fields = _read(checkpoint)
    position = None if fields is None else fields["position"]
    return None if position is None else Position.from_dict(position)


def _read(checkpoint: str | os.PathLike[str]) -> dict[str, Any] | None:
    return read_own_json(beside(checkpoint, TRAINING_FOLDER), TRAINING_NAME, _check)


def _check(fields: Mapping[str, Any]) -> None:
    if fields["position"] is not None:
        Position.from_dict(fields["position"])
    if not isinstance(fields["random"], list):
        raise ValueError("random is no list")
