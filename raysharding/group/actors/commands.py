"""What the driver can ask of a rank's work thread: each public method of `RankCommands` is one command."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raysharding.batch import Out, RankBatch
from raysharding.checkpoint import Checkpoint
from raysharding.config import Loading, Sharding
from raysharding.data import Position
from raysharding.distributed.comm import (
    LinkTimes,
    StoreAddress,
    join_process_group,
    leave_process_group,
    measure_link,
    serve_store,
)
from raysharding.distributed.footprint import MemoryNeed, memory_need
from raysharding.distributed.training import EvaluationPlan, FitPlan
from raysharding.errors import GroupError, RayshardingError, said
from raysharding.group.cluster import NodeFacts, facts_here
from raysharding.group.rpc import NEXT_STEP, Command, Mode, Packed, SaveStatus, Shared, StateChange
from raysharding.models import InputBounds
from raysharding.worker import FitStart, FitSteps, Worker, thread_state_restored

_STREAMING = ("load", "save", "copy_replicas")
"""Commands that have phases of their own."""


@dataclass(frozen=True, slots=True)
class Step:
    """A value of a call that comes in steps."""

    value: Any
    """The value of this step."""
    more: bool
    """Whether another step follows."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A rank's place in the group."""

    rank: int
    """Global rank."""
    world_size: int
    """Number of ranks."""
    local_rank: int
    """Its number on its node; its CUDA device."""
    device: str
    """`cpu` or `cuda:<local_rank>`."""
    node_ip: str
    """Its node's address."""
    visible_gpus: str
    """CUDA_VISIBLE_DEVICES of its node; empty for CPU ranks."""
    num_threads: int
    """torch threads of a CPU rank, unless OMP_NUM_THREADS says otherwise."""
    rendezvous_s: float
    """How long it waits for the others."""
    collective_s: float
    """Time-out of its collectives."""
    stall_s: float
    """Longest silence of a peer in a load or save."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a rank builds its module from that is new among ranks which have theirs."""

    model: Any
    """As `from_checkpoint` was given it."""
    checkpoint: bytes
    """What `Checkpoint.to_json` gave."""
    sharding: Sharding
    """How the module is cut."""
    loading: Loading
    """How it was loaded."""


class RankCommands:
    """Runs commands on the work thread. Not a collective unless its driver sends the command to every rank."""

    def __init__(self) -> None:
        self._server: Any = None
        self._rank_worker: Worker | None = None
        self._buckets: Iterator[Mapping[str, torch.Tensor]] = iter(())
        self._evaluation: Iterator[dict[str, float] | None] = iter(())
        self._doing = "start"
        self._collectives_before = 0

    @thread_state_restored()
    def run(self, command: Command) -> tuple[bool, Any]:
        """Run one command.

        Args:
            command: Its method is the name of a public one; its arguments are here.

        Returns:
            Whether the call has more steps, and the value.
        """
        # The steps of a call bear its name: what the user called is what an error names.
        self._doing = command.method.removesuffix(NEXT_STEP)
        self._collectives_before = self._num_collectives()
        if command.resets:
            self.reset()
        assert isinstance(command.args, Packed), "Ray has brought them"
        args, kwargs = command.args.unpack()
        if isinstance(command.shared, Packed):
            values = command.shared.unpack()
            args = tuple(_filled(value, values) for value in args)
        value = getattr(self, command.method)(*args, **kwargs)
        return (value.more, value.value) if isinstance(value, Step) else (False, value)

    def serve_store(
        self, node_ip: str | None, timeout_s: float, port_range: tuple[int, int] | None
    ) -> StoreAddress | None:
        """Rank 0, which alone is given an address: start the store that the ranks meet at."""
        if node_ip is None:
            return None
        self._server, address = serve_store(node_ip, timeout_s=timeout_s, port_range=port_range)
        return address

    def join(self, place: Assignment, address: StoreAddress, blueprint: Blueprint | None) -> None:
        """Take the assigned place: devices, threads, process group. All ranks, together.

        A rank that has a module takes it along from the process group that it is in. Meanwhile one that is new among
        those builds its own from the blueprint: all of them make the mesh, in the same order.
        """
        leave_process_group()
        device = torch.device(place.device)
        if device.type == "cuda":
            # Before the first CUDA call of this process, which would fix the mask.
            os.environ["CUDA_VISIBLE_DEVICES"] = place.visible_gpus
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(place.num_threads)
        join_process_group(
            address,
            rank=place.rank,
            world_size=place.world_size,
            device=device,
            node_ip=place.node_ip,
            rendezvous_s=place.rendezvous_s,
            timeout_s=place.collective_s,
            server=self._server,
        )
        if self._rank_worker is None:
            worker = Worker(place.rank, place.world_size, place.local_rank, device, stall_s=place.stall_s)
            self._rank_worker = worker
            if blueprint is not None:
                opened = Checkpoint.from_json(blueprint.checkpoint)
                worker.build(blueprint.model, opened, blueprint.sharding, blueprint.loading, is_copy=True)
        else:
            self._rank_worker.rejoin()

    def copy_replicas(
        self,
        sources: Mapping[int, int],
        counts: Mapping[int, int],
        factory: Callable[..., torch.optim.Optimizer] | None,
    ) -> None:
        """Give new ranks what their replicas hold, and have changed so often. All ranks, together."""
        self._worker.copy_replicas(sources, factory)
        status = self._worker.status
        status.num_changes = counts.get(status.rank, status.num_changes)

    def attach(self) -> tuple[bool, StateChange]:
        """Say whether there is an optimizer, and what all earlier commands have done to the rank."""
        return self._worker.optimizer is not None, self.change_since(0)

    def node_facts(self, node_ip: str, with_gpus: bool) -> NodeFacts:
        """Say what this process sees of its node. Each rank alone, before it joins."""
        return facts_here(node_ip, with_gpus)

    def check_link(self, broadcast_bytes: int) -> LinkTimes:
        """Time the process group. All ranks, together."""
        return measure_link(self._worker.device, broadcast_bytes)

    def memory_need(self, optimizer: Callable[..., torch.optim.Optimizer] | None) -> MemoryNeed:
        """Say what the load of the built module will take, and what is free. Each rank alone."""
        worker = self._worker
        assert worker.checkpoint is not None, "build comes before memory_need"
        return memory_need(worker.module, worker.device, worker.status.loading, worker.checkpoint.num_bytes, optimizer)

    def build(self, model: Any, checkpoint: bytes, sharding: Sharding, loading: Loading) -> InputBounds:
        """Build the sharded module on meta, and say what it takes. All ranks, together."""
        self._worker.build(model, Checkpoint.from_json(checkpoint), sharding, loading)
        return InputBounds.of(self._worker.module)

    def load(self, path: str | None) -> Any:
        """Load a checkpoint into the module and return rank 0's report. All ranks, together."""
        report = self._worker.load(path)
        return report if self._worker.rank == 0 else None

    def set_optimizer(
        self, factory: Callable[..., torch.optim.Optimizer], kwargs: Mapping[str, Any], restore: bool
    ) -> None:
        """Make the optimizer. All ranks, together."""
        self._worker.trainer.set_optimizer(factory, dict(kwargs), restore=restore)

    def set_scheduler(self, schedule: Callable[..., Any]) -> None:
        """Give the optimizer a schedule. All ranks."""
        self._worker.trainer.set_scheduler(schedule)

    def clip_grad_norm_(self, max_norm: float | None, norm_type: float) -> float:
        """Clip the gradients and return their norm. All ranks, together."""
        return self._worker.trainer.clip_grad_norm_(max_norm, norm_type)

    def forward(self, batch: RankBatch, mode: Mode, out: Out | None) -> Any:
        """Run the model forward. All ranks, together."""
        output = self._worker.forward(batch, mode, out)
        return output.value if out is not None and out.kind == "refs" else output

    def generate(self, batch: RankBatch, mode: Mode, out: Out | None) -> Any:
        """Generate token ids. All ranks, together."""
        output = self._worker.generate(batch, mode, out)
        return output.value if out is not None and out.kind == "refs" else output

    def train_step(
        self, batch: RankBatch, loss: Any, max_grad_norm: float | None, mode: Mode, gradient_accumulation_steps: int
    ) -> dict[str, float]:
        """Take one optimizer step. All ranks, together."""
        return self._worker.trainer.train_step(batch, loss, max_grad_norm, mode, gradient_accumulation_steps)

    def forward_backward(self, batch: RankBatch, loss: Any, mode: Mode, sync: bool) -> dict[str, float]:
        """Add a batch's gradients. All ranks, together."""
        return self._worker.trainer.forward_backward(batch, loss, mode, sync=sync)

    def optim_step(self, max_grad_norm: float | None) -> dict[str, float]:
        """Update the parameters. All ranks, together."""
        return self._worker.trainer.optim_step(max_grad_norm)

    def fit_begin(
        self, plan: FitPlan, position: Position | None, resume: bool, save_to: str | None, async_save: bool
    ) -> FitStart:
        """Look at the data of a run, and find where it begins. All ranks, together."""
        return self._worker.trainer.fit_begin(plan, position, resume=resume, save_to=save_to, async_save=async_save)

    def generators(self) -> dict[str, Any]:
        """Return the rank's random generators."""
        return self._worker.trainer.generators()

    def restore_generators(self, state: Mapping[str, Any]) -> None:
        """Put them back."""
        self._worker.trainer.restore_generators(state)

    def fit_steps(self, num_steps: int) -> FitSteps:
        """Take steps of the run. All ranks, together."""
        return self._worker.trainer.fit_steps(num_steps)

    def evaluate(self, plan: EvaluationPlan) -> Step:
        """Begin to compute loss and metrics over data. All ranks, together."""
        self._evaluation = self._worker.trainer.evaluate(plan)
        return self.evaluate_next(plan)

    def evaluate_next(self, plan: EvaluationPlan) -> Step:
        """Go on with some batches: the value after the last is the result. All ranks, together."""
        values = next(self._evaluation)
        return Step(values, more=values is None)

    def fit_end(self) -> None:
        """Let go of the run's data. All ranks."""
        self._worker.trainer.fit_end()

    def reset(self) -> None:
        """Reset the module, as the ranks did that raised in a call alone. All ranks."""
        self._worker.reset()

    def zero_grad(self) -> None:
        """Drop the gradients. All ranks."""
        self._worker.trainer.zero_grad()

    def call(self, batch: RankBatch, fn: Callable[..., Any], out: Out | None) -> Any:
        """Run the user's function inside the process group. All ranks. A rank with a dummy row has no result."""
        value = self._worker.call(fn, batch.args, batch.kwargs)
        if batch.is_dummy:
            return None
        kind = "per_rank" if out is None else out.kind
        is_wanted = kind != "none" and (kind != "rank0" or self._worker.rank == 0)
        return value if is_wanted else None

    def save(
        self, path: str, overwrite: bool, optimizer: bool, keep_last: int | None, async_save: bool, token: str
    ) -> Any:
        """Save the model; return rank 0's report, or the number of a save in the background. All ranks, together."""
        options: dict[str, Any] = {"optimizer": optimizer, "keep_last": keep_last, "token": token}
        if async_save:
            return self._worker.save_async(path, overwrite, **options)
        report = self._worker.save(path, overwrite, **options)
        return report if self._worker.rank == 0 else None

    def state_dict(self, keys: Sequence[str] | None) -> Step:
        """Begin to gather full tensors on rank 0, a bucket at a time. All ranks, together."""
        self._buckets = iter(self._worker.state_dict(keys))
        return Step(None, more=True)

    def state_dict_next(self, keys: Sequence[str] | None) -> Step:
        """Gather the next bucket: rank 0's value is FQN → CPU tensor. All ranks, together."""
        bucket = next(self._buckets, None)
        if bucket is None:
            return Step(None, more=False)
        return Step(dict(bucket) if self._worker.rank == 0 else None, more=True)

    def close(self) -> None:
        """Leave the process group. All ranks."""
        if self._rank_worker is not None:
            self._rank_worker.close()
        leave_process_group()

    def checkpoint(self) -> bytes:
        """Return what the module was built for. Safe from any thread."""
        checkpoint = self._worker.checkpoint
        assert checkpoint is not None, "build comes before checkpoint"
        return checkpoint.to_json()

    def save_status(self, number: int) -> SaveStatus:
        """Return how a save in the background fares. Safe from any thread while a command runs."""
        save = None if self._rank_worker is None else self._rank_worker.save_status(number)
        if save is None:
            return SaveStatus(is_done=True, bytes_done=0, error=GroupError("rank 0 knows of no such save any more"))
        error = save.error
        if error is not None and not isinstance(error, RayshardingError):
            error = GroupError(f"{type(error).__name__}: {said(error)}")
        return SaveStatus(save.is_done, save.bytes_done, error)

    def progress(self) -> tuple[str, int, int]:
        """Return phase, bytes done and bytes in all. Safe from any thread while a command runs."""
        worker = self._rank_worker
        return self.phase(), *((0, 0) if worker is None else (worker.status.bytes_done, worker.status.bytes_total))

    def tensor(self) -> str | None:
        """Return the tensor that a load or save touched last."""
        worker = self._rank_worker
        return worker.status.last_tensor or None if worker is not None and self._doing in _STREAMING else None

    def is_usable(self) -> bool:
        """Whether the module is right for later calls, after an exception that every rank raised."""
        return self._rank_worker is None or self._rank_worker.status.usable

    def num_changes(self) -> int:
        """Return how often weights or optimizer have been changed."""
        return 0 if self._rank_worker is None else self._rank_worker.status.num_changes

    def change_since(self, before: int) -> StateChange:
        """Return what has become of the model since `num_changes` was `before`. Without one, no rank holds any."""
        worker = self._rank_worker
        collectives = self._num_collectives() - self._collectives_before
        return StateChange(worker is not None and worker.status.whole, self.num_changes() - before, collectives)

    def _num_collectives(self) -> int:
        return 0 if self._rank_worker is None else self._rank_worker.status.num_collectives()

    def phase(self) -> str:
        """Return what the command is doing, more finely than its name in a load or save."""
        worker = self._rank_worker
        return worker.status.phase if worker is not None and self._doing in _STREAMING else self._doing

    def status(self) -> dict[str, Any]:
        """Return what `Worker.status` says. Safe from any thread while a command runs."""
        return {"phase": self._doing} if self._rank_worker is None else self._rank_worker.status()

    @property
    def _worker(self) -> Worker:
        assert self._rank_worker is not None, "join comes before every other command"
        return self._rank_worker


def _filled(value: Any, shared: Sequence[Any]) -> Any:
    """Put the shared values where a batch holds `Shared` marks."""
    if not isinstance(value, RankBatch):
        return value

    def fill(part: Any) -> Any:
        return shared[part.index] if isinstance(part, Shared) else part

    return replace(
        value,
        wrapped_args=tuple(map(fill, value.wrapped_args)),
        wrapped_kwargs={key: fill(part) for key, part in value.wrapped_kwargs.items()},
    )
