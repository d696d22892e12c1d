"""What a group call costs beside bare Ray actors, and what a call adds to a step of 100 ms.

`python -m tests.bench.calls [--world-sizes 2 8] [--rounds 7] [--calls 200] [--steps 20] [--step-ms 100]` starts a
local Ray cluster. Arms are interleaved: one round is one measurement of each, in an order that alternates, and ratios
are taken within a round.

    empty      `group.call(nothing, out=Out.none())`, one after the other, seconds for each
    queued     50 of the same by `group.call.remote`, waited for together, seconds for each
    bare       an empty method of as many actors that do nothing else, waited for one after the other
    steps      `group.call(step)`, one call for each step, which ends in an all-reduce of one number
    looped     the same number of the same steps in one call
    overhead   steps ÷ looped − 1
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ray
import torch
from safetensors.torch import save_file
from torch import nn

from raysharding import Out, Placement, ShardedModelGroup
from tests.bench.ratios import Figure

NUM_CPUS = 8
NUM_QUEUED = 50
MATRIX = 256
BASES = {"empty": "bare", "queued": "bare", "steps": "looped"}
"""Arm → what it is compared with."""
LIMITS = {"empty ÷ bare": 2.3, "queued ÷ bare": 1.5}
"""Ratio → the largest that is asked for."""


def measure(group: ShardedModelGroup, rounds: int, calls: int, steps: int, step_s: float) -> dict[str, Figure]:
    """Measure all arms round by round.

    Args:
        group: Idle ranks.
        rounds: Measurements of each arm.
        calls: Empty calls in one measurement.
        steps: Steps in one measurement.
        step_s: Length of a step on an idle machine.
    """
    repeats = max(group.call(_calibrate(step_s)))
    work, nothing, bare = _work(repeats), _nothing(), _bare(len(group.ranks))

    def queue() -> None:
        queued = [group.call.remote(nothing, out=Out.none()) for _ in range(NUM_QUEUED)]
        for call in queued:
            call.result()

    arms: dict[str, Callable[[], float]] = {
        "empty": lambda: _each(lambda: group.call(nothing, out=Out.none()), calls),
        "queued": lambda: _each(queue, max(1, calls // NUM_QUEUED)) / NUM_QUEUED,
        "bare": lambda: _each(bare, calls),
        "steps": lambda: _each(lambda: group.call(work, 1, out=Out.none()), steps),
        "looped": lambda: _each(lambda: group.call(work, steps, out=Out.none()), 1) / steps,
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(rounds + 1):
        for name in list(arms)[:: 1 if index % 2 else -1]:
            value = arms[name]()
            if index:  # the first round warms up
                seconds[name].append(value)
    figures = {name: Figure.of(values) for name, values in seconds.items()}
    for name, base in BASES.items():
        ratios = [own / other for own, other in zip(seconds[name], seconds[base], strict=True)]
        if name == "steps":
            figures["overhead"] = Figure.of([ratio - 1 for ratio in ratios])
        else:
            figures[f"{name} ÷ {base}"] = Figure.of(ratios)
    return figures


def _each(call: Callable[[], object], times: int) -> float:
    """Seconds of one of many calls."""
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begun) / times


def _nothing() -> Callable[[], None]:
    """A function of its own that the ranks need not import."""
    return lambda: None


def _calibrate(step_s: float) -> Callable[[], int]:
    """Return a function that finds how many products of matrices take `step_s`."""
    size = MATRIX

    def count() -> int:
        import time

        import torch

        matrix = torch.ones(size, size)
        done, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < max(step_s, 0.02):
            matrix @ matrix
            done += 1
        return max(1, round(done * step_s / max(step_s, 0.02)))

    return count


def _work(repeats: int) -> Callable[[int], None]:
    """Return a function that computes for a number of steps; the ranks meet at the end of each, as in training."""
    size = MATRIX

    def work(steps: int) -> None:
        import torch
        import torch.distributed as dist

        matrix, loss = torch.ones(size, size), torch.ones(1)
        for _ in range(steps):
            for _ in range(repeats):
                matrix @ matrix
            # Without it ranks that loop would not wait for the slowest one of each step, which is no part of a call.
            dist.all_reduce(loss)

    return work


def _bare(num_actors: int) -> Callable[[], object]:
    """Return a function that calls an empty method of so many actors."""
    actors = [ray.remote(_Bare).options(num_cpus=0).remote() for _ in range(num_actors)]
    ray.get([actor.nothing.remote() for actor in actors])
    return lambda: ray.get([actor.nothing.remote() for actor in actors])


class _Bare:
    def nothing(self) -> None:
        pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a block for each world size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=100.0)
    options = parser.parse_args(arguments)
    ray.init("local", num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.safetensors")
            save_file(nn.Linear(8, 8).state_dict(), path)
            for world_size in options.world_sizes:
                placement = Placement(cpus_per_rank=min(0.5, NUM_CPUS / world_size / 2))
                with _group(path, world_size, placement) as group:
                    load = os.getloadavg()[0]
                    found = measure(group, options.rounds, options.calls, options.steps, options.step_ms / 1000)
                print("\n".join(lines(world_size, found, load, os.getloadavg()[0])), flush=True)
    finally:
        ray.shutdown()


def _group(path: Path, world_size: int, placement: Placement) -> ShardedModelGroup:
    return ShardedModelGroup.from_checkpoint(
        path, model=_model(), world_size=world_size, device="cpu", placement=placement
    )


def _model() -> Callable[[], nn.Module]:
    return lambda: torch.nn.Linear(8, 8)


def lines(world_size: int, found: dict[str, Figure], before: float, after: float) -> list[str]:
    """A block for people."""
    title = f"{world_size} ranks on {os.cpu_count()} cores, load average {before:.1f} before and {after:.1f} after"
    rows = [title]
    for name, figure in found.items():
        scale, unit = (1, "× ") if "÷" in name else (100, "% ") if name == "overhead" else (1000, "ms")
        middle, low, high = (scale * value for value in (figure.median, figure.low, figure.high))
        asked = f"   asked: at most {LIMITS[name]:g}" if name in LIMITS else ""
        rows.append(f"{name:<14}{middle:9.3f} {unit}  ({low:.3f} – {high:.3f}, {figure.num_rounds} rounds){asked}")
    return rows


if __name__ == "__main__":
    main()
