"""`AsyncSaver`: saves that are written in the background, while training continues.

Note [Background]: training stops only while each rank copies its shards to host memory. A thread on each rank writes
the copies, and communicates over a group of its own: messages of two threads in one group would be mixed up. It is of
gloo, also where training uses NCCL: the copies are in host memory, and torch calls it unsafe to use several groups of
NCCL at once.

Note [Owners]: what each thread uses.
    The caller's thread runs the collectives of the training group (`begin_save`, `agreeing`), and is the only one that
    reads the module's shards. `prepare` starts a thread that allocates the buffers of `HostMemory`; `save` joins it
    before it copies into them. The writing thread reads these buffers until it ends: the next save waits for it
    (`wait`) before anything else, as its copies overwrite them. It uses the module for its configuration alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from raysharding.data import Position
from raysharding.distributed.comm import agreeing, closed_listeners, device_module, is_accelerator, using_group
from raysharding.distributed.fully_shard import compute_device, reshard, unwrapped
from raysharding.distributed.optim import OptimizerSnapshot
from raysharding.distributed.saving.save import (
    Destination,
    HostMemory,
    Save,
    SaveContents,
    SaveReport,
    begin_save,
    model_contents,
)
from raysharding.errors import CheckpointError

_KEPT = 64


@dataclass
class BackgroundSave:
    """Status of one save. Each field is assigned atomically; any thread may read it."""

    path: str
    """Destination of the save."""
    bytes_done: int = 0
    """Bytes written, over all ranks."""
    bytes_total: int = 0
    """Total bytes."""
    is_done: bool = False
    """True if the save has ended, with or without an error."""
    report: SaveReport | None = None
    """Report of the save, after the commit."""
    error: BaseException | None = None
    """Error of a failed save."""


class AsyncSaver:
    """Runs one save at a time in the background. Every rank makes one, and makes the same calls."""

    def __init__(self) -> None:
        """Start without a save."""
        self._group: dist.ProcessGroup | None = None
        self._memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._preparing: threading.Thread | None = None
        self._saves: dict[int, BackgroundSave] = {}
        self._last = 0

    def save(
        self,
        module: nn.Module,
        destination: Destination,
        optimizer: torch.optim.Optimizer | None = None,
        position: Position | None = None,
        stall_s: float = 120.0,
    ) -> int:
        """Copy the contents of a save, and start to write them; collective. The module may change afterwards.

        Memory: a copy of this rank's shards in host memory, which is reused by the next save.

        Args:
            module: The sharded module.
            destination: Destination of the save.
            optimizer: Optimizer whose state is saved, too.
            position: Position of a run over data.
            stall_s: Longest wait for one round of messages, in seconds.

        Returns:
            Number of the save, for `status`.

        Raises:
            CheckpointError: On every rank, if the destination is refused, or a rank has no memory for its copy.
            PlanError: On every rank, as from `save_checkpoint`.
        """
        self.wait()
        save = begin_save(module, destination, optimizer, position, stall_s)
        try:
            group = self._own_group(stall_s)  # on this thread: where it is made now, that is a collective
            if self._preparing is not None:
                self._preparing.join()  # it allocates memory, and does not wait for other ranks
            # Memory may be short on one rank alone: the threads of the others would wait for its messages.
            with agreeing():
                contents = self._copied(save)
        except BaseException as error:
            save.discard(error)
            raise
        # The copies are in host memory, so their messages are gloo's. The thread reads neither shards nor optimizer
        # state, which training changes meanwhile.
        copy = replace(save, contents=contents, device=torch.device("cpu"))
        self._last += 1
        entry = self._saves[self._last] = BackgroundSave(destination.path)
        self._saves.pop(self._last - _KEPT, None)
        self._thread = threading.Thread(target=_run, args=(copy, entry, group), name="raysharding-save", daemon=True)
        self._thread.start()
        return self._last

    def _copied(self, save: Save) -> SaveContents:
        try:
            return save.contents.copied(self._memory)
        except (MemoryError, RuntimeError) as error:
            self._memory = HostMemory()  # what there was of it may be what others lack
            raise CheckpointError(
                f"a rank has no memory for the copy of its shards: {error}. Save with async_save=False, which copies a "
                "bucket at a time",
                path=save.destination.path,
            ) from error

    def prepare(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, stall_s: float = 120.0
    ) -> None:
        """Prepare the first save, to shorten the stop of training; collective.

        Makes the process group and, in a thread, allocates memory for the copies: the first copy into new memory takes
        twice as long.

        Args:
            module: The sharded module.
            optimizer: Optimizer whose state is saved, after its first step, which makes the state.
            stall_s: Longest wait for one round of messages, in seconds.
        """
        if self._preparing is not None or self._saves:
            return
        self._own_group(stall_s)
        module = unwrapped(module)
        reshard(module)  # the shards are copied
        held, _ = model_contents(module)
        try:
            state = {} if optimizer is None else OptimizerSnapshot.of(module, optimizer).tensors
        except ValueError:
            return  # the save raises on every rank

        device = compute_device(module)

        def run() -> None:
            if is_accelerator(device):
                # The current device is thread-local, and memory is pinned in its context.
                device_module(device).set_device(device)
            with suppress(RuntimeError):  # the save raises if memory is short
                self._memory.reserve(held, "model")
                self._memory.reserve(state, "optimizer")

        self._preparing = threading.Thread(target=run, name="raysharding-reserve", daemon=True)
        self._preparing.start()

    def _own_group(self, stall_s: float) -> dist.ProcessGroup:
        """Return the gloo group of the writing threads; collective if it must be made."""
        if self._group is None:
            with closed_listeners():
                timeout = timedelta(seconds=stall_s)
                # All ranks make this call: those of a `ShardedModelGroup`, the only user of this class.
                self._group = dist.new_group(backend="gloo", timeout=timeout)  # all ranks
        return self._group

    @property
    def last_committed(self) -> str | None:
        """Path of the last save if it is committed, else `None`."""
        last = self._saves.get(self._last)
        return None if last is None or last.report is None else last.path

    def status(self, number: int) -> BackgroundSave | None:
        """Return the status of a save; `None` if there is no such save. Thread-safe."""
        return self._saves.get(number)

    def wait(self, on_wait: Callable[[BackgroundSave], None] | None = None) -> None:
        """Wait for the end of the running save, which has its own deadlines; `status` has the outcome.

        Args:
            on_wait: Called repeatedly during the wait.
        """
        thread = self._thread
        while thread is not None and thread.is_alive():
            thread.join(0.1)
            if on_wait is not None:
                on_wait(self._saves[self._last])


def _run(save: Save, entry: BackgroundSave, group: dist.ProcessGroup) -> None:
    def follow(_phase: str, done: int, total: int, _tensor: str) -> None:
        entry.bytes_done, entry.bytes_total = done, total

    try:
        with using_group(group):
            entry.report = save.run(follow)
    except BaseException as error:  # noqa: BLE001 - `status` tells it
        _drop_frames(error)
        error.add_note(f"raysharding: from the save to {entry.path}, in the background")
        entry.error = error
    entry.is_done = True  # last: a thread that reads True reads the outcome, too


def _drop_frames(error: BaseException | None) -> None:
    """Drop the frames of an error and of what led to it: they keep the process group alive, and its connections open.

    gloo closes them when the last reference is gone. Until then, also after `destroy_process_group`, a thread of
    another rank that waits for this rank would wait on.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
