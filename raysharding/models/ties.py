"""`differing_ties`: tied tensors of which the checkpoint holds two different values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from raysharding.models.key_mapping import KeyMap, Target

COMPARE_BYTES = 8 << 20
"""Bytes of each of the two values that are in memory at a time."""

ReadElements: TypeAlias = Callable[[str, int, int, torch.Tensor], None]
"""`read(fqn, start, stop, out)`: fill the 1-D `out` with elements of the flattened target, in `out`'s dtype."""


def differing_ties(keys: KeyMap, read: ReadElements) -> tuple[str, ...]:
    """Compare the values of tied names that are both in the checkpoint; for the rank that reads the files.

    transformers does not tie a pair whose values differ, whatever config.json says; here it is a mismatch to be named
    before anything is loaded. Values are compared in the module's dtype, and up to the first difference.

    Args:
        keys: From `map_keys`.
        read: Reads elements of the targets in `keys.targets` and `keys.doubled`.

    Returns:
        One line for each pair that differs. Cost: both values are read once, 16 MiB of memory.
    """
    problems = []
    for second in keys.doubled:
        canonical = keys.aliases[second.fqn]
        if not _equal(second, canonical, read):
            sources = [", ".join(map(repr, target.sources[:2])) for target in (keys.targets[canonical], second)]
            problems.append(
                f"{second.fqn}: the model ties it to {canonical}, but the checkpoint's {sources[0]} and {sources[1]} "
                "hold different values: set tie_word_embeddings to false in config.json, or pass model= a callable "
                "whose model does not tie them; if they should be tied, remove one of the two from the checkpoint"
            )
    return tuple(problems)


def _equal(second: Target, canonical: str, read: ReadElements) -> bool:
    num_elements = math.prod(second.shape)
    step = COMPARE_BYTES // second.dtype.itemsize
    buffers = [torch.empty(min(step, num_elements), dtype=second.dtype) for _ in range(2)]
    for start in range(0, num_elements, step):
        stop = min(start + step, num_elements)
        values = [buffer[: stop - start] for buffer in buffers]
        for fqn, value in zip((canonical, second.fqn), values, strict=True):
            read(fqn, start, stop, value)
        # By bytes first: equal NaNs are no difference. By values then: neither are 0 and -0.
        as_bytes = [value.view(torch.uint8) for value in values]
        if not torch.equal(*as_bytes) and not torch.equal(*values):
            return False
    return True
