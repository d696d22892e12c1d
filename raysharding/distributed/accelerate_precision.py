"""Mixed precision as accelerate's plugin takes it: names, dtypes and dicts to torch's policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

_DTYPES = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_ALLOWED = tuple(dict.fromkeys(_DTYPES.values()))


def precision_dtype(given: Any) -> Any:
    """The dtype that a name means; dtypes and `None` as they are.

    Raises:
        ValueError: Another name or dtype.
    """
    if isinstance(given, str):
        if given not in _DTYPES:
            raise ValueError(f"mixed precision {given!r}: use one of {', '.join(_DTYPES)}")
        return _DTYPES[given]
    if given is not None and given not in _ALLOWED:
        raise ValueError(f"mixed precision {given!r}: use one of {', '.join(map(str, _ALLOWED))}, or a name for one")
    return given


def policy_of_dtype(
    fsdp_version: int | None, dtype: torch.dtype | None, buffer_autocast: bool
) -> MixedPrecision | MixedPrecisionPolicy:
    """The version's policy with one dtype throughout; in version 1 buffers in fp32 under `buffer_autocast`."""
    if fsdp_version == 2:
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    return MixedPrecision(
        param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=torch.float32 if buffer_autocast else dtype
    )


def policy_of_dict(fsdp_version: int | None, dtypes: Mapping[str, Any]) -> MixedPrecision | MixedPrecisionPolicy:
    """The version's policy from a dict.

    Raises:
        ValueError: A key is missing or not the version's, or a value is no dtype that accelerate takes.
    """
    names = ("param_dtype", "reduce_dtype", "output_dtype" if fsdp_version == 2 else "buffer_dtype")
    wrong = [f"{name}={value!r}" for name, value in dtypes.items() if name not in names or value not in _ALLOWED]
    missing = [name for name in names if name not in dtypes]
    if wrong or missing:
        parts = [f"{title} {', '.join(found)}" for title, found in (("wrong", wrong), ("missing", missing)) if found]
        raise ValueError(
            f"mixed_precision_policy: {'; '.join(parts)}; fsdp_version={fsdp_version} takes a dict of "
            f"{', '.join(names)}, each one of {', '.join(map(str, _ALLOWED))}"
        )
    kind: Callable[..., Any] = MixedPrecisionPolicy if fsdp_version == 2 else MixedPrecision
    policy: MixedPrecision | MixedPrecisionPolicy = kind(**dtypes)
    return policy
