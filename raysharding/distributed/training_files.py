"""Where a training run stands, in a save: its position in the data, and every rank's random generators.

Format of `training/raysharding.training.json`: {"format_version": 1, "position": `Position.as_dict` or null, "random":
[`random_state` of each rank]}. It lies beside the folder `optimizer`, and comes back with that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Self

import torch.distributed as dist

from raysharding.checkpoint import make_folder, write_file
from raysharding.checkpoint.index import MAX_JSON_BYTES, read_beside
from raysharding.checkpoint.location import storage_of
from raysharding.checkpoint.names import TRAINING_FOLDER, TRAINING_NAME
from raysharding.checkpoint.strict_json import parse_object
from raysharding.checkpoint.uri import join_path
from raysharding.distributed.agreement import agree, from_rank_0
from raysharding.distributed.optimizer_files import beside
from raysharding.distributed.random_state import random_state, restore_random_state, seed_apart
from raysharding.errors import CheckpointError

FORMAT_VERSION = 1
"""The only one so far."""


@dataclass(frozen=True)
class Position:
    """How far a run has come in its data, after an update."""

    epoch: int
    """Epochs that are over."""
    step: int
    """Steps taken of the current one."""
    num_steps: int
    """Steps taken in all."""
    batch_size: int
    """Rows of a step, all ranks together."""
    shuffle: bool
    """Whether rows come in a random order."""
    seed: int
    """Of that order."""
    num_rows: int | None
    """Rows of the data; `None` where they cannot be counted."""
    layout: str = ""
    """Digest of the sizes of the data's blocks, on which a random order hangs; empty where there is none."""
    run: str = ""
    """Names the run, whose saves and resumes all bear it."""

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Check what `as_dict` gave, or somebody else wrote.

        Raises:
            ValueError: A field is missing, or of another type.
        """
        values = {field.name: found.get(field.name) for field in fields(cls)}
        for name, value in values.items():
            kind = {"shuffle": bool, "layout": str, "run": str}.get(name, int)
            is_fine = type(value) is kind and (not isinstance(value, int) or value >= 0)
            if not is_fine and not (name == "num_rows" and value is None):
                raise ValueError(f"position: {name} is {value!r}")
        return cls(**values)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, Any]:
        """The position as a JSON value."""
        return asdict(self)


def training_state(position: Position | None) -> dict[str, Any]:
    """Return what a save holds of a run, as a JSON value; collective.

    Args:
        position: Rank 0's counts; `None` where no run over data has begun.
    """
    states = agree(None, random_state())
    where = None if position is None else position.as_dict()
    return {"format_version": FORMAT_VERSION, "position": where, "random": states}


def write_training(staging: str, state: Mapping[str, Any]) -> None:
    """Write what `training_state` gave into a save that is being made. One rank calls it.

    Raises:
        CheckpointError: The disk is full or failed.
    """
    write_file(
        make_folder(staging, TRAINING_FOLDER), TRAINING_NAME, json.dumps(state, separators=(",", ":")).encode("ascii")
    )


def load_training(checkpoint: str | os.PathLike[str]) -> Position | None:
    """Bring back the generators of this rank, and say where the run stood; collective.

    At another world size, ranks that no generators were saved of are seeded by a saved one.

    Args:
        checkpoint: The directory of a save, or a file in it: a path or URI that rank 0 reads.

    Returns:
        The position; `None` where the save has none.

    Raises:
        CheckpointError: On every rank: the file cannot be read, or is not what `write_training` writes.
    """
    found = from_rank_0(partial(_read, checkpoint))
    if found is None:
        return None
    states, rank = found["random"], dist.get_rank()
    error: Exception | None = None
    try:
        if len(states) == dist.get_world_size():
            restore_random_state(states[rank])
        elif states:
            seed_apart(states[0], rank)
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as raised:
        path = join_path(beside(checkpoint, TRAINING_FOLDER), TRAINING_NAME)
        error = CheckpointError(f"holds no state of random generators that torch takes ({raised!r})", path=path)
    # One rank's damaged state must not leave it behind the others.
    agree(error)
    return None if found["position"] is None else Position.from_dict(found["position"])


def run_of(checkpoint: str | os.PathLike[str]) -> str | None:
    """Return the run that a save belongs to, as this process sees it; `None` where it belongs to none.

    Raises:
        CheckpointError: Its file cannot be read, or is not what `write_training` writes.
    """
    found = _read(checkpoint)
    position = None if found is None else found["position"]
    return None if position is None else Position.from_dict(position).run


def _read(checkpoint: str | os.PathLike[str]) -> dict[str, Any] | None:
    directory = beside(checkpoint, TRAINING_FOLDER)
    path = join_path(directory, TRAINING_NAME)
    data = read_beside(storage_of(directory), directory, TRAINING_NAME, MAX_JSON_BYTES)
    if data is None:
        return None
    try:
        found = parse_object(data)
        if found.get("format_version") != FORMAT_VERSION:
            what = f"has format_version {found.get('format_version')!r}, this raysharding reads {FORMAT_VERSION}"
            raise CheckpointError(what, path=path)
        if found["position"] is not None:
            Position.from_dict(found["position"])
        if not isinstance(found["random"], list):
            raise ValueError("random is no list")
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"is not what raysharding writes ({error!r})", path=path) from error
    return {"position": found["position"], "random": found["random"]}
