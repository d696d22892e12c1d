"""Teardown of a group: stop the actors, remove the placement group, also at the exit of the program."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import ray

from raysharding.group.cluster import client_session, tell
from raysharding.group.ranks import Member

_STOP_S = 3.0


class Closable(Protocol):
    """An object that must clean up when the program ends."""

    def leave(self) -> None:
        """Clean up, and wait until that is done."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # they belong to the parent process


def close_at_exit(closable: Closable) -> None:
    """Call `closable.leave()` at exit, before Ray's exit handlers: this module is imported after Ray."""
    _open.add(closable)


@atexit.register
def _close_all() -> None:
    for closable in list(_open):
        closable.leave()


class Teardown:
    """Stops the actors of one group and removes its placement group, once."""

    def __init__(self, members: Sequence[Member], release: Callable[[], None]) -> None:
        """Record the actors.

        Args:
            members: Members, by rank.
            release: Removes the placement group.
        """
        self._members = members
        self._release = release
        self._session = _ray_session()
        self._is_stopped = False
        self.is_let_go = False

    def has_ray(self) -> bool:
        """Return True if the Ray session of the ranks is still connected; after a new `ray.init()` it is not."""
        return _ray_session() == self._session

    def let_go(self) -> None:
        """Leave the actors and the placement group to another driver; `stop` then does nothing."""
        self._is_stopped = self.is_let_go = True

    def stop(self, *, gcs_answers: bool = True) -> None:
        """Stop the actors and remove the placement group.

        Args:
            gcs_answers: True if the GCS answers. Without the GCS Ray cannot stop actors, and waits: the ranks are told
                to exit at once, else after 3 s.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        if not self.has_ray():
            return  # the shutdown of Ray has ended the job and its actors
        stopping = threading.Thread(target=self._stop, name="stop ranks", daemon=True)
        stopping.start()
        stopping.join(_STOP_S if gcs_answers else 0.0)
        if stopping.is_alive() and client_session() is None:  # Ray Client would ask the head for this, too
            for member in self._members:
                member.actor.end.remote()  # from process to process, without the GCS

    def stop_some(self, ranks: Collection[int]) -> None:
        """Stop some actors and keep the others; does not wait."""
        if ranks and not self._is_stopped and self.has_ray():
            threading.Thread(target=self._kill, args=(ranks,), name="stop lost ranks", daemon=True).start()

    def _kill(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            if self.has_ray():  # after ray.shutdown(), ray.kill would start Ray anew
                with contextlib.suppress(ConnectionError):  # Ray Client's, whose server then ends the job
                    ray.kill(self._members[rank].actor, no_restart=True)

    def _stop(self) -> None:
        self._kill(range(len(self._members)))
        with contextlib.suppress(ConnectionError):
            if self.has_ray():
                self._release()
        name = self._members[0].name if self._members else None
        if name is not None and not self.has_ray():
            group = name.rpartition("/")[0]
            tell(f"{group}: the connection to Ray was lost while the group was shut down: it may still run; attach it")


def _ray_session() -> tuple[str, str] | None:
    """Return an identifier of this program's Ray session; `None` without one."""
    client = client_session()
    if client is not None or not ray.is_initialized():
        return client
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()  # job ids alone repeat in a new cluster
