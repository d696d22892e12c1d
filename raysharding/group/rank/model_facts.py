"""`ModelFacts`: what a rank reports about the whole model once the module is built."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raysharding.group.messages import Packed, pack


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model, the same on every rank."""

    num_parameters: int = 0
    """Elements of all parameters of the unsharded model; tied parameters count once."""
    dtype: torch.dtype | None = None
    """Dtype of the first floating parameter, as transformers' `model.dtype`."""
    packed_config: Packed | None = None
    """The transformers config, pickled: the driver may not have transformers."""

    @classmethod
    def of(cls, module: nn.Module) -> ModelFacts:
        """Read the facts from a sharded module. Reads no weights; not collective."""
        parameters = list(module.parameters())
        dtype = next((one.dtype for one in parameters if one.dtype.is_floating_point), None)
        transformers: Any = sys.modules.get("transformers")  # if not imported, `module` is not a transformers model
        config = getattr(module, "config", None)
        is_config = transformers is not None and isinstance(config, transformers.PreTrainedConfig)
        packed = pack(config, "config").snapshot() if is_config else None
        return cls(sum(one.numel() for one in parameters), dtype, packed)

    @property
    def config(self) -> Any:
        """A copy of the transformers config; `None` for a model that has none."""
        return None if self.packed_config is None else self.packed_config.unpack()
