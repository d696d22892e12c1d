"""What tests ask a driver on some host to do; see `driver.py`."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from torch import nn

from raysharding import CopyReport, Loading, Placement, ShardedModelGroup, Split, Timeouts, current_worker
from raysharding.group import Call
from raysharding.group.calls import Client
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.launch.start_controller import start_controller
from raysharding.group.ranks import RankInfo
from tests.clock import now
from tests.forking import runtime_env
from tests.kernel import Notebook

_group: ShardedModelGroup | None = None
_call: Call | None = None


def join() -> dict[str, str]:
    """Connect to the cluster; returns address → id of the nodes."""
    ray.init(runtime_env=runtime_env())
    return {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}


def await_nodes(number: int) -> None:
    """Wait until Ray knows so many nodes that are alive.

    A node that was killed counts until Ray has given it up: another one at its address would answer for it.
    """
    until = now() + 30
    while len([node for node in ray.nodes() if node["Alive"]]) != number:
        assert now() < until, f"not {number} nodes: {ray.nodes()}"
        time.sleep(0.1)


def make_mlp(width: int = 16) -> Callable[[], nn.Module]:
    """Return a model callable that pickles by value, so that the ranks need not import the tests."""

    def build() -> nn.Module:
        from torch import nn

        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))

    return build


def start(
    checkpoint: str,
    *,
    world_size: int = 3,
    strategy: Any = "STRICT_SPREAD",
    width: int = 16,
    name: str | None = None,
    labels: dict[str, str] | None = None,
    cpus_per_rank: float = 1.0,
    loading: Loading | None = None,
    timeouts: Timeouts | None = None,
) -> list[RankInfo]:
    """Make the driver's group, in place of one before; returns its ranks."""
    global _group
    stop()
    _group = ShardedModelGroup.from_checkpoint(
        checkpoint,
        model=make_mlp(width),
        world_size=world_size,
        device="cpu",
        name=name,
        placement=Placement(strategy=strategy, labels=labels, cpus_per_rank=cpus_per_rank),
        loading=loading,
        timeouts=timeouts,
    )
    return list(_group.ranks)


def group() -> ShardedModelGroup:
    """The driver's group."""
    assert _group is not None
    return _group


def controllers(number: int) -> list[str]:
    """Where so many controllers run, one after the other."""
    found = []
    for _ in range(number):
        client = Client(start_controller(GroupSpec("none")), "group", Timeouts(), 0)
        found.append(client.connection.attach().where)
        client.shutdown()
    return found


def stop() -> None:
    """Shut the group down."""
    global _group
    if _group is not None:
        _group.shutdown()
    _group = None


def interfaces() -> list[tuple[str, str, list[str]]]:
    """By rank: gloo's interface; what the host's own name resolves to; the host's interfaces."""

    def look() -> tuple[str, str, list[str]]:
        import os
        import socket

        names = [name for _, name in socket.if_nameindex()]
        return os.environ["GLOO_SOCKET_IFNAME"], socket.gethostbyname(socket.gethostname()), names

    return list(group().call(look))


def forward(rows: torch.Tensor) -> torch.Tensor:
    """The model's output."""
    output = group().forward(Split(rows))
    assert isinstance(output, torch.Tensor)
    return output


def train(rows: torch.Tensor, targets: torch.Tensor) -> list[dict[str, float]]:
    """Two steps of SGD on the mean square."""
    group().set_optimizer(torch.optim.SGD, lr=0.1)

    def loss(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output - targets).square().sum(), output.numel()

    return [group().train_step(Split(rows), targets=Split(targets), loss=loss) for _ in range(2)]


def load(checkpoint: str) -> str:
    """Load another checkpoint into the group; returns the report's words."""
    return str(group().load(checkpoint))


@dataclass
class LoadSeen:
    """A load, as the driver saw it."""

    seconds: float
    longest_pause_s: float
    """Longest time without progress."""
    num_sights: int
    """How often the bytes had grown."""


def watch_load(checkpoint: str) -> LoadSeen:
    """Load it again and watch the bytes."""
    call = group().load.remote(checkpoint)
    begun = moved = time.monotonic()
    pause_s, sights, done = 0.0, 0, 0
    while not call.wait(0.02):
        if call.progress[0] != done:
            now_s, done = time.monotonic(), call.progress[0]
            pause_s, moved, sights = max(pause_s, now_s - moved), now_s, sights + 1
    call.result()
    return LoadSeen(time.monotonic() - begun, pause_s, sights)


def begin_waiting(in_collective: bool) -> None:
    """Begin a call in which all ranks sleep, or, `in_collective`, all but rank 0 wait for it."""
    global _call

    def wait(in_collective: bool) -> None:
        import time

        import torch.distributed as dist

        if in_collective and dist.get_rank() != 0:
            dist.barrier()
        time.sleep(300)

    _call = group().call.remote(wait, in_collective)


def failure() -> tuple[float, BaseException | None]:
    """Wait for the call that was begun; returns the clock and how it ended."""
    assert _call is not None
    try:
        _call.result(timeout_s=200)
    except Exception as error:
        return now(), error
    return now(), None


def state_within(state: str, seconds: float) -> tuple[float, str]:
    """Wait until the group is in a state; returns the clock and why it is broken."""
    until = now() + seconds
    while group().state.value != state:
        assert now() < until, f"still {group().state} after {seconds:g} s"
        time.sleep(0.01)
    seen = now()
    try:
        group().forward(torch.ones(1, 8))
    except Exception as error:
        return seen, str(error)
    return seen, ""


def run_notebook(notebook: Path, folder: Path, *, replace: tuple[str, str]) -> dict[str, str]:
    """Run the cells of the example from a kernel on this host; returns the outputs of each, by its id."""
    # As Ray's jobs pass it: the notebook's own `ray.init` names no environment of workers.
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": runtime_env()})}
    path = os.pathsep.join((str(notebook.parent), os.environ["PYTHONPATH"]))
    playing = Notebook(notebook, folder, replace=replace, interrupt=("fit", "fit: step"), restart="attach")
    return asyncio.run(playing.run(job | {"PYTHONPATH": path}))


def copy_between(checkpoint: str, sizes: tuple[int, int], width: int) -> tuple[CopyReport, bool, list[list[str]]]:
    """Copy changed weights from one new group to another; returns the report, whether they are equal, and the nodes."""
    options: dict[str, Any] = {"model": make_mlp(width), "device": "cpu"}
    options["placement"] = Placement(strategy="SPREAD", cpus_per_rank=0.5)
    with (
        ShardedModelGroup.from_checkpoint(checkpoint, world_size=sizes[0], **options) as source,
        ShardedModelGroup.from_checkpoint(checkpoint, world_size=sizes[1], **options) as target,
    ):
        source.call(_change)
        source.copy_to(target)
        report = source.copy_to(target)
        mine, theirs = source.state_dict(), target.state_dict()
        is_equal = all(torch.equal(mine[name], theirs[name]) for name in mine)
        return report, is_equal, [[info.node_ip for info in one.ranks] for one in (source, target)]


def _change() -> None:
    with torch.no_grad():
        for parameter in current_worker().module.parameters():
            parameter.add_(1.0)
