"""`Drivers`: the drivers that use a group, each with its calls in its own order, and the claims that they hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ray

from raysharding.errors import GroupError
from raysharding.group.controller.members import start


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

    def wake(self) -> None:
        """End the waits of its calls that arrived early."""
        for event in self.early.values():
            event.set()


@dataclass(frozen=True, slots=True)
class Claim:
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
        self.claim: Claim | None = None
        self._name = name
        self._on_lost = on_lost
        self._drivers: dict[str, Driver] = {}
        self.last_heard = time.monotonic()
        """When a driver last polled."""

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
            owned: One object that its process owns and never makes: Ray reports the end of the owner.
            before: Its key before it connected again: calls that were under way have failed there.
        """
        if before is not None:
            self._forget(before)
        driver = self._drivers[key] = Driver(key, label)
        start(self._watch(driver, owned[0]))

    def remove(self, key: str) -> None:
        """Forget a driver, its claim included."""
        driver = self._forget(key)
        if driver is not None:
            self._on_lost(driver)

    def _forget(self, key: str) -> Driver | None:
        driver = self._drivers.pop(key, None)
        if driver is not None:
            if self.claim is not None and self.claim.driver is driver:
                self.claim = None
            driver.wake()
        return driver

    async def turn(self, driver: Driver, number: int) -> bool:
        """Wait until all calls of a driver before this one have arrived; return False if the driver is gone."""
        if number > driver.next_number:
            await driver.early.setdefault(number, asyncio.Event()).wait()
        return self._drivers.get(driver.key) is driver

    def arrived(self, driver: Driver) -> None:
        """Note that the next call of a driver has arrived."""
        driver.next_number += 1
        event = driver.early.pop(driver.next_number, None)
        if event is not None:
            event.set()

    def heard(self, driver: Driver) -> None:
        """Note that a driver has polled."""
        self.last_heard = time.monotonic()

    def take_claim(self, driver: Driver, what: str, key: str) -> GroupError | None:
        """Give a driver a claim, or return why it cannot have it."""
        if self.claim is not None and self.claim.key != key:
            return GroupError(
                f"{self._name}: {what} is refused while {self._holder(driver)} runs: a rank has the data of one run at "
                "a time; wait for its end, or call interrupt() there"
            )
        self.claim = Claim(driver, what, key)
        return None

    def release_claim(self, key: str) -> None:
        """End a claim."""
        if self.claim is not None and self.claim.key == key:
            self.claim = None

    def end_accumulation(self) -> None:
        """End the claim of an open accumulation: its gradients are gone with the ranks."""
        if self.claim is not None and self.claim.what == "forward_backward":
            self.claim = None

    def refusal(self, driver: Driver, method: str, beside: Mapping[str, str]) -> GroupError | None:
        """Return why a call is refused beside a claim; `None` if it is not.

        Args:
            driver: The driver that submits the call.
            method: Name of the call.
            beside: Kind of a claim → why the call must not run beside it.
        """
        held = self.claim
        if held is None or held.what not in beside:
            return None
        if held.what == "forward_backward" and held.driver is driver:
            return None  # the accumulation is this driver's own
        why = beside[held.what]
        return GroupError(f"{self._name}: {method} is refused while {self._holder(driver)} runs: {why}")

    def refusal_of_restart(self, driver: Driver) -> GroupError | None:
        """Return why a driver must not restart ranks that are whole: another driver's claim; `None` if it may."""
        if self.claim is None or self.claim.driver is driver:
            return None
        return GroupError(f"{self._name}: restart is refused while {self._holder(driver)} runs: its ranks are whole")

    def _holder(self, asking: Driver) -> str:
        assert self.claim is not None, "asked while there is one"
        what = "an open accumulation" if self.claim.what == "forward_backward" else self.claim.what
        return what if self.claim.driver is asking else f"{what} of {self.claim.driver.label}"

    async def _watch(self, driver: Driver, owned: ray.ObjectRef) -> None:
        try:
            await owned
        except ray.exceptions.RayError:
            if self._drivers.get(driver.key) is driver:
                self.remove(driver.key)
