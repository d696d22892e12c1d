"""`GcsMonitor`: how long the GCS, Ray's head process, has not answered this driver.

Note [What Ray does without its GCS]: actors keep running and answer calls, but nothing can be started, stopped or
released: Ray waits silently for the GCS for a minute, and then ends every connected program, drivers included (Ray
2.60). A GCS with external storage comes back before that, maybe on another node, and nothing is lost. The driver
therefore gives a group up shortly before Ray ends the program, so that the program hears why.
"""

from __future__ import annotations

import os
import threading
import time

import ray

from raysharding.group.cluster.ray_internals import client_session, gcs_answers

GCS_GONE_S = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60")) - 10.0  # noqa: SIM112 - Ray's
"""Silence of the GCS, in seconds, after which a driver gives its groups up."""
_ASK_S = 2.0
_STOPPED_S = 5.0


class GcsMonitor:
    """Asks the GCS every 2 s, on a thread."""

    def __init__(self) -> None:
        """Create a monitor that has not asked yet."""
        self.is_client = client_session() is not None
        """True if this process is behind `ray://`, where only the client's own connection is watched."""
        self._address = "" if self.is_client else str(ray.get_runtime_context().gcs_address)
        self._looked = self._heard = time.monotonic()
        self._asking: threading.Thread | None = None

    def seconds_silent(self) -> float:
        """Return the seconds since the GCS last answered, and ask again if that is due. Never waits.

        Call it every second.
        """
        now = time.monotonic()
        if self.is_client or now - self._looked > _STOPPED_S:
            self._heard = now  # unknown: this process itself was stopped
        self._looked = now
        is_asking = self._asking is not None and self._asking.is_alive()
        if now - self._heard > _ASK_S and not is_asking:
            self._asking = threading.Thread(target=self._ask, name="ask GCS", daemon=True)
            self._asking.start()
        return now - self._heard

    def gone(self) -> str:
        """Return a message that the GCS is gone and that Ray will end this program."""
        return (
            f"the GCS (Ray's head process) at {self._address} has not answered for {GCS_GONE_S:g} s: Ray will end this "
            "program within seconds, unless the program calls ray.shutdown()"
        )

    def _ask(self) -> None:
        if ray.is_initialized() and gcs_answers(_ASK_S):
            self._heard = time.monotonic()
