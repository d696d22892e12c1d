"""`raised_by`: the error that the caller of a failed call gets."""

from __future__ import annotations

from raysharding.errors import RayshardingError, caught_as
from raysharding.group.messages import Outcome


def raised_by(outcome: Outcome) -> RayshardingError | None:
    """Return the error of a failed call; `None` if it succeeded.

    The error of the rank that failed first, if it is this package's (`PlanError`); else the group's error. If all ranks
    raised the same builtin type, `except` of that type also catches it.
    """
    error = outcome.error
    original = None if outcome.raised is None else outcome.raised.exception()
    if error is None or original is None:
        return error
    if isinstance(original, RayshardingError):
        original.__cause__ = error
        return original
    error.__cause__ = original
    return caught_as(error, type(original)) if outcome.is_common else error
