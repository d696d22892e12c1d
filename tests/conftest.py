"""One Ray cluster for all tests of the group, tiny checkpoints, and a check that no test leaves anything on it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from _pytest.runner import runtestprotocol
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from safetensors.torch import save_file
from torch import nn

from raysharding import ShardedModelGroup
from tests import clock, forking
from tests.clock import now
from tests.faults.trap import plain_model
from tests.group.standing import StandingCluster, standing_cluster

NUM_CPUS = 8
RELEASE_S = 10.0
STOLEN_SHARE = 0.1
"""Above this part of a test's time, summed over the CPUs, a failure may be the machine's."""

_again: list[str] = []


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start: from a pytest in the background they would inherit to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test, and once more where it failed while the hypervisor kept the machine from running it.

    Deadlines and leases are what these tests are about, and they pass while a machine stands still; `clock.now` helps
    the tests, not the processes that they watch. A second failure, or one on a machine of its own, is a failure.
    """
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    begun, taken = time.monotonic(), clock.stolen()
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    share = (clock.stolen() - taken) / (time.monotonic() - begun)
    if any(report.failed for report in reports) and share > STOLEN_SHARE:
        _again.append(f"{item.nodeid}: {share:.0%} of the time was stolen")
        item._initrequest()  # type: ignore[attr-defined]  # what makes its fixtures anew
        # The time-out of the first try has been used up, in part or whole.
        item.ihook.pytest_timeout_cancel_timer(item=item)
        timeout: Any = item.config.pluginmanager.get_plugin("timeout")
        item.ihook.pytest_timeout_set_timer(item=item, settings=timeout._get_item_settings(item))
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests ran twice, and which."""
    terminalreporter.write_line(f"tests that failed on a machine that stood still, and ran once more: {len(_again)}")
    for line in _again:
        terminalreporter.write_line(f"  {line}")


@pytest.fixture(scope="session")
def worker_python() -> Iterator[Path]:
    """The Python of Ray's workers, also named to drivers in processes of their own: see `tests.forking`."""
    with forking.worker_python() as program:
        yield program


@pytest.fixture(scope="session")
def standing(worker_python: Path) -> Iterator[StandingCluster]:
    """A cluster for drivers in processes of their own, whose tests leave it free."""
    with standing_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster(worker_python: Path) -> Iterator[None]:
    """A local cluster with room for eight ranks, whatever the machine has."""
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    with forking.ray_starts_with(worker_python):
        # "local": never a cluster that somebody else runs on this machine.
        ray.init("local", num_cpus=NUM_CPUS, runtime_env=forking.runtime_env(), **options)
    yield
    ray.shutdown()


def make_mlp() -> Callable[[], nn.Module]:
    """Return a model callable that pickles by value, so that the ranks need not import the tests."""

    def build() -> nn.Module:
        from torch import nn

        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    return build


@pytest.fixture(scope="session")
def reference() -> nn.Module:
    """The model of `checkpoint`, whole, in this process."""
    torch.manual_seed(0)
    return make_mlp()().requires_grad_(False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, reference: nn.Module) -> Path:
    """A single-file checkpoint of `reference`."""
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    save_file(reference.state_dict(), path)
    return path


@pytest.fixture(scope="session")
def many_buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of 4 KiB and their biases: with `trap.BUCKET_BYTES`, more than eight buckets."""
    path = tmp_path_factory.mktemp("many-buckets") / "model.safetensors"
    save_file(plain_model()().state_dict(), path)
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() or subprocess.call(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]):
        pytest.skip("this machine does not let us mount a small file system")
    yield path
    subprocess.check_call(["umount", str(path)])


def rank_processes(*names: str) -> set[int]:
    """Pids of this driver's rank actors, or of its actors whose titles begin so."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        if command[0].startswith(names or "ray::RankActor") and _is_ours(process):
            found.add(process.pid)
    return found


def _is_ours(process: psutil.Process) -> bool:
    try:
        return os.getpid() in {parent.pid for parent in process.parents()}
    except psutil.NoSuchProcess:
        return False


def placement_groups() -> set[str]:
    """Ids of the placement groups that hold or want resources."""
    return {name for name, entry in placement_group_table().items() if entry["state"] != "REMOVED"}


def free_cpus() -> float:
    """CPUs of the cluster that no placement group has or wants, such as that of `group`."""
    held = (entry["bundles"] for entry in placement_group_table().values() if entry["state"] != "REMOVED")
    return NUM_CPUS - sum(bundle.get("CPU", 0.0) for bundles in held for bundle in bundles.values())


@contextmanager
def room_for(num_cpus: float) -> Iterator[None]:
    """Leave no more free CPUs than these."""
    filler = placement_group([{"CPU": free_cpus() - num_cpus}])
    try:
        ray.get(filler.ready(), timeout=30)
        yield
    finally:
        remove_placement_group(filler)


@pytest.fixture
def nothing_left(cluster: None) -> Iterator[None]:
    """Fail a test whose ranks or placement groups are still there 10 s after it, and remove them for later tests."""
    ours = ("ray::RankActor", "ray::GroupController")
    pids, groups = rank_processes(*ours), placement_groups()
    yield
    until = now() + RELEASE_S
    while (left := (rank_processes(*ours) - pids, placement_groups() - groups)) != (set(), set()):
        if now() > until:
            said = f"left on the cluster: {[_describe(pid) for pid in left[0]]}, {left[1]}"
            for found in left[1]:  # its actors end with it
                remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(found))))
            pytest.fail(said)
        time.sleep(0.05)


def _describe(pid: int) -> str:
    process = psutil.Process(pid)
    title = " ".join(process.cmdline()).strip()
    return f"pid {pid} {process.status()} {title} {process.num_threads()} threads, {process.cpu_times()}"


@pytest.fixture(scope="session")
def group(cluster: None, checkpoint: Path) -> Iterator[ShardedModelGroup]:
    """Two healthy ranks, for tests that leave the group READY."""
    with make_group(checkpoint) as group:
        yield group


def make_group(checkpoint: Path, *, world_size: int | None = 2, **options: Any) -> ShardedModelGroup:
    """Start a group of the small model."""
    options.setdefault("model", make_mlp())
    return ShardedModelGroup.from_checkpoint(checkpoint, world_size=world_size, device="cpu", **options)
