"""Files that describe a transformers model beside its weights: config.json and generation_config.json."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raysharding.errors import CheckpointError
from raysharding.models.stand_in import original_class


def config_files(module: nn.Module, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    """Return config.json, and generation_config.json for a model that generates, by name.

    Args:
        module: The model. For a module that is not a transformers model, the result is empty.
        dtype: Dtype that config.json names. Default: the model's.
    """
    transformers: Any = sys.modules.get("transformers")  # if not imported, `module` is not a transformers model
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return {}
    model: Any = module
    config = copy.deepcopy(model.config)
    config.architectures = [original_class(module).__name__]
    parts = (getattr(config, name, None) for name in config.sub_configs)
    for part in () if dtype is None else (config, *filter(None, parts)):
        part.dtype = dtype

    def write(directory: str) -> None:
        config.save_pretrained(directory)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(directory)

    return written_files(write)


def written_files(write: Callable[[str], None]) -> dict[str, bytes]:
    """Return the files that `write` writes into a directory, by name: libraries only write their files to disk.

    Args:
        write: Called with the path of a temporary directory.

    Raises:
        CheckpointError: The files cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="raysharding-") as directory:
        try:
            write(directory)
            return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir())}
        except OSError as error:
            raise CheckpointError(f"cannot write small files: {error.strerror}", path=directory) from error
