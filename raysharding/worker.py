"""`Worker`: everything one rank does with a model. A plain class; it knows nothing of Ray."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raysharding.batch import Out, RankBatch
from raysharding.checkpoint import Checkpoint
from raysharding.config import Loading, Sharding
from raysharding.distributed.agreement import agree
from raysharding.distributed.forwarding import Forwarding
from raysharding.distributed.gathering import gather_state_dict
from raysharding.distributed.gradients import clip_grad_norm_
from raysharding.distributed.input_device import move_inputs
from raysharding.distributed.loading import load_checkpoint
from raysharding.distributed.loss_call import LossFunction
from raysharding.distributed.memory import resident_bytes
from raysharding.distributed.mesh import init_mesh
from raysharding.distributed.new_optimizer import make_optimizer
from raysharding.distributed.optimizer_files import OptimizerLoad, has_optimizer_state
from raysharding.distributed.recovery import recover_after
from raysharding.distributed.rejoining import rejoin
from raysharding.distributed.replicating import copy_replicas
from raysharding.distributed.report import LoadReport, SaveReport
from raysharding.distributed.saving import save_checkpoint
from raysharding.distributed.sharded_module import shard_module
from raysharding.distributed.training import is_recoverable, is_torn, mark_recovery, train_step
from raysharding.distributed.versions import Version, version
from raysharding.errors import CheckpointError
from raysharding.models import build_module
from raysharding.outputs import RankOutput

Phase = Literal["rendezvous", "plan", "stream", "finalize", "ready", "forward", "train_step", "call", "save", "closed"]

# Calls that leave other weights, or another optimizer, than they found. `call(fn)` may: that is seen by what it wrote.
_CHANGING = ("load", "set_optimizer", "train_step")

# What gives a module values before it is cut: of ranks that are there already nobody would take part in that.
_VALUELESS: dict[str, Any] = {"sync_module_states": False, "param_init_fn": None}

_current: list[Worker] = []

_NOT_GATHERED = (
    "raysharding: a module computed with its shard: its parameters were used outside its own forward, so FSDP never "
    'gathered them. Pass Sharding(wrap="none"), or wrap=[...] with the names of classes whose forward is called.'
)


def current_worker() -> Worker:
    """Return the worker whose `call(fn)` is running: gives `fn` the rank's module, mesh, optimizer and device.

    Raises:
        RuntimeError: Outside `call(fn)`.
    """
    if not _current:
        raise RuntimeError("current_worker() is only known on a rank, inside the function given to group.call(fn)")
    return _current[-1]


class Worker:
    """One rank: its part of the module, its optimizer, and the calls on them.

    The process group is initialised before and destroyed after by whoever owns the worker. Every method but `status`
    is called on every rank, in the same order, from one thread; `status` and the plain attributes are safe to read
    from another thread meanwhile.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank within the node; the CUDA device.
        device: Where the module computes.
        stall_s: Longest silence of a peer during a load, save or gather, in seconds.
    """

    def __init__(
        self, rank: int, world_size: int, local_rank: int, device: torch.device | str, *, stall_s: float = 120.0
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.device = torch.device(device)
        self.checkpoint: Checkpoint | None = None
        self.sharding = Sharding()
        self.loading = Loading()
        self.optimizer: torch.optim.Optimizer | None = None
        self.load_report: LoadReport | None = None
        self.phase: Phase = "rendezvous"
        self.bytes_done = 0
        self.bytes_total = 0
        self.last_tensor = ""
        self.last_call = ""
        self.usable = True
        self.whole = True
        self.num_changes = 0
        self._seen: Version | None = None  # at the end of the last `call`, if nothing has run since
        self._stall_s = stall_s
        self._module: nn.Module | None = None
        self._mesh: DeviceMesh | None = None
        self._forwarding: Forwarding | None = None

    @property
    def module(self) -> nn.Module:
        """The sharded root module."""
        if self._module is None:
            raise RuntimeError(f"rank {self.rank} has no module yet: build() comes first")
        return self._module

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh that the module is sharded over."""
        if self._mesh is None:
            raise RuntimeError(f"rank {self.rank} has no device mesh yet: build() comes first")
        return self._mesh

    def build(
        self,
        model: str | Callable[[], nn.Module] | None,
        checkpoint: Checkpoint,
        sharding: Sharding | None = None,
        loading: Loading | None = None,
        *,
        is_copy: bool = False,
    ) -> None:
        """Build the module on meta and shard it; allocates nothing. Collective: it makes the mesh's process groups.

        Args:
            model: `None` (class from config.json), a transformers auto class's name, or a callable.
            checkpoint: What is in the files; the same on every rank.
            sharding: See `Sharding`.
            loading: See `Loading`; used here for the dtype, and by `load`.
            is_copy: This rank is new among ranks that `rejoin` meanwhile; `copy_replicas` brings it their values.
        """
        with self._running("plan", "build"):
            self.checkpoint = checkpoint
            self.sharding, self.loading = sharding or Sharding(), loading or Loading()
            self._mesh = init_mesh(self.device.type, self.sharding)
            module = build_module(model, checkpoint, self.loading.dtype)
            sharding = replace(self.sharding, **_VALUELESS) if is_copy else self.sharding
            self._module = shard_module(module, self._mesh, sharding)
            self._forwarding = Forwarding(self._module)

    def rejoin(self) -> None:
        """Go on with module and optimizer in a new process group, the old one having gone. Collective.

        Raises:
            RuntimeError: They cannot be taken over; `build` and `load` again.
        """
        with self._running("rendezvous", "rejoin"):
            rejoin(self.module, self.mesh, self.sharding)
            self.usable = True

    def copy_replicas(self, sources: Mapping[int, int], factory: Callable[..., torch.optim.Optimizer] | None) -> None:
        """Give new ranks weights, modes and optimizer of their replicas (HSDP). Collective.

        Args:
            sources: New rank → the rank that it copies.
            factory: Makes the optimizer on the new ranks.

        Raises:
            PlanError: On every rank: a module or an optimizer is not what a new rank makes.
        """
        with self._running("plan", "copy_replicas"):
            copied = (self.module, self.mesh, self.optimizer, sources, factory)
            self.optimizer = copy_replicas(*copied, progress=self._follow(None))

    def load(self, path: str | None = None, progress: Callable[[int, int], None] | None = None) -> LoadReport:
        """Stream a checkpoint into the module, and into the optimizer what a save of ours holds of one. Collective.

        Args:
            path: Another checkpoint of the same model, which rank 0 can read. Default: the one that the module was
                built for.
            progress: Called with (bytes done, bytes in all) as they come.

        Raises:
            CheckpointError: On every rank.
            PlanError: On every rank; module and optimizer are as they were.
        """
        assert self.checkpoint is not None, "build() comes before load()"
        with self._running("plan", "load"):
            moved = False
            try:
                options: dict[str, Any] = {"progress": self._follow(progress), "stall_s": self._stall_s}
                # Before the weights: an optimizer that does not fit must not leave new ones.
                state = self._plan_optimizer(path or self.checkpoint.path)
                origin = self.checkpoint if path is None else path
                self.load_report = load_checkpoint(self.module, origin, loading=self.loading, **options)
                moved = True
                if state is not None:
                    state.run(self.loading, **options)
            except Exception as error:
                # Once bytes moved, what was there is overwritten in part.
                mark_recovery(error, usable=not moved and self.phase == "plan", torn=moved or self.phase != "plan")
                raise
            self.module.eval()
            self.whole = True
        return self.load_report

    def _plan_optimizer(self, checkpoint: str) -> OptimizerLoad | None:
        """What a checkpoint holds of the optimizer's state; `None` where it has none, or there is no optimizer."""
        if self.optimizer is None:
            return None
        holds, error = False, None
        if self.rank == 0:
            try:
                holds = has_optimizer_state(checkpoint)
            except CheckpointError as raised:
                error = raised
        # Rank 0 alone need see the files; the others must know whether a load follows.
        if not agree(error, holds)[0]:
            return None
        return OptimizerLoad.plan(self.module, self.optimizer, checkpoint)

    def set_optimizer(
        self,
        factory: Callable[..., torch.optim.Optimizer],
        kwargs: Mapping[str, Any] | None = None,
        *,
        restore: bool = False,
    ) -> None:
        """Make the optimizer as `factory(parameters, **kwargs)`, over the parameters that require gradients.

        Args:
            factory: A class, or any callable.
            kwargs: Given to it after the parameters.
            restore: Also bring back its state, where the loaded checkpoint is a save of ours that holds it. Collective
                then.

        Raises:
            ValueError: `factory` did not return a torch optimizer.
            PlanError: The saved state is not this optimizer's.
        """
        with self._running("call", "set_optimizer"):
            self.optimizer = make_optimizer(self.module, factory, kwargs)
            if restore and self.checkpoint is not None:
                state = self._plan_optimizer(self.checkpoint.path)
                if state is not None:
                    state.run(self.loading, self._follow(None), self._stall_s)

    def forward(
        self, batch: RankBatch, mode: Literal["train", "eval"] | None = None, out: Out | None = None
    ) -> RankOutput:
        """Run the model on this rank's part of the batch, without gradients. Collective.

        Args:
            batch: From `deal`.
            mode: `"eval"` (default) or `"train"`; the module's own modes are put back afterwards.
            out: What the caller wants: the output is only brought to the CPU where that includes this rank's.

        Returns:
            The output on the CPU, caches left out, `loss` reduced over the ranks where the call has a `Split`. Its
            value is `None` on a rank that has no rows, only a dummy.
        """
        with self._running("forward", "forward"):
            assert self._forwarding is not None, "build() comes before forward()"
            if out is not None and out.kind == "gather" and out.dim is not None:
                # Which leaves hold rows is found out in the dim that they will be joined in.
                batch = replace(batch, dim=out.dim)
            return self._forwarding.run(
                self._on_device(batch),
                training=_is_training(mode, default="eval"),
                keep=self._wants(out) and not batch.is_dummy,
            )

    def train_step(
        self,
        batch: RankBatch,
        loss: LossFunction | None = None,
        max_grad_norm: float | None = None,
        mode: Literal["train", "eval"] | None = None,
    ) -> dict[str, float]:
        """One optimizer step over the whole batch; see `distributed.training.train_step`. Collective.

        Args:
            batch: From `deal`.
            loss: See `distributed.loss.loss_share`.
            max_grad_norm: Clip to this global 2-norm. Default: only measure.
            mode: `"train"` (default) or `"eval"`, for models whose training statistics depend on the whole batch.

        Raises:
            ValueError: No optimizer is set, or the mode is unknown.
        """
        if self.optimizer is None:
            raise ValueError("no optimizer: call set_optimizer(torch.optim.AdamW, lr=...) before train_step")
        with self._running("train_step", "train_step"):
            return train_step(
                self.module,
                self.optimizer,
                self._on_device(batch),
                loss=loss,
                max_grad_norm=max_grad_norm,
                training=_is_training(mode, default="train"),
            )

    def clip_grad_norm_(self, max_norm: float | None, norm_type: float = 2.0) -> float:
        """Scale all gradients so that their norm is at most `max_norm`, and return the norm before. Collective.

        Args:
            max_norm: Upper bound; `None` only measures.
            norm_type: p of the p-norm.
        """
        with self._running("call", "clip_grad_norm_"):
            return float(clip_grad_norm_(self.module, max_norm, norm_type))

    def call(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run `fn(*args, **kwargs)` with `current_worker()` set to this worker, and return what it returns.

        Raises:
            Exception: Whatever `fn` raised. The module was reset, its gradients are gone: if all ranks raise it alike,
                later calls are right.
        """
        name = getattr(fn, "__qualname__", type(fn).__name__)
        seen = self._seen
        with self._running("call", f"call({name})"):
            before = self._version() if seen is None else seen
            _current.append(self)
            try:
                value = fn(*args, **(kwargs or {}))
            except (Exception, SystemExit) as error:
                # A backward that `fn` ran may have been cut short; FSDP2 would leave later gradients unreduced.
                if self._module is not None:
                    torn = self._version() != before
                    mark_recovery(error, recover_after(error, self._module, in_backward=True), torn=torn)
                raise
            finally:
                _current.pop()
            self._seen = self._version()
            self.num_changes += self._seen != before
            return value

    def state_dict(self, keys: Sequence[str] | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """Bring full tensors to rank 0, a bucket at a time; every rank iterates to the end. Collective.

        Args:
            keys: FQNs; `None` for all parameters and persistent buffers, tied names included.

        Yields:
            FQN → full CPU tensor on rank 0; as many empty dicts on the others.
        """
        parts = gather_state_dict(self.module, keys, timeout_s=self._stall_s)
        while True:
            with self._running("call", "state_dict"):
                part = next(parts, None)
            if part is None:
                return
            yield part

    def save(
        self,
        path: str,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
        *,
        optimizer: bool = True,
    ) -> SaveReport:
        """Write a standard Hugging Face directory; see `distributed.save_checkpoint`. Collective.

        Args:
            path: The directory to make.
            overwrite: Replace what is there.
            optimizer: Also the optimizer's state, where one is set.
            progress: Called with (bytes done, bytes in all) as they are written.
        """
        with self._running("save", "save"):
            return save_checkpoint(
                self.module,
                path,
                optimizer=self.optimizer if optimizer else None,
                overwrite=overwrite,
                source=self.checkpoint,
                progress=self._follow(progress),
                stall_s=self._stall_s,
            )

    def status(self) -> dict[str, Any]:
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

    def close(self) -> None:
        """Let go of module and optimizer. No collective: works when peers are gone."""
        self._module = self._mesh = self._forwarding = self.optimizer = None
        self.phase = "closed"

    @contextmanager
    def _running(self, phase: Phase, name: str) -> Iterator[None]:
        """Name the call for `status`; the phase stays after an exception, so that the report of it can say where."""
        if self.device.type == "cuda":
            # The current device is a thread's own, and this may be another thread than the last call's.
            torch.cuda.set_device(self.device)
        self.phase, self.last_call, self._seen = phase, name, None
        try:
            yield
        except BaseException as error:
            self.usable = self.usable and is_recoverable(error)
            self.whole = self.whole and not is_torn(error)
            if "mixed torch.Tensor and DTensor" in str(error):
                error.add_note(_NOT_GATHERED)
            raise
        self.phase = "ready"
        self.num_changes += name in _CHANGING

    def _version(self) -> Version | None:
        return None if self._module is None else version(self._module, self.optimizer)

    def _follow(self, progress: Callable[[int, int], None] | None) -> Callable[[str, int, int, str], None]:
        """A progress callback that keeps `status` current and passes the bytes on."""

        def follow(phase: str, done: int, total: int, tensor: str) -> None:
            # `status` reads these from another thread; each is one assignment.
            self.phase = phase  # type: ignore[assignment]
            self.bytes_done, self.bytes_total = done, total
            self.last_tensor = tensor or self.last_tensor
            if progress is not None:
                progress(done, total)

        return follow

    def _on_device(self, batch: RankBatch) -> RankBatch:
        """The batch with its tensors where the module computes."""
        return batch if self.device.type == "cpu" else batch.replaced(lambda value: move_inputs(value, self.device))

    def _wants(self, out: Out | None) -> bool:
        """Whether the caller wants this rank's output."""
        return out is None or (out.kind != "none" and (out.kind != "rank0" or self.rank == 0))


def check_mode(mode: str | None, *, default: str) -> None:
    """Refuse what is no mode.

    Raises:
        ValueError: Not `"train"`, `"eval"` or `None`.
    """
    if mode not in (None, "train", "eval"):
        raise ValueError(f"mode={mode!r}: give 'train', 'eval', or None for {default!r}")


def _is_training(mode: str | None, *, default: str) -> bool:
    check_mode(mode, default=default)
    return (mode or default) == "train"
