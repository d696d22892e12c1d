"""Merges a sharded checkpoint of 2 GiB, ours and accelerate's, each in a process of its own: seconds and peak memory.

`python -m tests.bench.merge [--gib 2] [--directory DIR]` needs six times the checkpoint on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from raysharding.units import MIB
from tests.bench.memory import MemorySampler
from tests.spawn import run_ranks

SMALL_BYTES = 4 * MIB
ARMS = ("raysharding", "raysharding bin", "accelerate", "accelerate bin")


def save_sharded(directory: str, num_bytes: int) -> None:
    """On every rank: save half of `num_bytes` as one tensor and half as tensors of 4 MiB, bf16, sharded on dim 0."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(dist.get_rank())
    state = {}
    sizes = [num_bytes // 2, *[SMALL_BYTES] * (num_bytes // 2 // SMALL_BYTES)]
    for index, size in enumerate(sizes):
        rows = size // 2 // 1024 // dist.get_world_size()
        # Bits, not values: every pattern, NaNs too.
        local = torch.randint(0, 1 << 15, (rows, 1024), dtype=torch.int16, generator=generator).view(torch.bfloat16)
        state[f"layers.{index}.weight"] = DTensor.from_local(local, mesh, [Shard(0)])
    save({"model": state}, checkpoint_id=directory)


def measure(arm: str, source: str, output: str) -> dict[str, float]:
    """One merge in this process."""
    safe = not arm.endswith("bin")
    if arm.startswith("accelerate"):
        from accelerate import PartialState
        from accelerate.utils import merge_fsdp_weights

        PartialState(cpu=True)
    else:
        from raysharding.distributed import merge_fsdp_weights
    with MemorySampler() as memory:
        started = time.perf_counter()
        merge_fsdp_weights(source, output, safe)
        os.sync()  # accelerate leaves its bytes in the page cache
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "extra": memory.extra_bytes}


def in_a_process(arm: str, source: str, output: str) -> dict[str, float]:
    """`measure`, in a fresh interpreter."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.merge", "--arm", arm, source, output]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(root: Path, num_bytes: int, world_size: int) -> None:
    """All arms on one checkpoint, and whether their tensors are the same."""
    source = root / f"saved-by-{world_size}"
    run_ranks(world_size, save_sharded, str(source), num_bytes, timeout_s=300)
    for arm in ARMS:
        output = root / arm.replace(" ", "-")
        figures = in_a_process(arm, str(source), str(output))
        row = f"{num_bytes / MIB:,.0f} MiB, W={world_size}  {arm:<16}{figures['seconds']:7.2f} s"
        print(f"{row}{figures['extra'] / MIB:9,.0f} MiB extra", flush=True)
    same = [(root / arm / "model.safetensors") for arm in ("raysharding", "accelerate")]
    print("same tensors:", tensors_are_equal(*same), flush=True)
    for arm in ARMS:
        shutil.rmtree(root / arm.replace(" ", "-"))
    shutil.rmtree(source)


def tensors_are_equal(first: Path, second: Path) -> bool:
    """Whether two safetensors files hold the same names, and the same bits under each."""
    from safetensors import safe_open

    with safe_open(first, "pt") as one, safe_open(second, "pt") as other:
        if set(one.keys()) != set(other.keys()):
            return False
        return all(
            torch.equal(one.get_tensor(name).view(torch.int16), other.get_tensor(name).view(torch.int16))
            for name in one.keys()  # noqa: SIM118 - it is no dict
        )


def main() -> None:
    """Run the comparison, or one arm of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--directory")
    parser.add_argument("--arm", nargs=3, metavar=("ARM", "SOURCE", "OUTPUT"))
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(measure(*options.arm)))
        return
    with tempfile.TemporaryDirectory(prefix="merge-", dir=options.directory) as root:
        for world_size in (1, 4):
            compare(Path(root), int(options.gib * (1 << 30)), world_size)


if __name__ == "__main__":
    main()
