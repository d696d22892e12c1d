"""Questions that every rank is asked at once, beside the calls: under one deadline, and some may stay silent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from raysharding.group.ranks import Member


@dataclass(frozen=True)
class Answers:
    """What the ranks said."""

    said: Mapping[int, Any]
    """Rank → its answer."""
    silent: Mapping[int, str]
    """Rank → why there is no answer of it."""


def ask_all(members: Sequence[Member], method: str, *args: Any, within_s: float) -> Answers:
    """Ask every rank.

    Args:
        members: By rank.
        method: A control method of `RankActor`.
        args: Its arguments.
        within_s: Deadline for all answers together.
    """
    until = time.monotonic() + within_s
    refs = [getattr(member.actor, method).remote(*args) for member in members]
    said: dict[int, Any] = {}
    silent: dict[int, str] = {}
    for rank, ref in enumerate(refs):
        try:
            said[rank] = ray.get(ref, timeout=max(0.0, until - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            silent[rank] = f"does not answer within {within_s:g} s"
        except ray.exceptions.RayActorError:
            silent[rank] = "its process is gone"
        except ray.exceptions.RayError as error:
            silent[rank] = f"cannot answer: {error}"
    return Answers(said, silent)
