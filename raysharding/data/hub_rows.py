"""`HubRows`: rows of a dataset that Hugging Face's `datasets` loads by name, on every rank for itself."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raysharding.data.files import SUFFIXES
from raysharding.errors import DataError

_NAME = re.compile(r"(?P<name>[^:]+)(:(?P<split>[\w.%+\[\]:-]+))?")


@dataclass(frozen=True)
class HubRows:
    """The rows of one split. Picklable; each process loads them when it first needs them."""

    name: str
    """What `datasets.load_dataset` takes: `org/name`, or a directory."""
    split: str
    """Name of the split, or a part of one: `train[:1000]`."""

    @cached_property
    def loaded(self) -> Any:
        """The `datasets.Dataset`."""
        import datasets

        try:
            return datasets.load_dataset(self.name, split=self.split)
        except Exception as error:  # `datasets` has errors of many libraries
            raise DataError(f"datasets.load_dataset({self.name!r}, split={self.split!r}): {error}") from error

    def __len__(self) -> int:
        return len(self.loaded)

    def __getitem__(self, index: int) -> Any:
        return self.loaded[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.split)


def hub_name(text: str) -> HubRows | None:
    """Return the dataset that a text names: `org/name` or `name:split`; `None` if it is a path.

    What exists here is a path, and so is what has a scheme, or the ending of a file of rows.
    """
    match = _NAME.fullmatch(text)
    if match is None or "://" in text or text.lower().endswith(SUFFIXES) or os.path.exists(text):
        return None
    if match["split"] is None and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):
        return None
    return HubRows(match["name"], match["split"] or "train")
