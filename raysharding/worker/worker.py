"""`Worker`: all operations of one rank on a model. A plain class, independent of Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raysharding.batch import Out, RankBatch, RankOutput, Tokens
from raysharding.checkpoint import Checkpoint
from raysharding.checkpoint.format import Sidecars, new_token, seen_here
from raysharding.config import Loading, Sharding
from raysharding.distributed.comm import from_rank_0, init_mesh
from raysharding.distributed.fully_shard import (
    mark_recovery,
    recover_after,
    reset,
    roots_before_blocks,
    shard_module,
    show_shards,
)
from raysharding.distributed.loading import LoadReport, load_checkpoint
from raysharding.distributed.saving import BackgroundSave, Destination, SaveReport, begin_save, load_training
from raysharding.distributed.training import Forwarding, OutputFunction, TokenStream, generate
from raysharding.distributed.transfer import GATHER_BUCKET_BYTES, gather_state_dict
from raysharding.distributed.weights import CopySpec, WeightCopy, WeightStream
from raysharding.errors import CheckpointError
from raysharding.models import build_module
from raysharding.worker.changes import version
from raysharding.worker.predictor import Predictor
from raysharding.worker.status import RankStatus, is_training
from raysharding.worker.training import Trainer

_current: list[Worker] = []


def current_worker() -> Worker:
    """Return the worker whose `call(fn)`, or `fn` of a forward, is running, with the rank's module and device.

    Raises:
        RuntimeError: No such function is running on this process.
    """
    if not _current:
        raise RuntimeError("current_worker() works only on a rank, inside the fn of group.call, forward or generate")
    return _current[-1]


class Worker:
    """One rank's part of the module, and the calls on the module.

    Calls that train belong to `trainer`, those of `predict` to `predictor`.

    The worker's owner initialises the process group before and destroys it after the worker's use. Call every method
    on every rank, in the same order, from one thread; `status` is safe to read from another thread at the same time.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank within the node.
        device: Where the module computes.
        stall_s: Longest silence of a peer during a load, save or gather, in seconds.
    """

    def __init__(
        self, rank: int, world_size: int, local_rank: int, device: torch.device | str, *, stall_s: float = 120.0
    ) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.device = torch.device(device)
        self.mesh: DeviceMesh | None = None
        """The device mesh that the module is sharded over; `None` before `build`."""
        self.status = RankStatus(rank, local_rank, self.device, stall_s)
        self.trainer = Trainer(self.status)
        self.predictor = Predictor(self.status)
        self.checkpoint: Checkpoint | None = None
        self.load_report: LoadReport | None = None
        self._sidecars: Sidecars | None = None
        self._forwarding: Forwarding | None = None
        self._streams: ExitStack | None = None
        self._copies: dict[str, WeightCopy] = {}
        self._stopped_copies: set[str] = set()

    @property
    def module(self) -> nn.Module:
        """The sharded root module."""
        return self.status.module

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer over the rank's shards; `None` if none is set."""
        return self.status.optimizer

    def build(
        self,
        model: str | Callable[[], nn.Module] | None,
        checkpoint: Checkpoint,
        sharding: Sharding | None = None,
        loading: Loading | None = None,
    ) -> None:
        """Build the module on meta and shard it; allocates nothing. Collective: creates the mesh's process groups.

        Args:
            model: `None` (class from config.json), a transformers auto class's name, or a callable.
            checkpoint: Headers and config of the files; the same on every rank.
            sharding: How to shard the module. Default: `Sharding()`.
            loading: How to load it. `build` uses its dtype; `load` uses the rest. Default: `Loading()`.
        """
        with self.status.running("plan", "build"):
            self.checkpoint, self._sidecars = checkpoint, Sidecars(checkpoint.directory)
            if self.rank == 0:
                with suppress(CheckpointError):  # a save tries again, and raises
                    self._sidecars.read()
            status = self.status
            status.sharding, status.loading = sharding or Sharding(), loading or Loading()
            self.mesh = init_mesh(self.device.type, status.sharding)
            module = build_module(model, checkpoint, status.loading.dtype)
            status.hold(shard_module(module, self.mesh, status.sharding), self.mesh)
            self._forwarding = Forwarding(self.module)

    def load(self, path: str | None = None) -> LoadReport:
        """Stream a checkpoint into the module and, from a save by raysharding, into the optimizer. Collective.

        The optimizer's state includes the random generators and the position in the data.

        Args:
            path: Another checkpoint of the same model, or the model's adapters, which rank 0 can read; it reads a
                snapshot that is not in its cache from the hub. Default: the checkpoint that the module was built for.

        Raises:
            CheckpointError: On every rank.
            PlanError: On every rank; module and optimizer are unchanged.
        """
        assert self.checkpoint is not None, "build() comes before load()"
        status, moved = self.status, False
        with status.running("plan", "load"):
            try:
                if path is not None:
                    path = from_rank_0(partial(seen_here, path))
                options: dict[str, Any] = {"progress": status.follow, "stall_s": status.stall_s}
                # A relative path is the driver's, and not of this process's directory.
                given = path or self.checkpoint.directory
                # Before the weights: if the optimizer does not match, the weights must stay unchanged.
                is_random = path is None and self.checkpoint.is_random
                state = None if is_random else self.trainer.plan_optimizer(given)
                origin = self.checkpoint if path is None else path
                self.load_report = load_checkpoint(self.module, origin, loading=status.loading, **options)
                moved = True
                status.version_offset += 1
                status.loaded = None if self.load_report.kept else given
                if not self.load_report.kept:  # adapters that stay are of other files, and as much in files as before
                    status.num_changes_saved = status.num_changes
                self.trainer.position = None
                if state is not None:
                    state.run(status.loading, **options)
                    self.trainer.position = load_training(given)
            except Exception as error:
                # Once bytes have moved, the old values are partially overwritten.
                torn = moved or status.phase != "plan"
                mark_recovery(error, usable=not torn, torn=torn)
                raise
            self.module.eval()
            status.whole = True
            self.trainer.drop_gradients()
        return self.load_report

    def copy_weights(self, spec: CopySpec, node_ip: str) -> dict[str, Any]:
        """Copy the weights of one group into another; collective over the ranks of both.

        Args:
            spec: The copy, which says whether this rank's group is the source.
            node_ip: Address of this node.

        Returns:
            Figures of this rank, of which the driver makes the `CopyReport`.

        Raises:
            PlanError: On all ranks of both groups: the modules do not fit together.
            RuntimeError: On all ranks of the target: the copy failed.
        """
        with self.status.running("plan", "copy_to" if spec.is_source else "copy_from"):
            self._forget_copies(spec)
            copy = self._copies.get(spec.token)
            if copy is None:
                copy = self._copies[spec.token] = WeightCopy(spec, self.rank, node_ip)
            copy.running = spec.key
            if spec.key in self._stopped_copies:
                copy.stop()  # the driver was faster than the call
            try:
                figures = copy.run(self.module, spec, self.status.follow, self.status.weights_version)
            finally:
                self._stopped_copies.discard(spec.key)
                if copy.is_stopped:
                    self._forget_copy(spec.token)
            if not spec.is_source:
                self.status.num_changes += 1
                self.status.version_offset = figures["weights_version"] - self.status.num_changes
                self.trainer.drop_gradients()
            return figures

    def stop_copy(self, key: str) -> None:
        """End a copy that runs, or will, between a pair of groups: the other group has failed. From any thread."""
        self._stopped_copies.add(key)
        for copy in list(self._copies.values()):
            if copy.running == key:
                copy.stop()

    def _forget_copies(self, spec: CopySpec) -> None:
        """Forget what the driver of a copy does, and of the pair's other drivers, which may be gone, all but the last.

        Both groups of a pair run its copies in one order, so they forget the same.
        """
        of_driver = {token for token, copy in self._copies.items() if copy.spec.driver == spec.driver}
        of_others = [token for token, copy in self._copies.items() if copy.spec.pair == spec.pair]
        of_others = [token for token in of_others if token not in of_driver]
        for token in (*(of_driver - set(spec.kept)), *of_others[:-1]):
            self._forget_copy(token)

    def _forget_copy(self, token: str) -> None:
        copy = self._copies.pop(token, None)
        if copy is not None:
            copy.close()

    def forward(
        self,
        batch: RankBatch,
        mode: Literal["train", "eval"] | None = None,
        out: Out | None = None,
        summon_full_params: bool | None = None,
        fn: OutputFunction | None = None,
    ) -> RankOutput:
        """Run the model on this rank's part of the batch, without gradients. Collective.

        Args:
            batch: Result of `deal` for this rank.
            mode: `"eval"` (default) or `"train"`; the module's own modes are restored afterwards.
            out: The result that the caller requested: the output is copied to the CPU only if the result needs this
                rank's.
            summon_full_params: True to gather all parameters, and keep them until a call without it.
                Default: `Sharding.summon_full_params`.
            fn: `fn(outputs, batch)`: what it returns is the output; `current_worker()` works in it.

        Returns:
            The output on the CPU, without caches; `loss` is reduced over the ranks if the call has a `Split`. The
            output's value is `None` on a rank that has only a dummy row.
        """
        # Inside a `call`, whose function may go on with the module itself, nothing stays gathered.
        wanted = self.status.sharding.summon_full_params if summon_full_params is None else summon_full_params
        keeps = bool(wanted) and not _current
        with self.status.running("forward", "forward", keeps_gathered=keeps):
            assert self._forwarding is not None, "build() comes before forward()"
            if keeps:
                self.status.keep_gathered(True)
            if out is not None and out.kind == "gather" and out.dim is not None:
                # The dim of the join decides which leaves hold rows.
                batch = replace(batch, dim=out.dim)
            return self._forwarding.run(
                self.status.on_device(batch),
                fn and self._as_current()(fn),
                training=is_training(mode, default="eval"),
                keep=self._wants(out) and not batch.is_dummy,
            )

    def generate(
        self,
        batch: RankBatch,
        mode: Literal["train", "eval"] | None = None,
        out: Out | None = None,
        summon_full_params: bool | None = None,
        fn: OutputFunction | None = None,
        *,
        stream: TokenStream | None = None,
    ) -> RankOutput:
        """Generate token ids for this rank's part of the batch. Collective.

        Args:
            batch: Result of `deal` for this rank.
            mode: As for `forward`.
            out: As for `forward`.
            summon_full_params: True to gather all parameters once, False to gather by groups, anew for each token.
                Default: `Sharding.summon_full_params`.
            fn: As for `forward`.
            stream: Takes the tokens of each step, for `generate_stream`.
        """
        with self.status.running("generate", "generate"):
            self.status.keep_gathered(summon_full_params)
            try:
                return generate(
                    self.module,
                    self.status.on_device(batch),
                    fn and self._as_current()(fn),
                    training=is_training(mode, default="eval"),
                    keep=self._wants(out) and not batch.is_dummy,
                    stream=stream,
                )
            finally:
                self.status.release_gathered()

    def generate_stream(self, batch: RankBatch, *options: Any) -> Generator[Tokens | None, None, RankOutput]:
        """Generate as `generate` does, and yield on rank 0 the tokens of all ranks' rows, step by step. Collective.

        A rank that stops iterating before the end must do so on the step of the others.

        Args:
            batch: As for `generate`.
            *options: The other positional arguments of `generate`.
        """
        is_silent = batch.is_dummy if batch.rows else self.rank != 0
        stream = TokenStream(partial(self.generate, batch, *options), is_silent=is_silent)
        try:
            while (tokens := stream.next()) is not None:
                yield tokens if self.rank == 0 else None
            output: RankOutput = stream.outcome.result()
            return output
        except GeneratorExit:
            stream.close()
            self.status.phase = "ready"  # the generation has ended by an exception, and no call has failed
            raise
        finally:
            stream.close()

    def call(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return `fn(*args, **kwargs)`, run with `current_worker()` set to this worker.

        Args:
            fn: The function.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Raises:
            Exception: The error that `fn` raised. The module was reset and its gradients are dropped; if all ranks
                raise the same error, later calls are correct.
        """
        name = getattr(fn, "__qualname__", type(fn).__name__)
        status, last = self.status, self.status.version_after_call
        with self.status.running("call", f"call({name})"):
            # After a forward the root's full parameters are registered, and writes to them by `fn` would be lost.
            show_shards(self.module)
            before = last or version(self.module, self.optimizer)
            try:
                with self._as_current(), roots_before_blocks(self.module), ExitStack() as self._streams:
                    value = fn(*args, **(kwargs or {}))
            except BaseException as error:
                # `fn` may have aborted a backward; FSDP2 would then leave later gradients unreduced.
                torn = version(self.module, self.optimizer) != before
                mark_recovery(error, recover_after(error, self.module), torn=torn)
                raise
            finally:
                self._streams = None
            status.is_spent = False  # `fn` may have run a backward of its own
            status.version_after_call = version(self.module, self.optimizer)
            status.num_changes += status.version_after_call != before
            return value

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        """Return a context in which `current_worker()` is this worker; it decorates functions, too."""
        _current.append(self)
        try:
            yield
        finally:
            _current.pop()

    def reset(self) -> None:
        """Reset the module to its state before a step, without gradients. No collective, but every rank must call it.

        A `call` that raised on some ranks has reset these ranks; the others may have gathered parameters or gradients.

        Raises:
            RuntimeError: The module cannot be reset; no later step will be correct.
        """
        with self.status.running("call", "reset"):
            try:
                reset(self.module)
            except Exception as error:
                mark_recovery(error, usable=False, torn=False)
                raise
            self.status.forget_gradients()

    def state_dict(self, keys: Sequence[str] | None = None) -> Generator[dict[str, torch.Tensor]]:
        """Gather full tensors on rank 0, one bucket at a time. Collective: every rank iterates to the end.

        Args:
            keys: FQNs; `None` for all parameters and persistent buffers, tied names included.

        Yields:
            FQN → full CPU tensor on rank 0; the same number of empty dicts on the others.
        """
        parts = gather_state_dict(self.module, keys, timeout_s=self.status.stall_s)
        while True:
            with self.status.running("call", "state_dict"):
                part = next(parts, None)
            if part is None:
                return
            yield part

    def weights(
        self,
        *,
        ranks: Collection[int] = (0,),
        bucket_bytes: int = GATHER_BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        merge: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over full tensors under the names of transformers' files, for `load_weights(iterator)` of an engine.

        vLLM's models and SGLang's take such an iterator, or lists of its pairs. Names, shapes and values are those of
        the files of `save`: conversions undone (a tensor for each expert), tied tensors once. Collective: every rank
        calls this with the same arguments and iterates to the end, also ranks that get nothing. Nothing may change the
        weights meanwhile.

        Args:
            ranks: Ranks that get the tensors.
            bucket_bytes: Bytes in flight, over all `ranks` together.
            dtype: dtype that floating-point tensors are converted to, before they travel where it is narrower.
                Default: their own.
            merge: True for the base model with its LoRA adapters merged, as by peft's `merge_and_unload`, bit for bit
                on the same device; the adapters of this module stay. Default: of a model with adapters these alone.

        Yields:
            On `ranks`, (name, tensor), on the module's device; each tensor is memory of its own, which the caller may
            keep. Nothing on the other ranks. Wire: each shard once to each of `ranks`. Memory on `ranks`: one bucket
            and one tensor above the shards, beside the tensors that the caller holds; a merge takes the adapters and a
            delta on every rank.

        Raises:
            ValueError: A bad argument; or this rank had not iterated to the end when the function given to
                `group.call` returned.
            ConnectionAbortedError: Another rank has stopped early, or raised; its own error is the cause.
            TimeoutError: Another rank did not begin to iterate within `Timeouts.load_stall_s`.
            PlanError: With `merge`, no adapters, or adapters that cannot be merged.
        """
        options: dict[str, Any] = {"ranks": ranks, "bucket_bytes": bucket_bytes, "dtype": dtype, "merge": merge}
        stream = WeightStream(self.module, **options, timeout_s=self.status.stall_s)
        if self._streams is None:
            return iter(stream)
        self._streams.callback(lambda: self.status.leave_out_messages(stream.num_messages))
        return iter(self._streams.enter_context(stream))

    def save(
        self,
        path: str,
        overwrite: bool = False,
        *,
        async_save: bool = False,
        optimizer: bool = True,
        keep_last: int | None = None,
        dtype: torch.dtype | None = None,
        token: str | None = None,
    ) -> SaveReport | int:
        """Write a standard Hugging Face directory. Collective.

        Args:
            path: The directory to create.
            overwrite: Replace an existing directory.
            async_save: Return once the shards are in host memory, and write them in the background.
            optimizer: Also write the optimizer's state, random generators and position, if an optimizer is set.
            keep_last: Number of saves of this series to keep, this one included.
            dtype: Dtype of the floating tensors in the files. Default: their own.
            token: Unique identifier of the save; rank 0's is used. Default: a new one.

        Returns:
            The report; of a save in the background its number, for `status.saver`.
        """
        status = self.status

        def on_wait(save: BackgroundSave) -> None:
            status.follow("save", save.bytes_done, save.bytes_total, "")  # so the wait is not taken for a hang

        with status.running("save", "save"):
            status.saver.wait(on_wait)  # only one save runs at a time
            destination = Destination(path, overwrite, keep_last, self._sidecars, dtype, token or new_token())
            state = self.optimizer if optimizer else None
            what = self.module, destination, state, self.trainer.position, status.stall_s
            holds_all = dtype is None and state is self.optimizer  # what training continues from
            if async_save:
                number = status.saver.save(*what)
                status.num_changes_copied = status.num_changes if holds_all else None
                return number
            report = begin_save(*what).run(status.follow)
            if holds_all:
                status.num_changes_saved = status.num_changes
            return report

    def close(self) -> None:
        """Release module and optimizer. No collective, so works after peers have ended."""
        self.trainer.fit_end()
        for token in list(self._copies):
            self._forget_copy(token)
        self.predictor.predict_end()
        self._forwarding = self.mesh = None
        self.status.drop()

    def _wants(self, out: Out | None) -> bool:
        """Return True if the caller requested this rank's output."""
        return out is None or (out.kind != "none" and (out.kind != "rank0" or self.rank == 0))
