"""Checks of ranks without groups, on 1, 2 and 4 of any device: NCCL, page-locked memory, contexts, hangs, dead devices.

`python -m tests.gpu.rank_checks cuda|cpu|sim [CHECK]...`; without names all, with names also on machines at work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
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
from raysharding.config import Loading
from raysharding.distributed import (
    gather_state_dict,
    init_mesh,
    load_checkpoint,
    save_checkpoint,
    shard_module,
    train_step,
)
from raysharding.distributed.fully_shard import local_tensor
from raysharding.distributed.saving import AsyncSaver, Destination
from raysharding.models import build_module
from tests.accelerator import fault_checks
from tests.accelerator.build import load_extension
from tests.accelerator.fault_checks import batch_of, mean_square
from tests.distributed.checks import outcome_of
from tests.gpu.record import Record
from tests.spawn import device_type, run_ranks

SIZES = {"model": (256, 8), "large": (512, 8), "large on a GPU": (4096, 32)}
"""Width and layers; the last, of 2 GiB, is the one whose times are told on a GPU."""


def layers(name: str) -> nn.Module:
    """The model of a checkpoint."""
    width, num_layers = SIZES[name]
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))


def large() -> str:
    """The model whose times are told."""
    return "large on a GPU" if device_type() == "cuda" else "large"


def loaded(path: Path, name: str, loading: Loading | None = None) -> nn.Module:
    """A module cut over the ranks, with the weights of a checkpoint."""
    module = build_module(partial(layers, name), open_checkpoint(path), None)
    shard_module(module, init_mesh(device_type()))
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
    path = root / "model.safetensors"
    for transport in ("auto", "local", "scatter", "broadcast"):
        peak_pinned(reset=True)
        assert_holds(loaded(path, "model", Loading(transport, bucket_bytes=1 << 16)), path)
        peak = peak_pinned()
        assert dist.get_rank() > 0 or device_type() == "cpu" or peak >= 1 << 16, f"{transport}: not pinned: {peak}"


def peak_pinned(*, reset: bool = False) -> int:
    """Return the peak of page-locked bytes in use, or count it from here on."""
    if device_type() == "sim":
        extension = load_extension()
        return int((extension.reset_peak_pinned() if reset else extension.max_pinned_allocated()) or 0)
    if device_type() == "cpu":
        return 0
    if reset:
        torch.cuda.memory.reset_peak_host_memory_stats()
    return int(torch.cuda.memory.host_memory_stats()["active_bytes.peak"])


def check_asynchronous_save(root: Path) -> str:
    """It holds the weights of the call; says how long it stops training beside a plain copy to pinned memory."""
    path = root / "large.safetensors"
    if dist.get_rank() == 0:
        save_file(layers(large()).state_dict(), path)
    dist.barrier()
    module, saver = loaded(path, large()), AsyncSaver()
    saver.save(module, Destination(str(root / "large-first")))  # allocates what later ones reuse
    saver.wait()
    locals_ = [local_tensor(parameter).detach() for parameter in module.parameters()]
    pin = device_type() != "cpu"
    pinned = [torch.empty(local.shape, dtype=local.dtype, pin_memory=pin) for local in locals_]
    pairs = list(zip(pinned, locals_, strict=True))
    copy_s = timed(lambda: [target.copy_(local, non_blocking=True) for target, local in pairs])
    stall_s = timed(lambda: saver.save(module, Destination(str(root / "large-async"))))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    saver.wait()
    assert saver.last_committed == str(root / "large-async")
    assert_holds(loaded(root / "large-async", large()), path)
    return f"stall ÷ copy = {stall_s:.3f} s ÷ {copy_s:.3f} s = {stall_s / copy_s:.2f}"


def timed(run: Callable[[], Any]) -> float:
    """Return the seconds of a call on the slowest rank, and of what it has queued on the device."""
    device = torch.get_device_module(device_type())
    device.synchronize()
    dist.barrier()
    begun = time.monotonic()
    run()
    device.synchronize()
    dist.barrier()
    return time.monotonic() - begun


def check_contexts(root: Path) -> None:
    """Each rank has a context on its own device, and nobody has another. After all others."""
    if device_type() == "sim":
        touched = load_extension().touched()
        assert set(touched) == {dist.get_rank()}, touched
    elif device_type() == "cuda":
        found = contexts({os.getpid()})
        assert len(found) == 1, found


def contexts(pids: Collection[int]) -> list[str]:
    """Return `GPU, pid` for each CUDA context of these processes, as nvidia-smi sees them; others may come and go."""
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if int(line.rpartition(",")[2]) in pids]


def check_ranks_on_cpus(root: Path) -> None:
    """A gloo group of CPU ranks that load, train and save makes no context."""
    module = shard_module(layers("model"), init_mesh("cpu"))
    load_checkpoint(module, root / "model.safetensors")
    rows = batch_of({"input": torch.linspace(-1, 1, 1024).view(4, 256)})
    train_step(module, torch.optim.SGD(module.parameters(), lr=0.0), rows, loss=mean_square)
    save_checkpoint(module, root / "saved-on-cpus")
    assert not torch.cuda.is_initialized()
    if shutil.which("nvidia-smi"):
        assert not contexts({os.getpid()})


FAULTS = (
    fault_checks.check_offloaded_state,
    fault_checks.check_offloaded_state_of_whole_matrices,
    fault_checks.check_labels_of_a_loss_function,
    fault_checks.check_generator_after_generate,
)
OWN: tuple[Callable[[Path], Any], ...] = (check_loads, check_asynchronous_save, check_contexts)


def run_checks(root: Path, names: Collection[str]) -> dict[str, tuple[str, Any]]:
    """Check → traceback and figure, on a rank."""
    found: dict[str, tuple[str, Any]] = {}
    checks: dict[str, Callable[[], Any]] = {}
    if not names:
        checks |= {name: partial(fault_checks.check_loss, name) for name in fault_checks.LOSSES}
    checks |= {check.__name__: partial(check, root / "faults") for check in FAULTS if not names}
    checks |= {check.__name__: partial(check, root) for check in OWN if not names or check.__name__ in names}
    if not names and device_type() != "cpu":  # an index out of range kills no CPU; and it is the last
        checks["check_dead_device"] = partial(fault_checks.check_dead_device, root / "faults")
    for name, check in checks.items():
        found[name] = _ran(check)
    return found


def _ran(check: Callable[[], Any]) -> tuple[str, Any]:
    figures: list[Any] = []
    return outcome_of(lambda: figures.append(check())), figures[0] if figures else None


def judge(name: str, outcomes: list[dict[str, tuple[str, Any]]]) -> object:
    """Fail with the traceback of the ranks on which a check failed."""
    failed = [f"rank {rank}: {outcome[name][0]}" for rank, outcome in enumerate(outcomes) if outcome[name][0]]
    assert not failed, "\n".join(failed)
    return outcomes[0][name][1]


def judge_hang(name: str, shares: list[dict[str, float]]) -> str:
    """Rank 1 hangs: it is never seen to wait for others, and rank 0 nearly always."""
    waits, hangs = (share[name] for share in shares)
    said = f"rank 0 was seen to wait in {waits:.0%} of the looks, rank 1 in {hangs:.0%}"
    assert hangs == 0, said
    assert waits > 0.8, said
    return said


def run_hangs(root: Path) -> dict[str, float]:
    """Hang → how often this rank was seen to wait for others."""
    return fault_checks.run_hangs(root / "faults")


def run_on_cpus(root: Path) -> dict[str, tuple[str, Any]]:
    """The check of ranks on CPUs."""
    return {"use no GPU": _ran(partial(check_ranks_on_cpus, root))}


def main(device: str, *names: str) -> int:
    """Number of checks that failed."""
    record = Record.of_this_part()

    def checked(
        size: int, what: str, judge: Callable[[str, list[Any]], object], run: Callable[..., Any], *args: Any, on: str
    ) -> None:
        """Run on ranks what returns a table, and judge each of its rows."""
        found: list[Any] = []
        with tempfile.TemporaryDirectory() as folder:
            save_file(layers("model").state_dict(), Path(folder, "model.safetensors"))
            (root := Path(folder, "faults")).mkdir()
            save_file(fault_checks.make_model().state_dict(), root / "model.safetensors")
            ranks = partial(run_ranks, size, run, Path(folder), *args, device=on, timeout_s=200)
            record.check(f"W={size}: {what} ended", lambda: found.extend(ranks()))
        for name in found[0] if found else ():
            record.check(f"W={size}: {name.removeprefix('check_').replace('_', ' ')}", partial(judge, name, found))

    for size in (1, 2, 4):
        checked(size, "all checks", judge, run_checks, names, on=device)
    if not names:
        checked(2, "all hangs", judge_hang, run_hangs, on=device)
        checked(2, "ranks on CPUs", judge, run_on_cpus, on="cpu")
    return record.failures


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
