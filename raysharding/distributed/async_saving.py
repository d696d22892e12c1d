"""`AsyncSaver`: saves that are written while training goes on.

Note [Background]: training stops while each rank copies its shards to host memory, and no longer. A thread on each rank
writes from the copies, and its messages go over a gloo group of its own: two threads of a rank that used one group
would match each other's messages.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from raysharding.distributed.report import SaveReport
from raysharding.distributed.save_contents import HostMemory
from raysharding.distributed.saving import Destination, Save, begin_save
from raysharding.distributed.training_files import Position


class AsyncSaver:
    """One save at a time, in the background. Every rank makes one, and calls it alike."""

    def __init__(self) -> None:
        """Nothing is being saved."""
        self._group: dist.ProcessGroup | None = None
        self._memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._path = ""
        self._report: SaveReport | None = None
        self._error: BaseException | None = None

    def save(
        self,
        module: nn.Module,
        destination: Destination,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        position: Position | None = None,
        stall_s: float = 120.0,
    ) -> None:
        """Copy what is to be saved, and begin to write it; collective. The module may change when this returns.

        Memory: the shards of this rank once more, in host memory, which is kept for the next save.

        Args:
            module: See `save_checkpoint`; so are the others.
            destination: Where it goes.
            optimizer: Also save its state.
            position: Where a run over data stands.
            stall_s: Longest wait for one round of messages, in seconds.

        Raises:
            CheckpointError: On every rank: the save before this one failed, or the destination is refused.
            PlanError: On every rank, as from `save_checkpoint`.
        """
        self.wait()
        save = begin_save(module, destination, optimizer, position, stall_s)
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        copy = replace(save, contents=save.contents.copied(self._memory), group=self._group, device=torch.device("cpu"))
        self._report, self._error, self._path = None, None, destination.path
        self._thread = threading.Thread(target=self._run, args=(copy,), name="raysharding-save", daemon=True)
        self._thread.start()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What the last save failed of, until `wait` has raised it."""
        return None if self.is_saving else self._error

    def lose_group(self) -> None:
        """The process groups were destroyed, and with them a save under way: that fails by itself."""
        self._group = None

    def settle(self) -> None:
        """Wait for the save under way, and forget how it ended."""
        if self._thread is not None:
            self._thread.join()
        self._thread, self._report, self._error = None, None, None

    def wait(self) -> SaveReport | None:
        """Wait for the save under way, which its own deadlines bound. All ranks hear alike.

        Returns:
            Its report, where there was one.

        Raises:
            Exception: What it failed of, once.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            error.add_note(f"raysharding: from the save to {self._path} in the background")
            raise error
        report, self._report = self._report, None
        return report

    def _run(self, save: Save) -> None:
        try:
            self._report = save.run()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
