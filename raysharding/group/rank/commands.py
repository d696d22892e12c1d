"""The commands of a rank's work thread: methods of `RankCommands`, of the worker, its trainer and its predictor."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from raysharding.batch import Out, RankBatch
from raysharding.checkpoint import Checkpoint
from raysharding.checkpoint.storage import HubAccess, adopt_access
from raysharding.config import Loading, Sharding
from raysharding.distributed.comm import (
    LinkTimes,
    StoreAddress,
    is_accelerator,
    join_process_group,
    leave_process_group,
    measure_link,
    serve_store,
    set_current_device,
    share_device,
    use_expandable_segments,
)
from raysharding.distributed.footprint import MemoryNeed, memory_need
from raysharding.distributed.saving import random_state, restore_random_state
from raysharding.distributed.weights import CopySpec
from raysharding.errors import GroupError, PlanError, RayshardingError, said
from raysharding.group.cluster import accelerator_names, facts_here
from raysharding.group.messages import (
    END_STEPS,
    NEXT_STEP,
    Command,
    RemoteError,
    Shared,
    Stage,
    StateChange,
    record_exception,
)
from raysharding.group.rank.argument_refs import fetched
from raysharding.group.rank.assignment import Assignment, Title
from raysharding.group.rank.memory_gauge import export_memory
from raysharding.group.rank.model_facts import ModelFacts
from raysharding.imports import paused_gc
from raysharding.models import Adapted, InputBounds, import_model
from raysharding.worker import Worker, thread_state_restored

_STREAMING = ("load", "save", "copy_to")
"""Commands that report phases."""
_IN_STEPS = ("state_dict", "evaluate", "generate_stream")
"""Commands that are generators: the controller asks for the next value by `NEXT_STEP`."""


class RankCommands:
    """Runs commands on the work thread. "Collective": the controller sends the command to every rank."""

    def __init__(self, title: Title, imports: tuple[str | None, bytes] | None = None) -> None:
        self._title = title
        # On a thread: the connections of a rendezvous, which take as long on GPUs, release the GIL.
        self._importing = None if imports is None else ThreadPoolExecutor(1).submit(import_code, *imports)
        self._server: Any = None
        self._address: StoreAddress | None = None
        self._node_ip = ""
        self._rank_worker: Worker | None = None
        self._steps: Generator[Any, None, Any] | None = None
        self._doing = "start"
        self._is_adapted = False
        self._before = 0, 0

    @thread_state_restored()
    def run(self, command: Command) -> tuple[bool, Any]:
        """Run one command.

        Args:
            command: Names a public method; holds its arguments.

        Returns:
            True if the call has more steps, and the value.
        """
        # All steps of a call have its name: an error names the method that the user called.
        self._doing = command.method.removesuffix(NEXT_STEP)
        self._before = self._counts()
        if command.resets:
            self._worker.reset()
        if command.method.endswith(NEXT_STEP):
            return self._next_step()
        if command.method == END_STEPS:
            assert self._steps is not None, "the first step comes first"
            self._steps.close()
            return False, None
        assert command.args is not None, "RankActor.fetch brought them, if the controller did not"
        args, kwargs = command.args.unpack()
        if command.shared is not None:
            values = command.shared.unpack()
            args = tuple(_filled(value, values) for value in args)
        args = tuple(fetched(value, command.method) if isinstance(value, RankBatch) else value for value in args)
        value = self._method(command.method)(*args, **kwargs)
        if command.method not in _IN_STEPS:
            return False, value
        self._steps = value
        return self._next_step()

    def _method(self, name: str) -> Any:
        if hasattr(self, name):
            return getattr(self, name)
        worker = self._worker
        return next(getattr(one, name) for one in (worker, worker.trainer, worker.predictor) if hasattr(one, name))

    def _next_step(self) -> tuple[bool, Any]:
        assert self._steps is not None, "the first step comes first"
        try:
            return True, next(self._steps)
        except StopIteration as last:
            return False, last.value

    def serve_store(
        self, node_ip: str | None, timeout_s: float, port_range: tuple[int, int] | None
    ) -> StoreAddress | None:
        """Start the store of the group on rank 0, the only rank that gets an address."""
        if node_ip is None:
            return None
        self._server, address = serve_store(node_ip, timeout_s=timeout_s, port_range=port_range)
        return address

    def join(self, place: Assignment, address: StoreAddress) -> dict[str, float]:
        """Set device, threads and process group of the assigned place; collective, once in the process's life.

        Returns:
            Seconds of the device and of the process group.
        """
        info, begun = place.info, time.monotonic()
        self._title.show_rank(info.rank)
        self._address, self._node_ip = address, info.node_ip
        device = torch.device(info.device)
        # Before the first CUDA call of this process, after which the variable has no effect. For CPU ranks it is empty:
        # since Ray 2.60 they would see every GPU of the node, and code that asks for one would make a context there.
        os.environ[accelerator_names(device.type).visible_devices] = place.visible_gpus
        if is_accelerator(device):
            if not place.shares_device:  # whose ranks may pass tensors to other processes of the GPU, by CUDA IPC
                use_expandable_segments(device)
            set_current_device(device)
            if place.shares_device:
                share_device(device)
        else:
            torch.set_num_threads(place.num_threads)
        device_s = time.monotonic() - begun
        join_process_group(
            address,
            rank=info.rank,
            world_size=place.world_size,
            device=device,
            node_ip=info.node_ip,
            rendezvous_s=place.rendezvous_s,
            timeout_s=place.collective_s,
            server=self._server,
        )
        self._rank_worker = Worker(info.rank, place.world_size, info.local_rank, device, stall_s=place.stall_s)
        self._rank_worker.status.version_offset = place.weights_version
        export_memory(self._title.group, info.rank, self.status)
        return {"device": device_s, "connect": time.monotonic() - begun - device_s}

    node_facts = staticmethod(facts_here)
    """Return what this process sees of its node. Not collective; runs before `join`."""

    def check_link(self, broadcast_bytes: int) -> LinkTimes:
        """Measure latency and bandwidth of the process group; collective."""
        return measure_link(self._worker.device, broadcast_bytes)

    def memory_need(self, optimizer: Callable[..., torch.optim.Optimizer] | None) -> MemoryNeed:
        """Return the memory that a load of the built module needs, and the free memory. Not collective."""
        worker = self._worker
        return memory_need(worker.module, worker.device, worker.status.loading, optimizer)

    def build(self, model: Any, checkpoint: bytes, sharding: Sharding, loading: Loading) -> Any:
        """Build the sharded module on meta; collective.

        Returns:
            Bounds of its inputs, its `ModelFacts`, and seconds of the import of its code and of the rest.
        """
        seconds = {}
        if self._importing is not None:
            seconds["transformers"] = self._importing.result()
        begun = time.monotonic()
        self._is_adapted = isinstance(model, Adapted)
        self._worker.build(model, Checkpoint.from_json(checkpoint), sharding, loading)
        # What was imported and built stays: to traverse it takes a collection 0.3 s, in which all ranks wait for one.
        gc.freeze()
        seconds["module"] = time.monotonic() - begun
        return InputBounds.of(self._worker.module), ModelFacts.of(self._worker.module), seconds

    def load(self, path: str | None, hub: HubAccess | None = None) -> Any:
        """Load a checkpoint into the module, with the driver's access to the hub; return rank 0's report. Collective.

        The report is `None` on the other ranks.
        """
        if hub is not None:
            adopt_access(hub)
        report = self._worker.load(path)
        return report if self._worker.rank == 0 else None

    def copy_to(self, spec: CopySpec) -> dict[str, Any]:
        """Copy the weights of one group into another; collective over the ranks of both."""
        return self._worker.copy_weights(spec, self._node_ip)

    def stop_copy(self, key: str) -> None:
        """End a copy whose other group has failed. Thread-safe, also while a command runs."""
        if self._rank_worker is not None:
            self._rank_worker.stop_copy(key)

    def store_address(self) -> StoreAddress:
        """Return the address of the group's store. Thread-safe."""
        assert self._address is not None, "join comes before store_address"
        return self._address

    generators = staticmethod(random_state)
    """Return the state of the rank's random generators."""
    restore_generators = staticmethod(restore_random_state)
    """Restore the random generators."""

    def set_optimizer(self, *args: Any) -> str | None:
        """Make the optimizer; return a warning for the user. Collective if its state is restored."""
        self._worker.trainer.set_optimizer(*args)
        return self._worker.trainer.new_warning()

    def call(self, batch: RankBatch, fn: Callable[..., Any], out: Out | None) -> Any:
        """Run the user's function on all ranks. A rank with a dummy row returns no result."""
        value = self._worker.call(fn, batch.args, batch.kwargs)
        if batch.is_dummy:
            return None
        kind = "per_rank" if out is None else out.kind
        is_wanted = kind != "none" and (kind != "rank0" or self._worker.rank == 0)
        return value if is_wanted else None

    def save(self, path: str, overwrite: bool, async_save: bool, options: Mapping[str, Any]) -> Any:
        """Save the model; return the report, on rank 0, or the number of a save in the background. Collective."""
        outcome = self._worker.save(path, overwrite, async_save=async_save, **options)
        return outcome if async_save or self._worker.rank == 0 else None

    def close(self) -> None:
        """Leave the process group, on all ranks."""
        if self._rank_worker is not None:
            self._rank_worker.close()
        leave_process_group()

    def save_status(self, number: int) -> tuple[bool, int, Exception | None]:
        """Return whether a save in the background has ended, its bytes so far, and its failure. Thread-safe."""
        save = None if self._rank_worker is None else self._rank_worker.status.saver.status(number)
        if save is None:
            return True, 0, GroupError("rank 0 has no record of this save")
        error = save.error
        if error is not None and not isinstance(error, RayshardingError):
            error = GroupError(f"{type(error).__name__}: {said(error)}")
        return save.is_done, save.bytes_done, error

    def progress(self) -> tuple[str, int, int]:
        """Return phase, bytes done and total bytes. Thread-safe, also while a command runs."""
        worker = self._rank_worker
        return self.phase(), *((0, 0) if worker is None else (worker.status.bytes_done, worker.status.bytes_total))

    def failure(self, error: BaseException, stage: Stage) -> RemoteError:
        """Describe an exception of the last command; `stage` as in `RemoteError`."""
        status = None if self._rank_worker is None else self._rank_worker.status
        tensor = status.last_tensor or None if status is not None and self._doing in _STREAMING else None
        is_usable = status is None or status.usable
        return record_exception(error, stage=stage, phase=self.phase(), tensor=tensor, recovered=is_usable)

    def change(self) -> StateChange:
        """Return what the last command did to the model."""
        if self._rank_worker is None:
            return StateChange(whole=False, num_changes=0)
        status, before, now = self._rank_worker.status, self._before, self._counts()
        accumulates = status.accumulation.num_passes > 0
        return StateChange(status.whole, now[0] - before[0], now[1] - before[1], accumulates, status.weights_version)

    def keeps_adapters(self) -> bool:
        """Return True if the command that succeeded loaded a whole model and kept the adapters on it."""
        report = self._worker.load_report if self._doing == "load" and self._is_adapted else None
        return report is not None and bool(report.kept)

    def _counts(self) -> tuple[int, int]:
        """Return the numbers of changes to weights or optimizer and of collectives so far."""
        worker = self._rank_worker
        return (0, 0) if worker is None else (worker.status.num_changes, worker.status.num_collectives())

    def phase(self) -> str:
        """Return the phase of a running load or save, else the name of the running command."""
        worker = self._rank_worker
        return worker.status.phase if worker is not None and self._doing in _STREAMING else self._doing

    def status(self) -> dict[str, Any]:
        """Return the result of `Worker.status`. Thread-safe, also while a command runs."""
        return {"phase": self._doing} if self._rank_worker is None else self._rank_worker.status()

    @property
    def device(self) -> torch.device:
        """Device of the rank; the CPU until it has joined the others."""
        return torch.device("cpu") if self._rank_worker is None else self._rank_worker.device

    @property
    def _worker(self) -> Worker:
        assert self._rank_worker is not None, "join comes before every other command"
        return self._rank_worker


def import_code(model: str | None, config: bytes) -> float:
    """Import the code of a transformers model; return the seconds.

    Args:
        model: Name of a transformers auto class; `None` for the class that config.json names.
        config: Encoded `Checkpoint`; only its config.json is used.
    """
    begun = time.monotonic()
    with suppress(PlanError, ImportError), paused_gc():  # `build` raises it again, as the error of a call
        import_model(model, Checkpoint.from_json(config))
    return time.monotonic() - begun


def _filled(value: Any, shared: Sequence[Any]) -> Any:
    """Replace the `Shared` marks of a batch by the shared values."""
    if not isinstance(value, RankBatch):
        return value

    def fill(part: Any) -> Any:
        return shared[part.index] if isinstance(part, Shared) else part

    return value.replaced(fill)
