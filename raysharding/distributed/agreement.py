"""Ranks agree on whether a step went well, so that all of them raise or none does."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from raysharding import errors
from raysharding.distributed.metadata import all_gather_json
from raysharding.errors import RayshardingError


def _describe(error: BaseException) -> dict[str, Any]:
    """An error as JSON: one of ours with its fields, any other by type and message."""
    if isinstance(error, RayshardingError):
        fields = {name: getattr(error, name) for name in error._fields}
        try:
            json.dumps(fields)
        except TypeError:
            fields = {"message": str(error)}
        return {"type": type(error).__name__, "fields": fields}
    return {"type": "", "fields": {"message": f"{type(error).__name__}: {error}"}}


def _rebuild(rank: int, description: dict[str, Any]) -> RayshardingError:
    cls = getattr(errors, description["type"], RayshardingError)
    fields = dict(description["fields"])
    fields["message"] = f"{fields['message']} (on rank {rank})"
    error: RayshardingError = cls(**fields)
    return error


def agree(error: BaseException | None, value: Any = None, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Exchange outcomes; collective over `group`.

    Args:
        error: What went wrong on this rank, or `None`.
        value: JSON value to share when all went well.
        group: Process group, the default group if `None`.

    Returns:
        Every rank's value, in rank order.

    Raises:
        Exception: `error` itself on a rank that has one; on the others an equal error of ours that names the first
            failing rank (`RayshardingError` if the original is not one of ours).
    """
    # Every rank comes here whatever happened to it: a rank that raised before would leave the others waiting.
    outcomes = all_gather_json({"error": None if error is None else _describe(error), "value": value}, group)
    if error is not None:
        raise error
    for rank, outcome in enumerate(outcomes):
        if outcome["error"] is not None:
            raise _rebuild(rank, outcome["error"])
    return [outcome["value"] for outcome in outcomes]
