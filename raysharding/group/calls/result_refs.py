"""`ref_of`: an `ObjectRef` that gets a call's result when the call ends.

Ray has no object that is filled in later, except the return value of a task that runs until then. So an actor without
resources, one for all such calls of this driver, waits inside a method for each of them. It ends with the last one.

It is not the controller: a `fit` may go on with another controller, and `shutdown` ends every controller. It is not a
task for each call: Ray starts a process for each task that waits.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import ray

from raysharding.errors import GroupError

_MAX_WAITING = 10_000
_RETURN_S = 600.0
_making = threading.Lock()
_keys = itertools.count()
_keepers: WeakValueDictionary[str, Any] = WeakValueDictionary()


class ResultKeeper:
    """Actor that returns each result when it is told the result. Its methods run on one event loop."""

    def __init__(self) -> None:
        """Begin without results."""
        self._results: defaultdict[int, asyncio.Future[Any]] = defaultdict(asyncio.Future)

    async def wait(self, key: int) -> Any:
        """Return the result of a call, or raise its error."""
        try:
            return await self._results[key]
        finally:
            self._results.pop(key, None)

    async def tell(self, key: int, value: Any, error: BaseException | None) -> None:
        """Give the result, or the error, to `wait`."""
        if error is None:
            self._results[key].set_result(value)
        else:
            self._results[key].set_exception(error)


def ref_of(name: str, when_done: Callable[[Callable[[Any], None]], None], result: Callable[[], Any]) -> ray.ObjectRef:
    """Return a reference to the result of a call.

    Args:
        name: Name of the method, for errors.
        when_done: Takes a function that is to run at the end of the call.
        result: Returns the result, or raises the call's error, after the end of the call.
    """
    keeper, key = _keeper(), next(_keys)
    ref: ray.ObjectRef = keeper.wait.remote(key)
    # Taken out by `tell`: the call keeps the function, and is kept by the user.
    held = [(keeper, ref)]
    del keeper

    def tell() -> None:
        keeper, waiting = held.pop()
        try:
            value, error = result(), None
        except BaseException as raised:  # noqa: BLE001 - raised by `ray.get`, which would otherwise wait forever
            value, error = None, raised
        if ray.is_initialized():
            try:
                keeper.tell.remote(key, value, error)
            except Exception as failed:  # noqa: BLE001 - pickling runs the value's own code, which may raise anything
                what = f"the result of {name}, or its error, cannot be pickled: {failed}"
                keeper.tell.remote(key, None, GroupError(what if error is None else f"{what}; it was: {error}"))
            # The actor ends with its last handle, which this function holds.
            ray.wait([waiting], timeout=_RETURN_S, fetch_local=False)

    # A thread: `result` may fetch large values, and the thread that ends calls serves all calls of the group.
    when_done(lambda _: threading.Thread(target=tell, name="raysharding-ref", daemon=True).start())
    return ref


def _keeper() -> Any:
    with _making:
        job = ray.get_runtime_context().get_job_id()
        keeper = _keepers.get(job)
        if keeper is None:
            make: Any = ray.remote(ResultKeeper)
            # Without concurrency groups, each of which would have an event loop of its own.
            keeper = make.options(num_cpus=0, max_concurrency=_MAX_WAITING).remote()
            _keepers[job] = keeper
        return keeper
