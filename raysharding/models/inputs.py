"""Checks of a forward's inputs before it runs: names of its arguments, and ranges of ids."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from raysharding.batch import RankBatch
from raysharding.models.conversion import is_transformers_model
from raysharding.models.stand_in import class_name
from raysharding.models.wrap import input_and_output

MASKED_LABEL = -100
"""Label that losses ignore."""

_CLASSIFIES = re.compile(r"^(?!BrosSpade).*For(Sequence|Token|Image|Video|Audio)Classification$")
"""Classes whose labels are classes; those of BROS' SPADE are positions."""
_POSITIONS = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
_LABEL = re.compile(r"label|target|_positions$|loss")


_CURE = (
    "is it another model's tokenizer? Tokens that were added to this one have no rows yet: in transformers, "
    "model.resize_token_embeddings(len(tokenizer)) and a save make them, and set vocab_size in config.json"
)


@dataclass(frozen=True, slots=True)
class InputBounds:
    """Ids for which a model has a row. In a forward an id out of range raises on one rank, while its peers wait."""

    positions: tuple[str, ...] = ()
    """Names of the forward's positional arguments, in order."""
    num_ids: Mapping[str, int] = field(default_factory=dict)
    """Argument → number of ids, which are 0, 1, …; other arguments take any value."""
    keywords: frozenset[str] | None = None
    """Names of the keyword arguments; `None` if the forward takes any name."""
    labels: frozenset[str] = frozenset()
    """Arguments of which a transformers model's loss needs at least one; empty if it is not known."""
    num_classes: int | None = None
    """Number of classes, if `labels` of whole numbers are classes; `None` if that is not known."""
    num_positions: int | None = None
    """Largest number of columns of `input_ids`; `None` if the model does not embed positions, or that is unknown."""

    @classmethod
    def of(cls, module: nn.Module) -> InputBounds:
        """Read the bounds from a transformers model's embeddings; other modules have none. Reads no weights.

        Args:
            module: The root module, on meta or loaded.
        """
        parameters = inspect.signature(module.forward).parameters
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        positions = tuple(name for name, kind in kinds.items() if kind in (inspect.Parameter.POSITIONAL_ONLY, either))
        keywords = frozenset(name for name, kind in kinds.items() if kind in (inspect.Parameter.KEYWORD_ONLY, either))
        needs_labels = is_transformers_model(module) and "labels" in parameters
        labels = frozenset(name for name in parameters if _LABEL.search(name)) if needs_labels else frozenset()
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
        known: dict[str, Any] = {"keywords": None if takes_any else keywords, "labels": labels}
        config: Any = getattr(module, "config", None)
        if config is None or not hasattr(module, "get_input_embeddings"):
            return cls(positions, **known)
        is_single = getattr(config, "problem_type", None) in (None, "single_label_classification")
        if is_single and _CLASSIFIES.search(class_name(module)) and config.num_labels > 1:
            known["num_classes"] = config.num_labels
        num_ids: dict[str, int] = {}
        embedding, head = map(_base, input_and_output(module))
        if isinstance(embedding, nn.Embedding):
            num_ids["input_ids"] = embedding.num_embeddings
        if getattr(config, "is_encoder_decoder", False) and hasattr(module, "get_decoder"):
            root: Any = module
            decoder = _base(input_and_output(root.get_decoder())[0])
            if isinstance(decoder, nn.Embedding):
                num_ids["decoder_input_ids"] = decoder.num_embeddings
        if isinstance(head, nn.Linear):
            num_ids["labels"] = head.out_features
        least = getattr(getattr(config, "text_config", config), "max_position_embeddings", None) or math.inf
        for name, submodule in module.named_modules():
            if not isinstance(submodule, nn.Embedding):
                continue
            kind, number = name.rpartition(".")[2], submodule.num_embeddings
            if kind == "token_type_embeddings":
                num_ids["token_type_ids"] = number
            elif kind in _POSITIONS and number >= least and _is_indexed_in_order(submodule, config):
                unused = 0 if submodule.padding_idx is None else submodule.padding_idx + 1
                number -= getattr(submodule, "offset", unused)
                known["num_positions"] = min(number, least, known.get("num_positions", number))
        return cls(positions, {name: number for name, number in num_ids.items() if name in parameters}, **known)

    def check_names(self, batch: RankBatch, what: str, needs_loss: bool) -> None:
        """Check the names of a forward's arguments. Reads no values.

        Args:
            batch: A rank's batch; all ranks' batches have the same names.
            what: Name of the call, for the error.
            needs_loss: True if the model itself must compute a loss.

        Raises:
            ValueError: The forward has no argument of a name; or the loss needs labels, and the batch has none.
        """
        for name in () if self.keywords is None else batch.wrapped_kwargs.keys() - self.keywords:
            known = sorted(self.keywords or ())
            near = difflib.get_close_matches(name, known, 1)
            cure = f"is it {near[0]}=?" if near else f"it takes {', '.join(known) or 'no keyword arguments'}"
            raise ValueError(f"{what}: the model's forward has no argument {name}=: {cure}")
        given = {*self.positions[: len(batch.wrapped_args)]}
        given |= {name for name, value in batch.wrapped_kwargs.items() if value is not None}
        if needs_loss and batch.examples is None and self.labels and not any(_LABEL.search(name) for name in given):
            near = [name for name in given if difflib.get_close_matches(name, self.labels, 1)]
            hint = f" ({near[0]}= is not labels=)" if near else ""
            raise ValueError(
                f"{what}: the batch has no labels{hint}, so the model computes no loss: add labels= to the batch, or "
                "give loss="
            )

    def for_loss(self, loss: object) -> InputBounds:
        """Return the bounds of a call; labels that a `loss` other than the model's own takes need not be classes."""
        return self if loss is None else replace(self, num_classes=None)

    def check(self, batch: RankBatch, rank: int, what: str, seen: set[int] | None = None) -> None:
        """Check that a batch's ids are in range. Reads each tensor of ids on the CPU once, and skips those on a GPU.

        Args:
            batch: One rank's batch.
            rank: The batch's rank.
            what: Purpose of the batch, for the error.
            seen: `id` of each value checked before, which is skipped; values checked now are added.

        Raises:
            ValueError: An id is out of range: the error names argument, id and row. Or an argument for ids is floating,
                or `input_ids` has more columns than the model has positions.
        """
        seen = set() if seen is None else seen
        for name, value in [*zip(self.positions, batch.args, strict=False), *batch.kwargs.items()]:
            number = self.num_ids.get(name)
            if number is not None and isinstance(value, torch.Tensor) and value.is_floating_point():
                raise ValueError(
                    f"{what}: {name} is of {value.dtype}, and the model takes ids, whole numbers from 0 to "
                    f"{number - 1}: convert it to int64; in data, convert its column, or use collate_fn="
                )
            is_text = name == "input_ids" and isinstance(value, torch.Tensor) and value.ndim > 0
            length = value.shape[-1] if is_text and "position_ids" not in batch.kwargs else 0
            if self.num_positions is not None and length > self.num_positions:
                raise ValueError(
                    f"{what}: input_ids has {length} columns, and the model has {self.num_positions} positions: cut "
                    f"longer texts, tokenizer(..., truncation=True, max_length={self.num_positions})"
                )
            cure = _CURE
            if number is None and name == "labels":
                number, cure = self.num_classes, "give config_overrides={'num_labels': ...}, or count classes from 0"
            if number is None or not _holds_ids(value) or id(value) in seen:
                continue
            seen.add(id(value))
            # The error counts a rank's rows of a Split from the first row of the whole batch.
            start = 0 if batch.num_rows is None else sum(batch.rows[:rank])
            problem = _unknown(value, number, name == "labels", batch.dim, start)
            if problem is not None:
                raise ValueError(f"{what}: {name} holds {problem}: {cure}")


def _is_indexed_in_order(embedding: nn.Embedding, config: Any) -> bool:
    """Return True if a model's positions are 0, 1, ... by the columns of `input_ids`, and end with the embedding."""
    is_known = type(embedding) is nn.Embedding or hasattr(embedding, "offset")
    return is_known and getattr(config, "model_type", "") != "tapas"  # whose positions restart in each cell


def _base(module: Any) -> Any:
    """Return the module that a peft layer wraps; `module` if it is no peft layer."""
    for inner in ("base_layer", "original_module"):
        module = getattr(module, inner, module)
    return module


def _holds_ids(value: Any) -> bool:
    whole = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() > 0
    return whole and not value.is_floating_point() and not value.is_complex() and value.dtype is not torch.bool


def _unknown(ids: torch.Tensor, number: int, is_label: bool, dim: int, start: int) -> str | None:
    """Return a description of the first id out of range; `None` if all ids are in range."""
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
    masked = f", or {MASKED_LABEL} for labels that the loss ignores" if is_label else ""
    return f"{int(ids[tuple(place)])}{row}, and the model has the ids 0 to {number - 1}{masked}"
