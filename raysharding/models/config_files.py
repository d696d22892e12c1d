"""The files that describe a transformers model beside its weights: config.json and generation_config.json."""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

from torch import nn

from raysharding.errors import CheckpointError
from raysharding.models.stand_in import original_class


def write_config_files(module: nn.Module, directory: str) -> bool:
    """Write config.json, and generation_config.json for a model that generates; one rank calls it.

    Args:
        module: The model; a module that is not a transformers model has no such files.
        directory: An existing directory.

    Returns:
        Whether the module is a transformers model.

    Raises:
        CheckpointError: When the files cannot be written.
    """
    transformers: Any = sys.modules.get("transformers")  # not imported: then this is no transformers model
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return False
    model: Any = module
    config = copy.deepcopy(model.config)
    config.architectures = [original_class(module).__name__]
    try:
        config.save_pretrained(directory)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(directory)
    except OSError as error:
        raise CheckpointError(f"cannot write config.json: {error.strerror}", path=os.fspath(directory)) from error
    return True
