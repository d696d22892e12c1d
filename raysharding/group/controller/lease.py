"""`end_without_renewal`: ends a group whose drivers have not renewed its lease.

Note [Lease]: Ray frees the ranks of a driver that died, but not the ranks of a frozen driver (SIGSTOP, a debugger, a
paused machine) or of a named group. A lease frees these. A driver renews it by its poll for the group's state, on a
thread, which does not wait for a busy main thread (a main thread that keeps the interpreter lock is a frozen driver).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from raysharding.group.controller.drivers import Drivers

_TICKS = 20  # looks per lease time
_MAX_TICK_S = 1.0


async def end_without_renewal(
    lease_s: float, drivers: Drivers, name: str, on_expired: Callable[[str], Awaitable[None]]
) -> None:
    """Wait until no driver has polled for `lease_s`, and call `on_expired` with the reason.

    Time in which this process did not run counts as two ticks at most: polls of that time are in its queue.
    """
    tick_s = min(_MAX_TICK_S, lease_s / _TICKS)
    left_s, heard = lease_s, drivers.last_heard
    while left_s > 0:
        begun = time.monotonic()
        await asyncio.sleep(tick_s)
        left_s -= min(time.monotonic() - begun, 2 * tick_s)
        if drivers.last_heard != heard:
            left_s, heard = lease_s, drivers.last_heard
    await on_expired(f"no driver has renewed the lease of {lease_s:g} s of {name}: the group ends")
