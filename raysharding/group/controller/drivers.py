"""`Drivers`: the drivers that use a group, each with its calls in its own order, and the lock on the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import ray

from raysharding.errors import GroupError
from raysharding.group.controller.members import start
from raysharding.group.messages import Submission

_TICKS = 20  # looks per lease time
_MAX_TICK_S = 1.0
ACCUMULATION: Final = "forward_backward"
"""Kind of the lock that a driver holds whose `forward_backward` has left gradients for the next update."""
_CURES: Final = {ACCUMULATION: "optim_step or zero_grad ends it"}


@dataclass(eq=False)
class Driver:
    """One handle of the group in some process."""

    key: str
    """Random key of the handle."""
    label: str
    """Where it runs, for errors."""
    next_number: int = 0
    """Number of its next call."""
    early: dict[int, asyncio.Event] = field(default_factory=dict)
    """Number → set when it is the turn of a call that arrived before those in front of it: Ray keeps no order."""
    dropped_by: str = ""
    """The call that has dropped the gradients of its accumulation, until an error says so; else empty."""

    def wake(self) -> None:
        """End the waits of its calls that arrived early."""
        for event in self.early.values():
            event.set()


@dataclass(frozen=True, slots=True)
class ModelLock:
    """The right of one driver's `fit`, `predict` or accumulation to be the only one that changes the model."""

    driver: Driver
    """Its holder."""
    what: str
    """Kind: `fit`, `predict` or `forward_backward`."""
    key: str
    """Identifies the calls that belong to it."""


class Drivers:
    """The drivers of one group."""

    def __init__(self, name: str, on_lost: Callable[[Driver], None]) -> None:
        """Begin without drivers.

        Args:
            name: Name of the group in errors.
            on_lost: Called when a driver's process has ended, or it has detached.
        """
        self.lock: ModelLock | None = None
        """The lock on the model; `None` if no driver holds it."""
        self.is_orphaned = False
        """True if the ranks hold gradients of a driver that is gone."""
        self._gone: dict[str, asyncio.Event] = {}
        self._name = name
        self._on_lost = on_lost
        self._drivers: dict[str, Driver] = {}
        self._last_heard = time.monotonic()

    def __getitem__(self, key: str) -> Driver:
        """Return a driver.

        Raises:
            GroupError: It is unknown: this controller is another than the one that it attached to.
        """
        if key not in self._drivers:
            raise GroupError(f"{self._name}: its controller was restarted, and does not know this driver yet")
        return self._drivers[key]

    def add(self, key: str, label: str, owned: Sequence[ray.ObjectRef], before: str | None = None) -> None:
        """Add a driver.

        Args:
            key: Random key of its handle.
            label: Where it runs, for errors.
            owned: The result of `until_gone`, which its process owns: Ray reports the end of the owner.
            before: Its key before it connected again: calls that were under way have failed there.
        """
        if before is not None:
            self._forget(before)
        driver = self._drivers[key] = Driver(key, label)
        start(self._watch(driver, owned[0]))

    def has(self, driver: Driver) -> bool:
        """Return True unless a driver is gone."""
        return self._drivers.get(driver.key) is driver

    def remove(self, key: str) -> None:
        """Forget a driver, its lock included."""
        driver = self._forget(key)
        if driver is not None:
            self._on_lost(driver)

    def _forget(self, key: str) -> Driver | None:
        driver = self._drivers.pop(key, None)
        if driver is not None:
            if self.lock is not None and self.lock.driver is driver:
                self.is_orphaned = self.lock.what == ACCUMULATION
                self.lock = None
            driver.wake()
            if (gone := self._gone.pop(key, None)) is not None:
                gone.set()
        return driver

    async def until_gone(self, key: str) -> None:
        """Wait until a driver has detached; it need not be known yet."""
        await self._gone.setdefault(key, asyncio.Event()).wait()

    async def turn(self, driver: Driver, number: int) -> bool:
        """Wait until all calls of a driver before this one have arrived; return False if the driver is gone."""
        if number > driver.next_number:
            await driver.early.setdefault(number, asyncio.Event()).wait()
        return self.has(driver)

    def arrived(self, driver: Driver) -> None:
        """Note that the next call of a driver has arrived."""
        driver.next_number += 1
        event = driver.early.pop(driver.next_number, None)
        if event is not None:
            event.set()

    def heard(self, key: str) -> None:
        """Note that a driver has polled."""
        self[key]  # which raises for an unknown driver
        self._last_heard = time.monotonic()

    async def wait_silent(self, lease_s: float) -> None:
        """Wait until no driver has polled for `lease_s`.

        Note [Lease]: Ray frees the ranks of a driver that died, but not the ranks of a frozen driver (SIGSTOP, a
        debugger, a paused machine) or of a named group. A lease frees these. A driver renews it by its poll for the
        group's state, on a thread, which does not wait for a busy main thread (a main thread that keeps the interpreter
        lock is a frozen driver). Time in which this process did not run counts as two ticks at most: polls of that time
        are in its queue.
        """
        tick_s = min(_MAX_TICK_S, lease_s / _TICKS)
        left_s, heard = lease_s, self._last_heard
        while left_s > 0:
            begun = time.monotonic()
            await asyncio.sleep(tick_s)
            left_s -= min(time.monotonic() - begun, 2 * tick_s)
            if self._last_heard != heard:
                left_s, heard = lease_s, self._last_heard

    def take_lock(self, driver: Driver, what: str, key: str) -> GroupError | None:
        """Give a driver the lock, or return why it cannot have it."""
        if self.lock is not None and self.lock.key != key:
            return GroupError(
                f"{self._name}: {what} is refused while {self._holder(driver)} runs: a rank has the data of one run at "
                f"a time; {_CURES.get(self.lock.what, 'wait for its end, or call interrupt() there')}"
            )
        self.lock = ModelLock(driver, what, key)
        return None

    def release_lock(self, key: str) -> None:
        """Release the lock, if it has this key."""
        if self.lock is not None and self.lock.key == key:
            self.lock = None

    def end_accumulation(self) -> None:
        """Release the lock of an open accumulation: its gradients are gone with the ranks."""
        self.is_orphaned = False
        if self.lock is not None and self.lock.what == ACCUMULATION:
            self.lock = None

    def note_accumulation(self, driver: Driver, method: str, *, is_open: bool) -> None:
        """Note after a call whether the ranks hold gradients for the next update: its driver then has the lock.

        Args:
            driver: The driver of the call.
            method: Name of the call.
            is_open: True if the ranks hold gradients.
        """
        held = self.lock
        if not is_open and held is not None and held.what == ACCUMULATION:
            self.lock = None
            if held.driver is not driver:
                held.driver.dropped_by = f"{method} of {driver.label}"
        elif is_open and held is None and not self.has(driver):
            self.is_orphaned = True
        elif is_open and held is None and not self.is_orphaned:
            self.lock = ModelLock(driver, ACCUMULATION, driver.key)

    def refusal_of_turn(self, driver: Driver, call: Submission) -> GroupError | None:
        """Return why a call is refused when its turn comes, by what became of accumulations since it was accepted."""
        if call.refused_beside:
            dropped_by, driver.dropped_by = driver.dropped_by, ""
            if dropped_by and call.uses_gradients:
                what = f"{call.method} is refused: {dropped_by} has dropped the gradients of this accumulation"
                return GroupError(f"{self._name}: {what}; call forward_backward for all its batches again")
        beside = {kind: why for kind, why in call.refused_beside.items() if kind == ACCUMULATION}
        return self.refusal(driver, call.method, beside)

    def refusal(self, driver: Driver, method: str, beside: Mapping[str, str]) -> GroupError | None:
        """Return why a call is refused beside the lock; `None` if it is not.

        Args:
            driver: The driver that submits the call.
            method: Name of the call.
            beside: Kind of a lock → why the call must not run beside it.
        """
        held = self.lock
        if held is None or held.what not in beside:
            return None
        if held.what == ACCUMULATION and held.driver is driver:
            return None  # the accumulation is this driver's own
        why = beside[held.what]
        return GroupError(f"{self._name}: {method} is refused while {self._holder(driver)} runs: {why}")

    def refusal_of_restart(self, driver: Driver, *, is_broken: bool) -> GroupError | None:
        """Return why a driver must not restart the ranks: another driver's lock; `None` if it may."""
        if self.lock is None or self.lock.driver is driver:
            return None
        why = "it restarts them itself, or ends" if is_broken else "its ranks are whole"
        return GroupError(f"{self._name}: restart is refused while {self._holder(driver)} runs: {why}")

    def _holder(self, asking: Driver) -> str:
        assert self.lock is not None, "asked while there is one"
        what = "an open accumulation" if self.lock.what == ACCUMULATION else self.lock.what
        return what if self.lock.driver is asking else f"{what} of {self.lock.driver.label}"

    async def _watch(self, driver: Driver, owned: ray.ObjectRef) -> None:
        try:
            await owned
        except ray.exceptions.RayError:
            if self._drivers.get(driver.key) is driver:
                self.remove(driver.key)
