"""`copy_to` between two running groups against what people do without it, and against the floor.

`python -m tests.bench.copy_weights [--size-mib 1024] [--rounds 7] [--dtype bfloat16] [--bucket-mib 16]`: on one host,
two ranks → three. Arms, which take turns in an order that alternates: `copy_to` (warm, and staged); `save + load` of a
directory in memory (/dev/shm: no disk is faster); `gather + broadcast`, the loop that people write: rank 0 gathers the
model, and every rank of the other group gets it whole from the object store and keeps its part; `memcpy`, the floor:
every rank of the source copies its shards into shared memory, then every rank of the target copies its own out of it.
The ratio is taken within a round.

`python -m tests.bench.copy_weights --hosts [--rate-mbit 800]`: three hosts (network namespaces; needs root). From one
rank to two on the other hosts, and from two ranks on two hosts to three on three. The wire is the time that the busiest
link needs for the target's bytes which no rank of the target's host holds.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch

from cluster.local.hosts import Hosts
from cluster.local.ray_hosts import RayHosts
from raysharding import CopyReport, Loading, Placement, ShardedModelGroup, current_worker
from raysharding.distributed.fully_shard import local_tensor, shard_index_of, tensor_layout
from raysharding.distributed.transfer import saved_tensors
from tests.cluster.driver import Driver

MIB = 1 << 20


def make_model(directory: Path, size_mib: float) -> Path:
    """A Llama of about this size in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers = 1024, max(1, round((size_mib - 125) / 64))
    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        dtype="float32",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    return directory / "model"


def _areas() -> tuple[dict[str, tuple[int, torch.Tensor]], int]:
    """Name → (first byte in a file of the whole model, this rank's flat shard), and the size of that file."""
    areas: dict[str, tuple[int, torch.Tensor]] = {}
    first = 0
    for name, tensor in saved_tensors(current_worker().module).items():
        layout = tensor_layout(name, tensor)
        start, _ = layout.local_range(shard_index_of(tensor))
        areas[name] = first + start * tensor.itemsize, local_tensor(tensor).view(-1)
        first += layout.num_elements * tensor.itemsize
    return areas, first


def memcpy(path: str, writes: bool) -> float:
    """Copy this rank's shards into, or out of, shared memory that all ranks map; the seconds of the copies alone."""
    areas, size = _areas()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) as memory:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        torch.distributed.barrier()  # all begin together: none has the memory's bandwidth for itself
        begun = time.perf_counter()
        for first, shard in areas.values():
            part = whole[first : first + shard.nbytes].view(shard.dtype)
            if writes:
                part.copy_(shard)
            else:
                shard.copy_(part)
        seconds = time.perf_counter() - begun
        del whole, part
    return seconds


def take_full(state: dict[str, torch.Tensor]) -> None:
    """Keep this rank's part of full tensors, as the hand-written loop does."""
    with torch.no_grad():
        for name, tensor in saved_tensors(current_worker().module).items():
            start, stop = tensor_layout(name, tensor).local_range(shard_index_of(tensor))
            local_tensor(tensor).view(-1).copy_(state[name].view(-1)[start:stop])


def gather_and_broadcast(source: ShardedModelGroup, target: ShardedModelGroup) -> None:
    """Gather on rank 0, broadcast to the other group."""
    target.call(take_full, ray.put(source.state_dict()))


def one_host(size_mib: float, rounds: int, dtype: str | None, work: Path) -> dict[str, list[float]]:
    """Seconds of each arm in each round."""
    model = make_model(work, size_mib)
    shared = Path(tempfile.mkdtemp(dir="/dev/shm"))
    loading = Loading(dtype=getattr(torch, dtype)) if dtype else Loading()
    options: dict[str, Any] = {"device": "cpu", "preflight": False, "progress": False}
    options["placement"] = Placement(cpus_per_rank=0.5)
    seconds: dict[str, list[float]] = {}
    with (
        ShardedModelGroup.from_checkpoint(model, world_size=2, **options) as source,
        ShardedModelGroup.from_checkpoint(model, world_size=3, loading=loading, **options) as target,
    ):
        (shared / "whole").touch()
        os.truncate(shared / "whole", source.num_parameters * 4)

        def save_and_load() -> None:
            source.save(shared / "save", overwrite=True)
            target.load(shared / "save")

        def through_memory() -> float:
            write, read = (
                max(group.call(memcpy, str(shared / "whole"), writes))
                for group, writes in ((source, True), (target, False))
            )
            return write + read

        arms: dict[str, Callable[[], Any]] = {
            "copy_to": lambda: source.copy_to(target),
            "staged": lambda: source.copy_to(target, staged=True),
            "save + load": save_and_load,
            "gather + broadcast": lambda: gather_and_broadcast(source, target),
        }
        if dtype is None:
            arms["memcpy"] = through_memory
        try:
            for arm in arms.values():
                arm()  # connects, plans, touches memory
            print(source.copy_to(target))
            for index in range(rounds):
                for name in list(arms)[:: 1 if index % 2 else -1]:
                    begun = time.perf_counter()
                    value = arms[name]()
                    own = value if isinstance(value, float) else time.perf_counter() - begun
                    seconds.setdefault(name, []).append(own)
        finally:
            shutil.rmtree(shared)
    return seconds


def table(seconds: dict[str, list[float]], base: str = "copy_to") -> str:
    """Median seconds of each arm with least and most, and `base` ÷ the arm, within a round."""
    lines = [f"{'arm':<20} {'seconds':>8} {'(least - most)':>18} {base + ' ÷ it':>14} {'(least - most)':>18}"]
    for name, values in seconds.items():
        ratios = [mine / own for mine, own in zip(seconds[base], values, strict=True)]
        spread, of_ratio = f"({min(values):.3f} - {max(values):.3f})", f"({min(ratios):.2f} - {max(ratios):.2f})"
        lines.append(f"{name:<20} {median(values):>8.3f} {spread:>18} {median(ratios):>14.2f} {of_ratio:>18}")
    return "\n".join(lines)


_groups: list[ShardedModelGroup] = []


def start_groups(model: str, sizes: Sequence[int], strategies: Sequence[Any]) -> list[list[str]]:
    """On the driver's host: make both groups; returns the addresses of their ranks."""
    if not ray.is_initialized():
        ray.init("auto", log_to_driver=False)
    stop_groups()
    for world_size, strategy in zip(sizes, strategies, strict=True):
        placement = Placement(strategy=strategy, cpus_per_rank=0.5)
        options: dict[str, Any] = {"device": "cpu", "preflight": False, "progress": False, "placement": placement}
        _groups.append(ShardedModelGroup.from_checkpoint(model, world_size=world_size, **options))
    return [[info.node_ip for info in group.ranks] for group in _groups]


def stop_groups() -> None:
    """On the driver's host: shut both groups down."""
    while _groups:
        _groups.pop().shutdown()


def copy_once() -> CopyReport:
    """On the driver's host: copy from the first group to the second."""
    return _groups[0].copy_to(_groups[1])


def over_hosts(size_mib: float, rounds: int, rate_mbit: float, work: Path) -> None:
    """Print, for each pair of groups, the seconds of a copy against the wire's."""
    model = make_model(work, size_mib)
    with (
        Hosts(3) as hosts,
        RayHosts(list(hosts), cpus_per_host=2, logs_to_driver=False) as rays,
        closing(Driver(rays, rays.hosts[0])) as driver,
    ):
        for sizes in ((1, 2), (2, 3)):
            places = driver.run(start_groups, str(model), sizes, ("SPREAD", "SPREAD"))
            driver.run(copy_once)
            hosts.set_rate(rate_mbit)
            try:
                for _ in range(rounds):
                    print(_round(driver, hosts, rate_mbit), sizes, places)
            finally:
                hosts.set_rate(None)
        driver.run(stop_groups)


def _round(driver: Driver, hosts: Hosts, rate_mbit: float) -> str:
    before = [host.link_bytes() for host in hosts]
    report = driver.run(copy_once)
    used = [host.link_bytes() - one for host, one in zip(hosts, before, strict=True)]
    busiest = max(max(one.sent, one.received) for one in used)
    need_s = busiest * 8e-6 / rate_mbit
    return (
        f"{report.seconds:.3f} s; {report.wire_bytes / MIB:.0f} MiB in messages, {report.shared_bytes / MIB:.0f} in "
        f"shared memory; busiest link {busiest / MIB:.0f} MiB, {need_s:.3f} s; ratio {report.seconds / need_s:.3f}"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=float, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", help="dtype of the target; the source is float32")
    parser.add_argument("--bucket-mib", type=float)
    parser.add_argument("--hosts", action="store_true", help="over three hosts")
    parser.add_argument("--rate-mbit", type=float, default=800)
    options = parser.parse_args()
    if options.bucket_mib:
        from raysharding.group.launch import copy_weights

        copy_weights._BUCKET_BYTES = int(options.bucket_mib * MIB)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:  # the hosts have a /tmp of their own
        if options.hosts:
            over_hosts(options.size_mib, options.rounds, options.rate_mbit, Path(directory))
            return
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
        print(table(one_host(options.size_mib, options.rounds, options.dtype, Path(directory))))


if __name__ == "__main__":
    # By its own name: the program on the host imports what it runs.
    from tests.bench import copy_weights as this

    this.main()
