"""`RankStatus`: a rank's module, optimizer and current operation, readable from other threads."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raysharding.batch import RankBatch
from raysharding.config import Loading, Sharding
from raysharding.distributed.comm import collective_counters, device_module, exists, is_accelerator
from raysharding.distributed.footprint import missing_to_keep
from raysharding.distributed.fully_shard import (
    is_kept_gathered,
    is_not_gathered,
    is_recoverable,
    is_torn,
    keep_gathered,
    move_inputs,
    recovering,
    reshard,
    warn_once,
)
from raysharding.distributed.saving import AsyncSaver
from raysharding.distributed.training import Accumulation
from raysharding.distributed.transfer import resident_bytes
from raysharding.worker.changes import Version

_NO_GROUP = (
    "{name} has destroyed a process group of the ranks, without which they cannot communicate. "
    "Make groups of your own with torch.distributed.new_group, and destroy only those"
)

_NOT_GATHERED = (
    "raysharding: a module computed with its shard: its parameters were used outside its own forward, so FSDP never "
    'gathered them. Pass Sharding(wrap="none"), or wrap=[...] with the names of classes whose forward is called.'
)


class RankStatus:
    """One rank's ids and device, module and optimizer, and current operation.

    Args:
        rank: Global rank.
        local_rank: Rank within the node.
        device: Where the module computes.
        stall_s: Longest silence of a peer during a load, save or gather, in seconds.
    """

    def __init__(self, rank: int, local_rank: int, device: torch.device, stall_s: float) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.device = device
        self.stall_s = stall_s
        self.sharding = Sharding()
        self.loading = Loading()
        self.optimizer: torch.optim.Optimizer | None = None
        self.loaded: str | None = None
        """The checkpoint that the weights came from."""
        self.saver = AsyncSaver()
        self.phase = "rendezvous"
        """What the running call does: `rendezvous`, `plan`, `stream`, `finalize`, `save`, or the name of its method;
        between calls `ready`, at the end `closed`."""
        self.bytes_done = 0
        self.bytes_total = 0
        self.last_tensor = ""
        self.last_call = ""
        self.usable = True
        """True if later steps will be correct."""
        self.whole = True
        """True if no weights or optimizer state are partially changed."""
        self.num_changes = 0
        """Number of changes to weights or optimizer that a restart from the files of before would lose."""
        self.num_changes_saved = 0
        """That number when files were loaded last, or saved in the foreground."""
        self.num_changes_copied: int | None = None
        """That number when the last background save copied; `None` if it saves no optimizer."""
        self.version_offset = 0
        """`weights_version` without the changes."""
        self.accumulation = Accumulation()
        """The passes since the last update."""
        self.is_spent = True
        """True if the last update has used all existing gradients."""
        self.version_after_call: Version | None = None
        """Version at the end of the last `call`, if no command has run since. If threads of that call write later, the
        next call counts these writes as its own."""
        self._groups: tuple[dist.ProcessGroup, ...] = ()
        self._counters: tuple[Callable[[], int], ...] = ()
        self._num_messages = 0
        self._module: nn.Module | None = None

    @property
    def module(self) -> nn.Module:
        """The sharded root module."""
        if self._module is None:
            raise RuntimeError(f"rank {self.rank} has no module yet: call build() first")
        return self._module

    def __call__(self) -> dict[str, Any]:
        """Return this rank's status as plain data. Safe from any thread; never waits. No collective.

        Keys: `rank`, `pid`, `device`, `phase`, `bytes_done`, `bytes_total`, `last_tensor`, `last_call`, `usable`
        (True if later steps will be correct), and in bytes `host_bytes` (resident now), `peak_host_bytes`,
        `device_bytes` and `peak_device_bytes` (0 on CPUs).
        """
        device = device_module(self.device) if is_accelerator(self.device) else None
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "device": str(self.device),
            "phase": self.phase,
            "bytes_done": self.bytes_done,
            "bytes_total": self.bytes_total,
            "last_tensor": self.last_tensor,
            "last_call": self.last_call,
            "usable": self.usable,
            "host_bytes": resident_bytes(),
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "device_bytes": device.memory_allocated(self.device) if device else 0,
            "peak_device_bytes": device.max_memory_allocated(self.device) if device else 0,
        }

    def num_collectives(self) -> int:
        """Return the number of collectives that this rank has begun in its module's process groups. No collective."""
        return sum(count() for count in self._counters) - self._num_messages

    def leave_out_messages(self, number: int) -> None:
        """Leave messages out of `num_collectives`: gloo counts them, and ranks send and receive unlike numbers."""
        self._num_messages += 0 if is_accelerator(self.device) else number

    def hold(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Store the module, sharded over the mesh, and the process groups that commands need."""
        self._module = module
        assert dist.group.WORLD is not None, "the mesh is made of its ranks"
        self._groups = (dist.group.WORLD, *(group for group in mesh.get_all_groups() if group != dist.group.WORLD))
        # A mesh of one axis has the backend of the default group: it counts once.
        counters = {counter: None for group in self._groups for counter in collective_counters(group)}
        self._counters = tuple(counters)

    def drop(self) -> None:
        """Release module and optimizer. No collective."""
        self.release_gathered()
        self._module = self.optimizer = None
        self._groups = self._counters = ()
        self.phase = "closed"

    def _has_groups(self) -> bool:
        return all(map(exists, self._groups))

    @contextmanager
    def running(self, phase: str, name: str, *, keeps_gathered: bool = False) -> Iterator[None]:
        """Record phase and call while the call runs; after an exception the phase stays, for the failure's report.

        Args:
            phase: The phase of the call.
            name: Name of the call.
            keeps_gathered: True for a forward that full parameters of the calls before may serve; see `keep_gathered`.

        Raises:
            RuntimeError: The call has destroyed a process group of the ranks.
        """
        if is_accelerator(self.device):
            # The current device is thread-local, and the worker's owner may use another thread than for `build`.
            device_module(self.device).set_device(self.device)
        self.phase, self.last_call, self.version_after_call = phase, name, None
        try:
            if not keeps_gathered:
                self.release_gathered()
            yield
        except BaseException as error:
            self.usable = self.usable and is_recoverable(error) and self._has_groups()
            # Most errors have dropped the gradients; the next pass drops any that remain.
            self.forget_gradients()
            self.whole = self.whole and not is_torn(error)
            if not self._has_groups():
                error.add_note(f"raysharding: {_NO_GROUP.format(name=name)}")
            if is_not_gathered(error):
                error.add_note(_NOT_GATHERED)
            raise
        self.phase = "ready"
        if not self._has_groups():
            self.usable = False
            raise RuntimeError(_NO_GROUP.format(name=name))

    def keep_gathered(self, wanted: bool | None) -> bool:
        """Keep all parameters gathered until a call that may not use them; collective.

        Args:
            wanted: True in any case, False not at all. `None`: as `Sharding.summon_full_params` says, by default where
                every rank has the memory.

        Returns:
            True if they are kept; the same on every rank.
        """
        wanted = self.sharding.summon_full_params if wanted is None else wanted
        if wanted is False or is_kept_gathered(self.module):
            return wanted is not False
        with recovering(self.module):
            reshard(self.module)
            missing = "" if wanted else missing_to_keep(self.module)
            if not missing:
                keep_gathered(self.module)
            elif self.rank == 0:
                warn_once(missing)
        return not missing

    def release_gathered(self) -> None:
        """Let go of the full parameters that `keep_gathered` has gathered, if any. Not collective."""
        if self._module is not None and is_kept_gathered(self._module):
            reshard(self._module)

    @property
    def weights_version(self) -> int:
        """Increases with each change of weights or optimizer and each load; that of the source after a `copy_to`."""
        return self.version_offset + self.num_changes

    @property
    def is_saved(self) -> bool:
        """True if files hold weights and optimizer: they were loaded or saved, and not changed since."""
        committed = None if self.saver.last_committed is None else self.num_changes_copied
        return self.num_changes in (self.num_changes_saved, committed)

    def forget_gradients(self) -> None:
        """Exclude the gradients of earlier passes from the next update."""
        self.accumulation, self.is_spent = Accumulation(), True

    def follow(self, phase: str, done: int, total: int, tensor: str) -> None:
        """Note the progress of a load, save or copy."""
        # `__call__` reads these from another thread; each is one assignment.
        self.phase = phase
        self.bytes_done, self.bytes_total = done, total
        self.last_tensor = tensor or self.last_tensor

    def on_device(self, batch: RankBatch) -> RankBatch:
        """Return the batch with its tensors on the module's device."""
        is_there = self.device.type == "cpu" or batch.examples is not None  # what is collated moves later
        return batch if is_there else batch.replaced(lambda value: move_inputs(value, self.device))


def check_mode(mode: str | None, *, default: str) -> None:
    """Check a call's mode.

    Args:
        mode: The mode.
        default: Mode that `None` stands for, for the error.

    Raises:
        ValueError: `mode` is not `"train"`, `"eval"` or `None`.
    """
    if mode not in (None, "train", "eval"):
        raise ValueError(f"mode={mode!r}: give 'train', 'eval', or None for {default!r}")


def is_training(mode: str | None, *, default: str) -> bool:
    """Return True if a call runs the modules in train mode. Raises as `check_mode`."""
    check_mode(mode, default=default)
    return (mode or default) == "train"
