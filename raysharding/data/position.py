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
    rows_per_item: int = 1
    """Number of consecutive rows that stay together."""
    run: str = ""
    """Name of the run, in all its saves and resumes."""
    loss: float | None = None
    """Loss of the last step of the run whose loss was finite; `None` before it."""
    evaluations: tuple[Mapping[str, Any], ...] = ()
    """Evaluations of the run so far, in order: `step`; `metrics`, those that were finite; and, for an evaluation that
    was the best one, `best`, the metric that decided, and `path`, its save."""

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Check and make a position from the result of `as_dict`, possibly changed.

        Raises:
            ValueError: A field is missing or of another type.
        """
        values = {field.name: found.get(field.name) for field in fields(cls)}
        # Saves of earlier versions have none of these.
        loss, evaluations = values.pop("loss"), values.pop("evaluations") or ()
        values["rows_per_item"] = found.get("rows_per_item", 1)
        if not isinstance(loss, float | None) or not all(isinstance(one, Mapping) for one in evaluations):
            raise ValueError(f"position: loss is {loss!r}, evaluations are {evaluations!r}")
        for name, value in values.items():
            kind = {"shuffle": bool, "layout": str, "run": str}.get(name, int)
            is_fine = type(value) is kind and (not isinstance(value, int) or value >= 0)
            if not is_fine and not (name == "num_rows" and value is None):
                raise ValueError(f"position: {name} is {value!r}")
        return cls(**values, loss=loss, evaluations=tuple(evaluations))  # type: ignore[arg-type]

    @property
    def best(self) -> str | None:
        """Path of the save of the best evaluation so far; `None` without one."""
        return next((one["path"] for one in reversed(self.evaluations) if one.get("path")), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the position as a JSON value."""
        return asdict(self)
