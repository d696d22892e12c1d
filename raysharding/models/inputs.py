"""What a model's forward takes that can be checked before it runs: names of its arguments, and ids that it has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

MASKED_LABEL = -100
"""The label that losses leave out."""


@dataclass(frozen=True, slots=True)
class InputBounds:
    """Ids that a model has a row for. An id outside raises on the rank that holds it, while its peers wait."""

    positions: tuple[str, ...] = ()
    """Names of the forward's positional arguments, in order."""
    num_ids: Mapping[str, int] = field(default_factory=dict)
    """Argument → number of ids, which are 0, 1, …; arguments that are not named take any value."""

    @classmethod
    def of(cls, module: nn.Module) -> InputBounds:
        """Read them off a transformers model's own embeddings; any other module has none. Touches no weights.

        Args:
            module: The root, on meta or loaded.
        """
        positions = tuple(
            name
            for name, parameter in inspect.signature(module.forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        )
        config: Any = getattr(module, "config", None)
        if not hasattr(module, "get_input_embeddings") or config is None:
            return cls(positions)
        num_ids: dict[str, int] = {}
        embedding = _asked(module, "get_input_embeddings")
        if isinstance(embedding, nn.Embedding):
            num_ids["input_ids"] = embedding.num_embeddings
            if getattr(config, "is_encoder_decoder", False):
                num_ids["decoder_input_ids"] = embedding.num_embeddings
        head = _asked(module, "get_output_embeddings")
        if isinstance(head, nn.Linear):
            num_ids["labels"] = head.out_features
        for name, submodule in module.named_modules():
            if isinstance(submodule, nn.Embedding) and name.rpartition(".")[2] == "token_type_embeddings":
                num_ids["token_type_ids"] = submodule.num_embeddings
        return cls(positions, {name: number for name, number in num_ids.items() if name in _names(module)})


def _asked(module: nn.Module, method: str) -> Any:
    """What a model says of itself; `None` where its class has not been taught to."""
    try:
        return getattr(module, method)()
    except (NotImplementedError, AttributeError):
        return None


def _names(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)
