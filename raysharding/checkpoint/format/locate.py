"""`locate`: what the user named, as a path or URI that means the same files in every process, now and later."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from typing import Final

from raysharding.checkpoint.format.index import resolve_files
from raysharding.checkpoint.storage import (
    DEFAULT_REMOTE,
    HubPath,
    LocalStorage,
    Requests,
    hub_is_offline,
    is_remote,
)
from raysharding.errors import CheckpointError

_CACHED_S: Final = 10.0
"""Longest wait, in seconds, for a hub that may be out of reach, where the cache holds the revision."""
_log = logging.getLogger("raysharding")


def locate(given: str, revision: str | None = None, *, weights: bool = True) -> str:
    """Find a model of the hub, and pin its commit; return any other path or URI as it is.

    A path that exists wins. Else the hub is asked once for the commit of the revision: the result is the snapshot of
    this commit in this machine's Hugging Face cache, or the URI `hf://org/name@commit`. If the hub cannot be asked, the
    snapshot that the cache holds for the revision counts.

    Args:
        given: A hub id (`org/name`), a path or a URI.
        revision: Branch, tag or commit of a hub id; default `main`.
        weights: True if a snapshot without the weights does not count.

    Raises:
        ValueError: A revision for what is no hub id.
        CheckpointError: Offline and not cached, gated, or no such model or revision; names the cure.
    """
    hub = HubPath.of(given)
    is_id = hub is not None and not is_remote(given) and not os.path.lexists(given)
    if revision is not None:
        if not is_id:
            what = "is a path that exists" if os.path.lexists(given) else "is no hub id, 'org/name'"
            raise ValueError(f"revision={revision!r}, but {given!r} {what}: leave the revision out")
        # As in git's names: `huggingface_hub` joins a revision to the path of its cache.
        if type(revision) is not str or not re.fullmatch(r"(?!/|.*\.\.)[\x21-\x7e]+", revision):
            raise CheckpointError(f"revision={revision!r}: give a branch, a tag or a commit", path=given)
    if hub is None or not (is_id or is_remote(given)):
        return given
    if not is_id:
        return replace(hub, revision=_commit(hub, None)).uri
    hub = replace(hub, revision=revision)
    pinned = replace(hub, revision=_commit(hub, _cached(hub, weights=weights)))
    return _cached(pinned, weights=weights) or pinned.uri


def seen_here(path: str) -> str:
    """Return where this machine reads a commit of the hub that another machine located; any other path as it is.

    If the other machine's snapshot is not visible here, or lacks weights here: the snapshot in this machine's Hugging
    Face cache, or the URI.
    """
    hub = HubPath.of_pinned(path)
    if hub is None or (os.path.exists(path) and _has_weights(path)):
        return path
    return _cached(hub, weights=True) or hub.uri


def _cached(hub: HubPath, *, weights: bool) -> str | None:
    """Return the snapshot of a revision in the cache; `None` if there is none, or if it lacks weights."""
    snapshot = hub.cached()
    return snapshot if snapshot is None or not weights or _has_weights(snapshot) else None


def _has_weights(snapshot: str) -> bool:
    """Return True if all weight files of a snapshot are there."""
    try:
        resolve_files(LocalStorage(), snapshot)
    except CheckpointError as error:
        _log.info("the cached snapshot %s is not used: %s", snapshot, error)
        return False
    return True


def _commit(hub: HubPath, snapshot: str | None) -> str:
    """Return the commit of a revision: the hub's, or the cached snapshot's if the hub cannot be asked."""
    held = None if snapshot is None else HubPath.of_pinned(snapshot)
    if held is not None and hub_is_offline():
        return str(held.revision)

    def ask() -> str:
        try:
            return hub.commit(_CACHED_S if held is not None else DEFAULT_REMOTE.request_s)
        except OSError as error:
            if held is None:
                raise
            _log.warning("%s: %s; the cached commit %s is used", hub.repo, error, held.revision)
            return str(held.revision)

    return Requests(DEFAULT_REMOTE).call(hub.uri, "asking the hub for its commit", ask)
