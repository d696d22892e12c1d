"""What a model's forward takes that can be checked before it runs: names of its arguments, and ids that it has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from raysharding.batch import RankBatch

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
        embedding = _base(_asked(module, "get_input_embeddings"))
        if isinstance(embedding, nn.Embedding):
            num_ids["input_ids"] = embedding.num_embeddings
            if getattr(config, "is_encoder_decoder", False):
                num_ids["decoder_input_ids"] = embedding.num_embeddings
        head = _base(_asked(module, "get_output_embeddings"))
        if isinstance(head, nn.Linear):
            num_ids["labels"] = head.out_features
        for name, submodule in module.named_modules():
            if isinstance(submodule, nn.Embedding) and name.rpartition(".")[2] == "token_type_embeddings":
                num_ids["token_type_ids"] = submodule.num_embeddings
        return cls(positions, {name: number for name, number in num_ids.items() if name in _names(module)})

    def check(self, batch: RankBatch, rank: int, what: str, seen: set[int] | None = None) -> None:
        """Refuse ids that the model does not have. Reads those on the CPU once.

        Args:
            batch: One rank's.
            rank: That rank.
            what: What the batch is for, for the error.
            seen: `id` of the values that were looked at before, which are passed over; these are added.

        Raises:
            ValueError: Names argument, id and row; or an argument that holds no whole numbers.
        """
        seen = set() if seen is None else seen
        for name, value in [*zip(self.positions, batch.args, strict=False), *batch.kwargs.items()]:
            number = self.num_ids.get(name)
            if number is not None and isinstance(value, torch.Tensor) and value.is_floating_point():
                raise ValueError(
                    f"{what}: {name} is of {value.dtype}, and the model takes ids, whole numbers from 0 to "
                    f"{number - 1}: make it int64; in data its column, or by collate="
                )
            if number is None or not _holds_ids(value) or id(value) in seen:
                continue
            seen.add(id(value))
            # A rank's rows of a Split are counted from the whole batch's first.
            start = 0 if batch.num_rows is None else sum(batch.rows[:rank])
            problem = _unknown(value, number, name == "labels", batch.dim, start)
            if problem is not None:
                raise ValueError(f"{what}: {name} holds {problem}: is it another model's tokenizer?")


def _asked(module: nn.Module, method: str) -> Any:
    """What a model says of itself; `None` where its class has not been taught to."""
    try:
        return getattr(module, method)()
    except (NotImplementedError, AttributeError):
        return None


def _base(module: Any) -> Any:
    """What peft has put a layer of its own around."""
    for inner in ("base_layer", "original_module"):
        module = getattr(module, inner, module)
    return module


def _names(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)


def _holds_ids(value: Any) -> bool:
    whole = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() > 0
    return whole and not value.is_floating_point() and not value.is_complex() and value.dtype is not torch.bool


def _unknown(ids: torch.Tensor, number: int, is_label: bool, dim: int, start: int) -> str | None:
    """Say which id the model does not have; `None` where it has all."""
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low >= 0 and high < number:
        return None
    wrong = (ids < 0) | (ids >= number)
    if is_label:
        wrong &= ids != MASKED_LABEL
    if not wrong.any():
        return None
    place = wrong.nonzero()[0].tolist()
    row = f" in row {place[dim] + start}" if place else ""
    masked = f", or {MASKED_LABEL} for what the loss leaves out" if is_label else ""
    return f"{int(ids[tuple(place)])}{row}, and the model has the ids 0 to {number - 1}{masked}"
