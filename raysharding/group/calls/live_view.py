"""`LiveView`: a group's state, and its ranks' activity and memory, drawn again and again by a thread of its own."""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from raysharding.group.calls.client import Client
from raysharding.group.calls.inspection import STATUS_S, rank_statuses
from raysharding.group.cluster import Picture, open_screen, status_table
from raysharding.group.messages import GroupState
from raysharding.report import Table

_STOP_S = STATUS_S + 1.0
_COLUMNS = "rank", "node_ip", "device", "phase", "last_call", "host_bytes", "peak_host_bytes", "device_bytes"


class LiveView:
    """A live view of a group: its state, the last step of `fit`, and for each rank phase, last call and memory.

    `ShardedModelGroup.watch` makes it. It ends by `stop()`, at the end of its `with` block, when the group is shut down
    or dropped, and at the exit of the program.
    """

    def __init__(self, client: Client, last_step: Callable[[], str], refresh_s: float) -> None:
        """Draw the first picture, and start the thread that draws the others.

        Args:
            client: The group's client, which is closed when the group is dropped.
            last_step: Returns the last step of `fit`, for people.
            refresh_s: Seconds between two probes of the ranks.

        Raises:
            ValueError: `refresh_s` is not a positive number.
        """
        if not (refresh_s > 0 and math.isfinite(refresh_s)):
            raise ValueError(f"refresh_s={refresh_s!r}: give a number of seconds above 0")
        self.num_refreshes = 0
        """Number of times that the group was looked at."""
        self._client = client
        self._last_step = last_step
        self._refresh_s = refresh_s
        self._end = ""
        self._stopping = threading.Event()
        self._picture = Picture(f"{client.name}: watched every {refresh_s:g} s", _now())
        self._screen = open_screen(self._picture)
        self._thread = threading.Thread(target=self._run, name=f"watch {client.name}", daemon=True)
        # The thread must not write to stderr while Python ends.
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """End the view; the last picture stays. Returns when its thread has ended, after 3 s at most. Idempotent."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        how = f"ended: {self._end}" if self._end else f"every {self._refresh_s:g} s until stop()"
        return f"<LiveView of {self._client.name}, {how}, refreshed {self.num_refreshes} times>"

    def _run(self) -> None:
        try:
            end = self._refresh()
            while not end:
                end = "stopped" if self._stopping.wait(self._refresh_s) else self._refresh()
            self._end = end
            self._screen.close(replace(self._picture, title=f"{self._client.name}: the view has ended: {self._end}"))
        except Exception as error:  # noqa: BLE001 - nobody to raise to; `repr` tells that, say, stderr is closed
            self._end = f"cannot draw: {type(error).__name__}: {error}"
        finally:
            atexit.unregister(self.stop)

    def _refresh(self) -> str:
        """Look at the group and draw it; return why the view ends if the group is gone, else an empty string."""
        try:
            if self._client.state is GroupState.CLOSED:
                self._picture = Picture(self._client.name, _now())
                return "the group was shut down"
            self._picture = _picture_of(self._client, self._last_step())
        except Exception as error:  # noqa: BLE001 - shown; the next look may succeed
            self._picture = Picture(self._client.name, _now(), (f"cannot be seen: {type(error).__name__}: {error}",))
        self.num_refreshes += 1
        self._screen.draw(self._picture)
        return ""


def _picture_of(client: Client, last_step: str) -> Picture:
    state, cause = client.state, client.cause
    lines = [last_step] if last_step else []
    statuses: list[dict[str, Any]] = []
    if state is GroupState.BROKEN:
        lines.append(f"cause: {str(cause).partition(chr(10))[0]}")
    else:
        statuses = rank_statuses(client)
    header, rows = status_table(_COLUMNS, statuses)
    rows = [(*row, _state(status)) for row, status in zip(rows, statuses, strict=True)]
    return Picture(f"{client.name}: {state.value}", _now(), tuple(lines), Table((*header, "state"), rows))


def _state(status: Mapping[str, Any]) -> str:
    return "does not answer" if not status["answers"] else "usable" if status.get("usable", True) else "not usable"


def _now() -> str:
    return time.strftime("%H:%M:%S")
