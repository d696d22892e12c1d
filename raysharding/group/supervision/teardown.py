"""Taking a group down: actors are stopped, the placement group goes back, and at exit nothing stays."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import ray

from raysharding.group.ranks import Member

_STOP_S = 3.0


class Closable(Protocol):
    """What has something to do when the program ends."""

    def leave(self) -> None:
        """Do it, and wait until it is done."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # they are the parent's


def close_at_exit(closable: Closable) -> None:
    """Have something leave when the program ends, before Ray's own exit: this module is imported after Ray."""
    _open.add(closable)


@atexit.register
def _close_all() -> None:
    for closable in list(_open):
        closable.leave()


class Teardown:
    """The actors and the placement group of one group, to be stopped once."""

    def __init__(self, members: Sequence[Member], release: Callable[[], None]) -> None:
        """Remember what there is to stop.

        Args:
            members: By rank.
            release: Gives the placement group back.
        """
        self._members = members
        self._release = release
        self._session = _ray_session()
        self._is_stopped = False
        self.is_let_go = False

    def has_ray(self) -> bool:
        """Whether the Ray that runs the ranks is still connected; after a new `ray.init()` it is not."""
        return _ray_session() == self._session

    def let_go(self) -> None:
        """Leave the actors and the placement group to another driver: `stop` will do nothing."""
        self._is_stopped = self.is_let_go = True

    def stop(self, *, gcs_answers: bool = True) -> None:
        """Stop the actors and give the placement group back.

        Args:
            gcs_answers: Whether the GCS answers. Without it Ray stops nothing and waits, so the ranks are asked to end
                at once; otherwise after 3 s.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        if not self.has_ray():
            return  # Ray's own shutdown has ended the job, and the actors with it
        stopping = threading.Thread(target=self._stop, name="stop ranks", daemon=True)
        stopping.start()
        stopping.join(_STOP_S if gcs_answers else 0.0)
        if stopping.is_alive():
            for member in self._members:
                member.actor.end.remote()  # goes from process to process; Ray's head has no part in it

    def stop_some(self, ranks: Collection[int]) -> None:
        """Stop some actors and keep the others; waits for nothing."""
        if ranks and not self._is_stopped and self.has_ray():
            threading.Thread(target=self._kill, args=(ranks,), name="stop lost ranks", daemon=True).start()

    def _kill(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            if self.has_ray():  # it may have been shut down meanwhile: Ray would start another one
                ray.kill(self._members[rank].actor, no_restart=True)

    def _stop(self) -> None:
        self._kill(range(len(self._members)))
        if self.has_ray():
            self._release()


def _ray_session() -> tuple[str, str] | None:
    """What tells this program's connection to Ray from one before or after it; `None` without one."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()  # a new cluster counts its jobs from the start
