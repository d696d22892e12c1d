"""`Position`: how far a run has come in its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


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
