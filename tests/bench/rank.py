"""One rank of a benchmark, in its own process: runs the loads that its driver requests, and answers with figures.

`rank_set.py` starts this module with `python -m`. The process reads commands as lines of JSON from stdin, and writes
answers as lines of JSON to a pipe; printed text is the log. At the end of stdin the process ends, even during a load.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raysharding.distributed import LoadReport, init_mesh, reshard, shard_module
from raysharding.distributed.comm import device_module, is_accelerator
from raysharding.distributed.fully_shard import local_tensor, module_tensors
from raysharding.distributed.transfer.sources import as_memory
from raysharding.errors import RayshardingError
from tests.bench.case import Arm, Case, Run
from tests.bench.counters import Counters, count_operations, fill_page_cache
from tests.bench.memory import MemorySampler, back_free_pages
from tests.bench.network import join_network
from tests.bench.peers import checkpoint_files

EXIT_GRACE_S = 15.0
"""Seconds that a rank may continue a load after its driver has ended."""

_CANNOT = (RayshardingError, ValueError, ImportError, NotImplementedError)
"""Errors that an arm raises on every rank if it cannot load the case; any other error ends the process."""


@dataclass(frozen=True)
class Spec:
    """Configuration of a rank at its start, as JSON."""

    setup: str
    """`module:function` that creates the case and the arms."""
    options: dict[str, Any]
    """Argument of the `setup` function."""
    rank: int
    world_size: int
    store: str
    """Path of the `FileStore`."""
    reply_descriptor: int
    """Descriptor of the pipe for answers."""
    network_descriptor: int | None
    """Descriptor of the network namespace to join."""
    timeout_s: float
    """Longest wait of a collective, in seconds."""


@dataclass(frozen=True)
class Command:
    """Request of one load, as JSON."""

    arm: str
    digest: bool = False
    """Include a digest of the shards in the answer."""
    count: bool = False
    """Count the operations instead of timing the load."""
    sample: bool = False
    """Sample the memory of this process, and include its peak above the start and the shard in the answer."""


class Session:
    """The rank's mesh, case and arms, for consecutive loads in one process group.

    Args:
        case: The checkpoint and module to load.
        arms: Name → arm.
    """

    def __init__(self, case: Case, arms: dict[str, Arm]) -> None:
        self.case = case
        self.arms = arms
        self._mesh: DeviceMesh = init_mesh(case.device_type, case.sharding)

    def load(self, command: Command) -> dict[str, Any]:
        """Load once into a new module. Collective.

        Args:
            command: The load.

        Returns:
            The answer: figures, or the reason why the arm cannot load the case.
        """
        arm = self.arms[command.arm]
        if arm.device_type not in (None, self.case.device_type):
            return {"cannot": f"ValueError: {arm.name}: on {arm.device_type} only"}
        gc.collect()  # FSDP modules are in reference cycles: the last module's memory must be free
        try:
            module = shard_module(self.case.build(), self._mesh, self.case.sharding)
            run = arm.prepare(self.case, module)
            if command.count:
                return {"operations": count_operations(run)}
            return self._timed(arm, module, run, command)
        except _CANNOT as error:
            return {"cannot": f"{type(error).__name__}: {error}"}

    def _timed(self, arm: Arm, module: nn.Module, run: Run, command: Command) -> dict[str, Any]:
        files = checkpoint_files(self.case.checkpoint)
        if command.sample:
            back_free_pages(sum(file.stat().st_size for file in files))
        fill_page_cache(files)
        # The first collective connects the pairs of ranks.
        dist.all_reduce(torch.ones(1))
        memory = MemorySampler()
        with memory if command.sample else nullcontext():
            result, figures = self._clocked(run)
        loaded = result if isinstance(result, nn.Module) else module
        figures["shard_bytes"] = sum(local_tensor(tensor).nbytes for tensor in module_tensors(loaded).values())
        if command.sample:
            figures["extra_bytes"] = memory.extra_bytes - figures["shard_bytes"]
        if isinstance(result, LoadReport):
            figures["report"] = result.as_dict()
        if command.digest and not arm.is_floor:
            figures["digest"] = digest(loaded)
        return figures

    def _clocked(self, run: Run) -> tuple[LoadReport | nn.Module | None, dict[str, Any]]:
        before = Counters.now()
        # No clock starts before every rank is ready, and the load ends when the last rank has its shards.
        dist.barrier()
        start_s = time.monotonic()
        result = run()
        device = torch.device(self.case.device_type)
        if is_accelerator(device):
            device_module(device).synchronize()
        dist.barrier()
        end_s = time.monotonic()
        counted = Counters.now().since(before)
        return result, {"start_s": start_s, "end_s": end_s, **vars(counted)}


def digest(module: nn.Module) -> str:
    """Return a hash of the parameters' local shards, in order; equal if all bytes are equal."""
    reshard(module)  # after a forward the root's full parameters are registered
    total = hashlib.sha256()
    for parameter in module.parameters():
        total.update(as_memory(local_tensor(parameter).cpu().contiguous().reshape(-1)))
    return total.hexdigest()[:16]


def _read_commands(finished: threading.Event) -> queue.SimpleQueue[Command | None]:
    """Return a queue that a thread fills from stdin; `None` marks the end of stdin, soon after which the process ends.

    Args:
        finished: Set by the main thread when it ends the process itself.
    """
    commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(Command(**json.loads(line)))
        commands.put(None)
        # A killed driver cannot end its ranks, and a rank that waits for other ranks would not end by itself.
        if not finished.wait(EXIT_GRACE_S):
            os._exit(1)

    threading.Thread(target=read, name="commands", daemon=True).start()
    return commands


def _start_process_group(spec: Spec, device_type: str) -> None:
    torch.set_num_threads(1)
    if device_type == "sim":
        from tests.accelerator.device import register

        register()
    device, backend = torch.device(device_type), "gloo"
    if is_accelerator(device):
        devices = device_module(device)
        devices.set_device(spec.rank % devices.device_count())
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device)}"
    store = dist.FileStore(spec.store, spec.world_size)
    timeout = timedelta(seconds=spec.timeout_s)
    dist.init_process_group(backend, store=store, rank=spec.rank, world_size=spec.world_size, timeout=timeout)


def _setup(spec: Spec) -> tuple[Case, dict[str, Arm]]:
    module, _, name = spec.setup.partition(":")
    make: Callable[[dict[str, Any]], tuple[Case, dict[str, Arm]]] = getattr(importlib.import_module(module), name)
    return make(spec.options)


def _answer(replies: TextIO, value: dict[str, Any]) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()


def _tell_failures(replies: TextIO) -> None:
    """Report an uncaught exception before the process ends: the peers then fail too, and all failures look alike."""

    def tell(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        # `sys.stderr` is a buffer here: torch's own hook calls this hook, to prefix each line with the rank.
        traceback.print_exception(kind, error, frames, file=sys.__stderr__)
        _answer(replies, {"failed": f"{kind.__name__}: {error}", "failed_s": time.monotonic()})
        os._exit(1)

    sys.excepthook = tell


def main() -> None:
    """Run the loads that one driver requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the driver, which ends its ranks
    spec = Spec(**json.loads(sys.argv[1]))
    if spec.network_descriptor is not None:
        join_network(spec.network_descriptor)
    os.set_inheritable(spec.reply_descriptor, False)
    replies = os.fdopen(spec.reply_descriptor, "w")
    _tell_failures(replies)
    finished = threading.Event()
    commands = _read_commands(finished)
    try:
        case, arms = _setup(spec)
    except _CANNOT as error:
        _answer(replies, {"cannot": f"{type(error).__name__}: {error}"})
        return
    _start_process_group(spec, case.device_type)
    session = Session(case, arms)
    _answer(replies, {"arms": list(session.arms)})
    while (command := commands.get()) is not None:
        _answer(replies, session.load(command))
    dist.destroy_process_group()
    finished.set()
    sys.stdout.flush()
    os._exit(0)  # deallocation of a session's modules takes seconds


if __name__ == "__main__":
    main()
