"""`run_ranks`: run one function on W real processes that share a gloo group, and give back what each rank returned."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Imports of torch and transformers take a rank 3 to 10 s of a core. Ranks are forked from a process that has done
# nothing but these imports: no thread, no group, no tensor, and so nothing that a fork would spoil.
# What is not installed here is passed over.
PRELOADED = [
    "raysharding.distributed",
    "raysharding.models",
    "tests.spawn",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "tests.frozen",
]

PEER_GRACE_S = 3.0
"""How long the other ranks may go on after one failed: long enough to report an error that they share."""


class RanksFailedError(AssertionError):
    """At least one rank raised, died or did not finish. The message carries every rank's traceback."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    fresh: bool = False,
    device: str = "cpu",
    gloo: bool = True,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` new processes inside one process group; return the results by rank.

    `fn` must be a module-level function and, like `args` and the results, picklable. Inside it `torch.distributed` is
    initialised (ask it for rank and world size) and torch uses one thread. No process outlives the call.

    Args:
        world_size: Number of processes.
        fn: Runs on every rank.
        args: Given to every rank alike.
        timeout_s: Deadline for all ranks together, process start included; also the gloo group's own timeout.
        fresh: Start new interpreters, slower by seconds, for what is fixed when a process starts (malloc's settings),
            or where memory is measured.
        device: `cpu`; `cuda` for ranks on GPUs of their own; or `sim` for ranks on simulated devices, see
            `tests.accelerator`.
        gloo: False for the device's own backend alone, without gloo for tensors in host memory.

    Raises:
        RanksFailedError: A rank raised, died or missed the deadline; names each, with traceback or stacks.
    """
    context: multiprocessing.context.BaseContext = multiprocessing.get_context("spawn" if fresh else "forkserver")
    if not fresh:
        context.set_forkserver_preload(PRELOADED)
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="raysharding-ranks-") as folder:
        processes = [
            context.Process(  # type: ignore[attr-defined]  # typeshed gives it to the contexts themselves
                target=_rank_main,
                args=(rank, world_size, folder, timeout_s, environment, (device, gloo), fn, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, folder, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                _stop(process)
        return _collect(processes, folder)


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    environment: Mapping[str, str],
    device: tuple[str, bool],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Join the group, run `fn`, and leave the outcome in `folder/rank-R`."""
    # A forked rank has the environment of when the first rank was forked.
    os.environ.clear()
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    # On SIGUSR1 (sent at the deadline) the stacks of all threads go into a file, so that a hang says where it is.
    stacks = Path(folder, f"stacks-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        store = FileStore(str(Path(folder, "store")), world_size)
        deadline = timedelta(seconds=timeout_s)
        backend, device_id = _use(*device, rank)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=deadline, device_id=device_id
        )
        result = (True, fn(*args))
        # Without this a rank that is done early would close sockets that its peers still use. Not on the device, which
        # may be dead.
        store.set(f"done/{rank}", "")
        store.wait([f"done/{other}" for other in range(world_size)])
        dist.destroy_process_group()
    except BaseException:
        result = (False, traceback.format_exc())
    _write_result(folder, rank, result)
    # Skips interpreter teardown: a failed group's threads may block it, and the result is already on disk.
    os._exit(0 if result[0] else 1)


_device = "cpu"


def device_type() -> str:
    """The type of this rank's device, as `run_ranks` was told."""
    return _device


def _use(device: str, gloo: bool, rank: int) -> tuple[str, Any]:
    """Make a rank's device its current one; returns backend and `device_id` of the process group."""
    global _device
    _device = device
    if device == "cpu":
        return "gloo", None
    import torch
    import torch.distributed as dist

    if device == "sim":
        from tests.accelerator.device import register

        register()
    torch.get_device_module(device).set_device(rank)
    backend = dist.Backend.default_device_backend_map[device]
    return f"cpu:gloo,{device}:{backend}" if gloo else backend, torch.device(device, rank)


def _write_result(folder: str, rank: int, result: tuple[bool, Any]) -> None:
    try:
        data = pickle.dumps(result)
    except Exception:
        data = pickle.dumps((False, f"the result does not pickle:\n{traceback.format_exc()}"))
    partial = Path(folder, f"partial-{rank}")
    partial.write_bytes(data)
    partial.rename(Path(folder, f"rank-{rank}"))


def _wait(processes: Sequence[BaseProcess], folder: str, deadline: float) -> None:
    """Wait for all ranks; after a failure only `PEER_GRACE_S` more. At the deadline ask the late ones for stacks."""
    pending: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
    while pending and (left := deadline - time.monotonic()) > 0:
        for sentinel in multiprocessing.connection.wait(list(pending), timeout=left):
            process = pending.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                deadline = min(deadline, time.monotonic() + PEER_GRACE_S)
    for process in pending.values():
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    if pending:
        time.sleep(0.2)


def _stop(process: BaseProcess) -> None:
    if process.pid is not None:
        if process.is_alive():
            process.kill()
        process.join()


def _collect(processes: Sequence[BaseProcess], folder: str) -> list[Any]:
    results: list[Any] = []
    failures: list[str] = []
    for rank, process in enumerate(processes):
        path = Path(folder, f"rank-{rank}")
        if path.exists():
            ok, value = pickle.loads(path.read_bytes())
            results.append(value)
            if not ok:
                failures.append(f"rank {rank} raised:\n{value}")
            continue
        stacks = Path(folder, f"stacks-{rank}")
        where = stacks.read_text() if stacks.exists() else ""
        how = f"did not finish; its stacks:\n{where}" if where else f"ended with exit code {process.exitcode}"
        failures.append(f"rank {rank} {how}")
    if failures:
        raise RanksFailedError("\n".join(failures))
    return results
