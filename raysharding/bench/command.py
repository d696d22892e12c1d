"""`raysharding bench`: times raysharding's transports and the floors on a user's checkpoint, and draws a conclusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raysharding.bench.network import private_network
from raysharding.bench.rank_set import BenchError, Setup, ended_by_sigterm
from raysharding.bench.ratios import groups
from raysharding.bench.rounds import Load, Results, Rounds
from raysharding.checkpoint import Checkpoint, open_checkpoint
from raysharding.distributed.transfer import RANK_BYTES, available_bytes
from raysharding.units import GIB

TRANSPORTS = ("local", "scatter", "scatter_wire", "broadcast", "mmap")
"""Transports that can be measured, as named on the command line."""
DEFAULT_TRANSPORTS = ("local", "scatter", "broadcast")
FLOORS = ("preadv_floor", "scatter_floor")
FLOOR_OF = {"local": "preadv_floor", "scatter": "scatter_floor", "broadcast": "scatter_floor"}
"""Transport → floor that bounds its time from below."""


def bench(
    path: str,
    *,
    world_sizes: Sequence[int],
    num_rounds: int,
    transports: Sequence[str],
    timeout_s: float,
    progress: Callable[[Load], None],
) -> tuple[Checkpoint, Results]:
    """Load a checkpoint with each transport, in separate rank processes on this machine, and end the processes.

    Args:
        path: Hugging Face directory, `.safetensors` file or index JSON on this machine, with config.json beside it.
        world_sizes: Numbers of ranks; each round measures all of them.
        num_rounds: Number of measured rounds; one warm-up round precedes them.
        transports: Names from `TRANSPORTS`.
        timeout_s: Longest time of one load, in seconds.
        progress: Called after each load.

    Returns:
        The checkpoint and the results; `auto` is loaded once, to record its choice of transport.

    Raises:
        CheckpointError: The checkpoint cannot be read, or is invalid.
        BenchError: Memory is too small, no transport can load the checkpoint, or ranks failed.
    """
    checkpoint = open_checkpoint(path)
    _check_memory(checkpoint, max(world_sizes))
    results = Results()
    with ended_by_sigterm(), private_network() as network:
        setup = Setup(
            "raysharding.bench.arms:make_case",
            {"checkpoint": path},
            timeout_s=timeout_s,
            network_descriptor=network,
        )
        arms = (*transports, *FLOORS)
        Rounds(setup, arms, world_sizes, num_rounds, progress, once=("auto",)).measure(results)
    if not groups(results.loads):
        reasons = dict.fromkeys(results.skipped.values())
        raise BenchError("\n  ".join((f"{path}: no transport could load it:", *reasons)))
    return checkpoint, results


def _check_memory(checkpoint: Checkpoint, world_size: int) -> None:
    """Raise BenchError if the loads could exhaust the machine's memory; ranks of all world sizes load in turn."""
    need, have = checkpoint.num_bytes * 5 // 4 + world_size * RANK_BYTES, available_bytes()
    if need > have:
        raise BenchError(
            f"{checkpoint.path}: {world_size} ranks here need about {need / GIB:.1f} GiB of memory (the shards of "
            f"{checkpoint.num_bytes / GIB:.1f} GiB, and the processes), but {have / GIB:.1f} GiB are available: use a "
            "machine with more, or a smaller checkpoint of the same kind"
        )


def verdict(results: Results) -> list[str]:
    """Return a line for each world size: `auto`'s transport, speed and ratio to the floor, and any faster transport."""
    lines: list[str] = []
    for group in groups(results.loads):
        size = group.world_size
        autos = (load for load in results.loads if load.arm == "auto" and load.world_size == size)
        report = next((load.report for load in autos if load.report), None)
        if report is None:
            continue
        name = str(report["transport"])
        line = f"auto takes {name} at W={size} ({report['transport_reason']})"
        if name in group.loads:
            figure = group.seconds(name)
            speed = report["checkpoint_bytes"] / figure.median / GIB
            line += f": {figure.median:.2f} s, {speed:.2f} GiB/s"
            floor = FLOOR_OF.get(name, "")
            if (ratio := group.ratio(name, floor)) is not None:
                line += f", {ratio.median:.2f} × the {floor.replace('_', ' ')} ({ratio.low:.2f} – {ratio.high:.2f})"
            own = [arm for arm in group.loads if arm in TRANSPORTS and arm != "mmap"]
            fastest = min(own, key=lambda arm: group.seconds(arm).median)
            if fastest != name:
                line += f"; here {fastest} was faster, {group.seconds(fastest).median:.2f} s"
        lines.append(line)
    return lines
