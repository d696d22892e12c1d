"""`GcsMonitor` beside a GCS that a signal stops and continues."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from raysharding.group.cluster import gcs_monitor
from raysharding.group.cluster.gcs_monitor import GcsMonitor
from tests.group.standing import Driver, StandingCluster, standing_cluster

MONITOR = """
from raysharding.group.cluster.gcs_monitor import GcsMonitor

monitor, begun = GcsMonitor(), now()

def longest(is_over):
    most = 0.0
    while not is_over(silent := monitor.seconds_silent()):
        most = max(most, silent)
        time.sleep(0.1)
    return most

tell(answered=longest(lambda silent: now() - begun > 8), waited=now() - begun)
sys.stdin.readline()
longest(lambda silent: silent > 8)
tell(said=monitor.gone())
sys.stdin.readline()
longest(lambda silent: silent < 2)
tell(again=True)
"""


def gcs_of(cluster: StandingCluster) -> psutil.Process:
    """The process of the GCS that listens at a cluster's port."""
    port = f"--gcs_server_port={cluster.address.rpartition(':')[2]}"
    (found,) = [one for one in psutil.process_iter(["cmdline"]) if port in (one.info["cmdline"] or ())]
    return found


@pytest.mark.full
@pytest.mark.usefixtures("worker_python")
def test_a_gcs_is_silent_while_it_is_stopped_and_heard_again_when_it_is_back(checkpoint: Path) -> None:
    with standing_cluster() as cluster, Driver(cluster, checkpoint, MONITOR) as driver:
        heard = driver.hear()
        assert heard["answered"] < heard["waited"] - 2, "it asked, and was answered"
        gcs = gcs_of(cluster)
        gcs.send_signal(signal.SIGSTOP)
        try:
            driver.say("stopped")
            said = driver.hear()["said"]
        finally:
            gcs.send_signal(signal.SIGCONT)
        assert f"{cluster.address.rpartition(':')[2]} has not answered for 50 s: Ray will end this program" in said
        driver.say("continued")
        assert driver.hear()["again"]


@pytest.mark.usefixtures("cluster")
def test_a_driver_that_was_stopped_itself_does_not_blame_the_gcs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_monitor, "_STOPPED_S", 1.0)
    monitor = GcsMonitor()
    time.sleep(1.2)
    assert monitor.seconds_silent() < 0.1
