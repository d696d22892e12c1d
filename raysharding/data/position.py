"""`Position`: the position of a run in its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class Position:
    """Position of a run in its data, after an update."""

    epoch: int
    """Number of completed epochs."""
    step: int
    """Number of completed steps of the current epoch."""
    num_steps: int
    """Number of completed steps of the run."""
    batch_size: int
    """Rows of a step, over all ranks."""
    shuffle: bool
    """True for a random order of the rows."""
    seed: int
    """Seed of the order."""
    num_rows: int | None
    """Number of rows of the data; `None` for an iterable."""
    layout: str = ""
    """Digest of the block sizes, which a random order depends on; empty without a random order."""
    run: str = ""
    """Name of the run, in all its saves and resumes."""

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Check and make a position from the result of `as_dict`, possibly changed.

        Raises:
            ValueError: A field is missing or of another type.
        """
        values = {field.name: found.get(field.name) for field in fields(cls)}
        for name, value in values.items():
            kind = {"shuffle": bool, "layout": str, "run": str}.get(name, int)
            is_fine = type(value) is kind and (not isinstance(value, int) or value >= 0)
            if not is_fine and not (name == "num_rows" and value is None):
                raise ValueError(f"position: {name} is {value!r}")
        return cls(**values)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, Any]:
        """Return the position as a JSON value."""
        return asdict(self)
