"""`fetched`: puts the values of `ObjectRef`s in their place among a call's arguments, on all ranks or on none."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import ray

from raysharding.batch import RankBatch, as_tensors
from raysharding.distributed.comm import agreeing
from raysharding.errors import GroupError


def fetched(batch: RankBatch, method: str) -> RankBatch:
    """Return the batch with the values of its `ObjectRef`s; collective if any rank's batch has one.

    The ranks of a node read one copy from the node's object store. A model gets arrays as tensors.

    Args:
        batch: This rank's batch.
        method: Name of the call.

    Raises:
        GroupError: A rank cannot fetch a value. All ranks raise it, before the call has done anything.
    """
    if batch.fetch_s is None:
        return batch
    until = time.monotonic() + batch.fetch_s
    with agreeing():
        args = [_value(f"args[{index}]", value, method, until) for index, value in enumerate(batch.wrapped_args)]
        kwargs = {name: _value(name, value, method, until) for name, value in batch.wrapped_kwargs.items()}
        batch = replace(batch, wrapped_args=tuple(args), wrapped_kwargs=kwargs)
    return batch


def _value(name: str, value: Any, method: str, until: float) -> Any:
    if not isinstance(value, ray.ObjectRef):
        return value
    try:
        found = ray.get(value, timeout=max(0.0, until - time.monotonic()))
    except Exception as error:  # a task's error is also of the user's own type: this is the boundary to its code
        raise GroupError(f"{method}: the value of the ObjectRef {name} cannot be fetched: {error}") from error
    return found if method == "call" else as_tensors(name, found)
