"""`RankStatus`: what a rank holds and what it is doing, readable from other threads."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raysharding.batch import RankBatch
from raysharding.config import Loading, Sharding
from raysharding.distributed.comm import collective_counters, exists
from raysharding.distributed.fully_shard import is_not_gathered, is_recoverable, is_torn, move_inputs
from raysharding.distributed.saving import AsyncSaver
from raysharding.distributed.training import Accumulation
from raysharding.distributed.transfer import resident_bytes
from raysharding.worker.changes import Version, version

Phase = Literal[
    "rendezvous",
    "plan",
    "stream",
    "finalize",
    "ready",
    "fit",
    "forward",
    "generate",
    "train_step",
    "forward_backward",
    "optim_step",
    "call",
    "save",
    "closed",
]

# Calls that leave other weights, or another optimizer, than they found. `call(fn)` may: that is seen by what it wrote.
_CHANGING = ("load", "set_optimizer", "set_scheduler", "train_step", "optim_step", "fit_step")

# Of those, what a restart from the files would lose.
_TRAINING = ("train_step", "optim_step", "fit_step")

_NO_GROUP = (
    "{name} has destroyed a process group of the ranks: they have no other way to work together. "
    "Make groups of your own with torch.distributed.new_group(), and destroy none but those"
)

_NOT_GATHERED = (
    "raysharding: a module computed with its shard: its parameters were used outside its own forward, so FSDP never "
    'gathered them. Pass Sharding(wrap="none"), or wrap=[...] with the names of classes whose forward is called.'
)


class RankStatus:
    """One rank's place, module and optimizer, and what it is doing."""

    def __init__(
        self, rank: int, world_size: int, local_rank: int, device: torch.device | str, *, stall_s: float = 120.0
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.device = torch.device(device)
        self.stall_s = stall_s
        self.sharding = Sharding()
        self.loading = Loading()
        self.optimizer: torch.optim.Optimizer | None = None
        self.loaded: str | None = None
        """The checkpoint that the weights came from."""
        self.saver = AsyncSaver()
        self.is_saved = True
        """Whether files hold what the rank holds."""
        self.phase: Phase = "rendezvous"
        self.bytes_done = 0
        self.bytes_total = 0
        self.last_tensor = ""
        self.last_call = ""
        self.usable = True
        """Whether later steps are right."""
        self.whole = True
        """Whether no weights or optimizer state were left changed in part."""
        self.num_changes = 0
        """How often weights or optimizer were changed."""
        self.accumulation = Accumulation()
        """The passes since the last update."""
        self.is_spent = True
        """Whether the last update has taken all gradients that there are."""
        self.seen: Version | None = None
        """Version at the end of the last `call`, if nothing has run since: what its threads write is the next one's."""
        self._groups: tuple[dist.ProcessGroup, ...] = ()
        self._counters: tuple[Callable[[], int], ...] = ()
        self._module: nn.Module | None = None
        self._mesh: DeviceMesh | None = None

    @property
    def module(self) -> nn.Module:
        """The sharded root module."""
        if self._module is None:
            raise RuntimeError(f"rank {self.rank} has no module yet: build() comes first")
        return self._module

    @property
    def has_module(self) -> bool:
        """Return True if the module is built."""
        return self._module is not None

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh that the module is sharded over."""
        if self._mesh is None:
            raise RuntimeError(f"rank {self.rank} has no device mesh yet: build() comes first")
        return self._mesh

    def as_dict(self) -> dict[str, Any]:
        """Return what this rank is doing, as plain data. Safe from any thread, never waits, no collective.

        Keys: `rank`, `pid`, `device`, `phase`, `bytes_done`, `bytes_total`, `last_tensor`, `last_call`, `usable`
        (whether later steps are right), and in bytes `host_bytes` (resident now), `peak_host_bytes`, `device_bytes`
        and `peak_device_bytes` (0 without CUDA).
        """
        on_cuda = self.device.type == "cuda"
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
            "device_bytes": torch.cuda.memory_allocated(self.device) if on_cuda else 0,
            "peak_device_bytes": torch.cuda.max_memory_allocated(self.device) if on_cuda else 0,
        }

    def num_collectives(self) -> int:
        """Return how many collectives this rank has begun in the process groups of its module. No collective."""
        return sum(count() for count in self._counters)

    def hold(self, module: nn.Module) -> None:
        """Take the module that `use_mesh` was called for."""
        self._module = module

    def use_mesh(self, mesh: DeviceMesh) -> None:
        """Take the mesh, and note the process groups that commands need."""
        self._mesh = mesh
        assert dist.group.WORLD is not None, "the mesh is made of its ranks"
        self._groups = (dist.group.WORLD, *(group for group in mesh.get_all_groups() if group != dist.group.WORLD))
        self._counters = tuple(counter for group in self._groups for counter in collective_counters(group))

    def drop(self) -> None:
        """Let go of module, mesh and optimizer. No collective."""
        self._module = self._mesh = self.optimizer = None
        self._groups = self._counters = ()
        self.phase = "closed"

    def _has_groups(self) -> bool:
        return all(map(exists, self._groups))

    @contextmanager
    def running(self, phase: Phase, name: str) -> Iterator[None]:
        """Name the call for `status`; the phase stays after an exception, so that the report of it can say where."""
        if self.device.type == "cuda":
            # The current device is a thread's own, and who owns the worker may use another thread than for `build`.
            torch.cuda.set_device(self.device)
        self.phase, self.last_call, self.seen = phase, name, None
        try:
            yield
        except BaseException as error:
            self.usable = self.usable and is_recoverable(error) and self._has_groups()
            # Most errors have dropped the gradients; the next pass drops the others.
            self.forget_gradients()
            self.whole = self.whole and not is_torn(error)
            if not self._has_groups():
                error.add_note(f"raysharding: {_NO_GROUP.format(name=name)}")
            if is_not_gathered(error):
                error.add_note(_NOT_GATHERED)
            raise
        self.phase = "ready"
        self.num_changes += name in _CHANGING
        self.is_saved = self.is_saved and name not in _TRAINING
        if not self._has_groups():
            self.usable = False
            raise RuntimeError(_NO_GROUP.format(name=name))

    def forget_gradients(self) -> None:
        """Count the gradients of passes before this as nobody's."""
        self.accumulation, self.is_spent = Accumulation(), True

    def version(self) -> Version | None:
        """Return what the rank holds now, to compare it later; `None` before there is a module."""
        return None if self._module is None else version(self._module, self.optimizer)

    def follow(self, progress: Callable[[int, int], None] | None) -> Callable[[str, int, int, str], None]:
        """Return a progress callback that keeps the status current and passes the bytes on."""

        def follow(phase: str, done: int, total: int, tensor: str) -> None:
            # `as_dict` reads these from another thread; each is one assignment.
            self.phase = phase  # type: ignore[assignment]
            self.bytes_done, self.bytes_total = done, total
            self.last_tensor = tensor or self.last_tensor
            if progress is not None:
                progress(done, total)

        return follow

    def on_device(self, batch: RankBatch) -> RankBatch:
        """Return the batch with its tensors where the module computes."""
        return batch if self.device.type == "cpu" else batch.replaced(lambda value: move_inputs(value, self.device))


def check_mode(mode: str | None, *, default: str) -> None:
    """Refuse what is no mode.

    Raises:
        ValueError: Not `"train"`, `"eval"` or `None`.
    """
    if mode not in (None, "train", "eval"):
        raise ValueError(f"mode={mode!r}: give 'train', 'eval', or None for {default!r}")


def is_training(mode: str | None, *, default: str) -> bool:
    """Return True if a call runs the modules in train mode; see `check_mode`."""
    check_mode(mode, default=default)
    return (mode or default) == "train"
