"""Checks of ranks on accelerators: each runs on every rank of one group, on `cuda` and on `sim`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading, Sharding
from raysharding.distributed import (
    gather_state_dict,
    init_mesh,
    load_checkpoint,
    load_optimizer_state,
    save_checkpoint,
    shard_module,
    train_step,
)
from raysharding.distributed.fully_shard import local_tensor
from raysharding.distributed.saving import AsyncSaver, Destination
from raysharding.models import build_module
from tests.accelerator.build import load_extension
from tests.accelerator.fault_checks import batch_of, mean_square
from tests.distributed.checks import outcome_of
from tests.spawn import device_type

WIDTH, NUM_LAYERS = 256, 8
LARGE = {"cuda": (4096, 32), "sim": (512, 8), "cpu": (512, 8)}
"""Width and layers of the model whose times are printed: 2 GiB on a GPU."""


def make_layers(width: int = WIDTH, num_layers: int = NUM_LAYERS) -> nn.Module:
    """The model of the checkpoint."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))


def device() -> Any:
    """`torch.cuda` or `torch.sim`."""
    return torch.get_device_module(device_type())


def loaded(path: Path, loading: Loading | None = None, **options: Any) -> nn.Module:
    """A module cut over the ranks, with the weights of a checkpoint."""
    make = partial(make_layers, *LARGE[device_type()]) if "large" in path.name else make_layers
    sharding = Sharding(**options)
    module = build_module(make, open_checkpoint(path), None)
    shard_module(module, init_mesh(device_type(), sharding), sharding)
    load_checkpoint(module, path, loading=loading)
    return module


def assert_holds(module: nn.Module, path: Path) -> None:
    """The whole weights are those of a file."""
    found = {name: tensor for part in gather_state_dict(module) for name, tensor in part.items()}
    if dist.get_rank() == 0:
        expected = load_file(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)


def check_loads(root: Path) -> None:
    """By every transport, the bytes are the file's; buffers are pinned."""
    path, peaks = root / "model.safetensors", {}
    for transport in ("auto", "local", "scatter", "broadcast"):
        reset_peak_pinned()
        assert_holds(loaded(path, Loading(transport, bucket_bytes=1 << 16)), path)
        peaks[transport] = peak_pinned()
    assert dist.get_rank() > 0 or min(peaks.values()) >= 1 << 16, f"buffers are not pinned: {peaks}"


def reset_peak_pinned() -> None:
    """Count the peak of page-locked memory from here on."""
    if device_type() == "sim":
        load_extension().reset_peak_pinned()
    else:
        torch.cuda.memory.reset_peak_host_memory_stats()


def peak_pinned() -> int:
    """Return the peak of page-locked bytes in use."""
    if device_type() == "sim":
        return int(load_extension().max_pinned_allocated())
    return int(torch.cuda.memory.host_memory_stats()["active_bytes.peak"])


def check_replicas(root: Path) -> None:
    """HSDP: replicas fill each other, and train as one model."""
    if dist.get_world_size() < 4 or dist.get_world_size() % 2:
        return
    path = root / "model.safetensors"
    module = loaded(path, Loading("scatter", bucket_bytes=1 << 16), replicate_size=2)
    assert_holds(module, path)
    found = train_step(module, torch.optim.SGD(module.parameters(), lr=0.0), rows(), loss=mean_square)["loss"]
    assert abs(found - expected_loss(path)) < 1e-3 * found


def rows() -> Any:
    """This rank's rows."""
    return batch_of({"input": torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)})


def expected_loss(path: Path) -> float:
    """The loss of one process on the CPU."""
    module = make_layers().requires_grad_(False)
    module.load_state_dict(load_file(path))
    return float(mean_square(module(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))))


def check_training_and_resuming(root: Path) -> None:
    """A first loss as on the CPU, and after a save and a load the next ones are the same bits."""
    path = root / "model.safetensors"
    module, losses = loaded(path), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    first = train_step(module, optimizer, rows(), loss=mean_square)["loss"]
    assert abs(first - expected_loss(path)) < 1e-3 * first
    save_checkpoint(module, root / "saved", optimizer=optimizer)
    for _ in range(2):
        losses.append([train_step(module, optimizer, rows(), loss=mean_square)["loss"] for _ in range(2)])
        load_checkpoint(module, root / "saved")
        load_optimizer_state(module, optimizer, root / "saved")
    assert losses[0] == losses[1]


def check_asynchronous_save(root: Path) -> None:
    """It holds the weights of the call; how long it stops training is printed beside a plain copy to pinned memory."""
    module, saver = loaded(root / "large.safetensors"), AsyncSaver()
    saver.save(module, Destination(str(root / "large-first")))  # allocates what later ones reuse
    saver.settle()
    locals_ = [local_tensor(parameter).detach() for parameter in module.parameters()]
    pin = device_type() != "cpu"
    pinned = [torch.empty(local.shape, dtype=local.dtype, pin_memory=pin) for local in locals_]
    pairs = list(zip(pinned, locals_, strict=True))
    copy_s = timed(lambda: [target.copy_(local, non_blocking=True) for target, local in pairs])
    stall_s = timed(lambda: saver.save(module, Destination(str(root / "large-async"))))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    saver.settle()
    assert saver.last_committed == str(root / "large-async")
    tell("async save: stall ÷ copy", stall_s, copy_s)
    assert_holds(loaded(root / "large-async"), root / "large.safetensors")


def check_load_beside_its_floor(root: Path) -> None:
    """The time of a load is printed beside copies of as many bytes from one page-locked buffer."""
    path = root / "large.safetensors"
    module = loaded(path, Loading("local"))
    load_s = timed(lambda: load_checkpoint(module, path, loading=Loading("local")))
    pinned = torch.ones(64 << 20, dtype=torch.uint8, pin_memory=device_type() != "cpu")
    shards = [local_tensor(parameter).detach().view(-1).view(torch.uint8) for parameter in module.parameters()]
    parts = [part for shard in shards for part in shard.split(64 << 20)]
    floor_s = timed(lambda: [part.copy_(pinned[: len(part)], non_blocking=True) for part in parts])
    tell("load ÷ pinned copies", load_s, floor_s)


def timed(run: Callable[[], Any]) -> float:
    """Return the seconds of a call on the slowest rank, and of what it has queued on the device."""
    device().synchronize()
    dist.barrier()
    begun = time.monotonic()
    run()
    device().synchronize()
    dist.barrier()
    return time.monotonic() - begun


def tell(what: str, seconds: float, floor_s: float) -> None:
    """Print a ratio; nothing is asserted of seconds."""
    if dist.get_rank() == 0:
        ratio = f"{seconds:.3f} s ÷ {floor_s:.3f} s = {seconds / floor_s:.2f}"
        print(f"{device_type()}, W={dist.get_world_size()}: {what} = {ratio}", flush=True)


def check_contexts(root: Path) -> None:
    """Each rank has a context on its own device, and nobody has another. The last check."""
    if device_type() == "sim":
        touched = load_extension().touched()
        assert set(touched) == {dist.get_rank()}, touched
        return
    found = contexts({os.getpid()})
    assert len(found) == 1, found


def contexts(pids: Collection[int]) -> list[str]:
    """Return `GPU, pid` for each CUDA context of these processes, as nvidia-smi sees them; others may come and go."""
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if int(line.rpartition(",")[2]) in pids]


def check_ranks_on_cpus(root: Path) -> None:
    """A gloo group of CPU ranks that load, train and save makes no context."""
    module = shard_module(make_layers(), init_mesh("cpu"))
    load_checkpoint(module, root / "model.safetensors")
    train_step(module, torch.optim.SGD(module.parameters(), lr=0.0), rows(), loss=mean_square)
    save_checkpoint(module, root / "saved-on-cpus")
    assert not torch.cuda.is_initialized()
    if shutil.which("nvidia-smi"):
        assert not contexts({os.getpid()})


CHECKS = (
    check_loads,
    check_replicas,
    check_training_and_resuming,
    check_asynchronous_save,
    check_load_beside_its_floor,
    check_contexts,
)
NAMES = tuple(check.__name__ for check in CHECKS)


def run_all(root: Path) -> dict[str, str]:
    """All checks of a rank; name → traceback."""
    return {check.__name__: outcome_of(partial(check, root)) for check in CHECKS}


def write_checkpoints(root: Path, kind: str) -> None:
    """Write what the checks load."""
    torch.manual_seed(0)
    root.mkdir()
    save_file(make_layers().state_dict(), root / "model.safetensors")
    save_file(make_layers(*LARGE[kind]).state_dict(), root / "large.safetensors")
