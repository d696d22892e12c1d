"""`AsyncSaver`: saves that are written while training goes on.

Note [Background]: training stops while each rank copies its shards to host memory, and no longer. A thread on each rank
writes from the copies, and its messages go over a gloo group of its own: two threads of a rank that used one group
would match each other's messages.
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
from raysharding.distributed.comm import nobody_connects_later
from raysharding.distributed.fully_shard import reshard, unwrapped
from raysharding.distributed.optim import OptimizerSnapshot
from raysharding.distributed.saving.save import Destination, HostMemory, Save, SaveReport, begin_save, model_contents

_KEPT = 64


@dataclass
class BackgroundSave:
    """One save, as its thread sees it; each field is one assignment, and any thread may read it."""

    path: str
    """Where it goes."""
    bytes_done: int = 0
    """Bytes written, all ranks together."""
    bytes_total: int = 0
    """Bytes in all."""
    is_done: bool = False
    """Whether it has ended, well or not."""
    report: SaveReport | None = None
    """What it gave, once it is committed."""
    error: BaseException | None = None
    """What it failed of."""


class AsyncSaver:
    """One save at a time, in the background. Every rank makes one, and calls it alike."""

    def __init__(self) -> None:
        """Nothing is being saved."""
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
        *,
        optimizer: torch.optim.Optimizer | None = None,
        position: Position | None = None,
        stall_s: float = 120.0,
    ) -> int:
        """Copy what is to be saved, and begin to write it; collective. The module may change when this returns.

        Memory: the shards of this rank once more, in host memory, which is kept for the next save.

        Args:
            module: See `save_checkpoint`; so are the others.
            destination: Where it goes.
            optimizer: Also save its state.
            position: Where a run over data stands.
            stall_s: Longest wait for one round of messages, in seconds.

        Returns:
            Its number, for `status`.

        Raises:
            CheckpointError: On every rank: the destination is refused.
            PlanError: On every rank, as from `save_checkpoint`.
        """
        self.settle()
        save = begin_save(module, destination, optimizer, position, stall_s)
        try:
            group = self._own_group(stall_s)
            if self._preparing is not None:
                self._preparing.join()  # it allocates, and waits for nobody
            contents = save.contents.copied(self._memory)
        except BaseException as error:
            save.discard(error)
            raise
        copy = replace(save, contents=contents, group=group, device=torch.device("cpu"))
        self._last += 1
        entry = self._saves[self._last] = BackgroundSave(destination.path)
        self._saves.pop(self._last - _KEPT, None)
        self._thread = threading.Thread(target=_run, args=(copy, entry), name="raysharding-save", daemon=True)
        self._thread.start()
        return self._last

    def prepare(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, stall_s: float = 120.0
    ) -> None:
        """Do ahead of the first save what it would have to do while training stands still; collective.

        That is to make the process group, and, in a thread, memory for the copies: fresh memory takes a copy in twice
        the time.

        Args:
            module: See `save`.
            optimizer: See `save`; after its first step, which makes its state.
            stall_s: See `save`.
        """
        # First, and whatever this rank has done before: one that has taken a lost one's place has no group, and then
        # the others, which were in that with it, have none either.
        self._own_group(stall_s)
        if self._preparing is not None or self._saves:
            return
        module = unwrapped(module)
        reshard(module)  # it is the shards that are copied
        held, _ = model_contents(module)
        try:
            state = {} if optimizer is None else OptimizerSnapshot.of(module, optimizer).tensors
        except ValueError:
            return  # the save will say, on every rank, what of it cannot be saved

        def run() -> None:
            with suppress(RuntimeError):  # without the memory the save itself says so
                self._memory.reserve(held, "model")
                self._memory.reserve(state, "optimizer")

        self._preparing = threading.Thread(target=run, name="raysharding-reserve", daemon=True)
        self._preparing.start()

    def _own_group(self, stall_s: float) -> dist.ProcessGroup:
        """The gloo group of the threads that write; collective where there is none."""
        if self._group is None:
            with nobody_connects_later():
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=stall_s))
        return self._group

    @property
    def last_committed(self) -> str | None:
        """Path of the last save, if that is committed."""
        last = self._saves.get(self._last)
        return None if last is None or last.report is None else last.path

    def status(self, number: int) -> BackgroundSave | None:
        """Return how a save fares; `None` for one that there is not. From any thread."""
        return self._saves.get(number)

    def settle(self, on_wait: Callable[[BackgroundSave], None] | None = None) -> None:
        """Wait for the save under way, which its own deadlines bound; how it ended, `status` says.

        Args:
            on_wait: Called now and then meanwhile.
        """
        thread = self._thread
        while thread is not None and thread.is_alive():
            thread.join(0.1)
            if on_wait is not None:
                on_wait(self._saves[self._last])

    def wait(self) -> SaveReport | None:
        """Wait for the save under way. All ranks hear alike.

        Returns:
            The last save's report; `None` where there was none.

        Raises:
            Exception: What it failed of.
        """
        self.settle()
        last = self._saves.get(self._last)
        if last is not None and last.error is not None:
            raise last.error
        return None if last is None else last.report

    def lose_group(self) -> None:
        """The process groups were destroyed, and with them a save under way: that fails by itself."""
        self._group = None


def _run(save: Save, entry: BackgroundSave) -> None:
    def follow(_phase: str, done: int, total: int, _tensor: str) -> None:
        entry.bytes_done, entry.bytes_total = done, total

    try:
        entry.report = save.run(follow)
    except BaseException as error:  # noqa: BLE001 - `wait` raises it, and `status` tells it
        error.__traceback__ = None  # its frames would hold the copies
        error.add_note(f"raysharding: from the save to {entry.path}, in the background")
        entry.error = error
    entry.is_done = True
