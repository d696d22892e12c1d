"""`ShardedModelGroup`: a checkpoint as a resident FSDP2 model on a Ray cluster, and the calls one makes on it."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import ray
import torch
from torch import nn

from raysharding.batch import Out, RankBatch, by_name, check_num_parts, check_out, deal
from raysharding.checkpoint.storage import normal_path
from raysharding.config import Loading, Placement, Sharding, Timeouts
from raysharding.data import Collate
from raysharding.distributed.fully_shard import check_norm
from raysharding.distributed.optim import Schedule, bound, check_schedule, rescheduled
from raysharding.distributed.saving import Destination
from raysharding.distributed.training import (
    DataPlan,
    EvaluationPlan,
    FitPlan,
    check_generation,
    check_max_grad_norm,
    positions_of,
)
from raysharding.group.calls import (
    Asking,
    BegunSave,
    Call,
    Collect,
    FullStateDict,
    LastValue,
    ProgressOption,
    UndoOnInterrupt,
    blocking,
    check_batches,
    collect_generated,
    collect_outputs,
    collect_rank0,
    collect_returns,
    driver_handle,
    handle,
)
from raysharding.group.cluster import NodeCapacity, html_table, memory_table, ranks_table, refuse_in_fork
from raysharding.group.fit import Callback, DatasetHandle, FitLock, FitOptions, FitReport, FitRun, dataset_handle
from raysharding.group.launch import (
    GroupPlan,
    GroupSpec,
    PreflightReport,
    RunningGroup,
    check_optimizer,
    launch,
    plan_group,
    update_record,
)
from raysharding.group.ranks import RankInfo
from raysharding.group.recovery import RestartReport, attach, restart
from raysharding.group.rpc import Mode, is_supervision_thread
from raysharding.group.supervision import Check, Client, GroupState, Supervisor, probe_all, read_log, read_stacks
from raysharding.models import Adapted
from raysharding.units import GIB
from raysharding.worker import check_mode

if TYPE_CHECKING:
    from raysharding.distributed import LoadReport


_STATUS_S = 2.0


class ShardedModelGroup:
    """A model sharded over one Ray actor per rank. Made by `from_checkpoint`; a context manager.

    `forward`, `generate`, `train_step`, `forward_backward`, `optim_step`, `zero_grad`, `call`, `state_dict`, `save`,
    `load`, `status` and `shutdown` are handles: `group.forward(...)` blocks and returns the result, and
    `group.forward.remote(...)` returns a `Call`. Calls run in the order of their submission, each under
    `Timeouts.call_s`; `status` and `shutdown` do not queue behind them. When a rank dies, hangs, or raises alone, the
    call raises a `GroupError`, and later calls raise `GroupBrokenError`. The other ranks are stopped and everything is
    given back, at once or, where `restart` could go on with what they hold, after `Timeouts.keep_s`.

    Ctrl-C while a call blocks the main thread (`group.x(...)`, `Call.result`, `per_rank`, `stream`) cancels the calls
    in the queue (`CallCancelledError`), waits for the running one, raises KeyboardInterrupt and leaves the group READY.
    A second Ctrl-C during that wait stops the ranks. A task that awaits a `Call` is cancelled as asyncio does it: the
    ranks' call goes on.
    """

    def __init__(self, running: RunningGroup) -> None:
        """Not for users: `from_checkpoint` makes groups.

        Args:
            running: Loaded ranks.
        """
        self._optimizer = running.spec.optimizer
        self._fits = FitLock()
        self._restarting = threading.Lock()
        self._taking = threading.Lock()
        self._is_shut = False
        self._finalizer: Any = None
        self._take(running)

    def _take(self, running: RunningGroup) -> None:
        """Stand for these ranks from now on."""
        self._parts = running
        # A call(fn) may set one: after it, the ranks decide.
        self._may_have_optimizer = running.has_optimizer
        if self._finalizer is not None:
            self._finalizer.detach()
        # For a group that is dropped without shutdown(). The collector may run in any thread: this does not wait.
        self._finalizer = weakref.finalize(self, self._supervisor.dropped_soon)
        self._finalizer.atexit = False

    @classmethod
    @blocking
    def from_checkpoint(
        cls,
        checkpoint: str | os.PathLike[str],
        *,
        model: str | Callable[[], nn.Module] | None = None,
        peft_config: Any = None,
        world_size: int | None = None,
        device: Literal["cuda", "cpu"] | None = None,
        sharding: Sharding | None = None,
        loading: Loading | None = None,
        placement: Placement | None = None,
        timeouts: Timeouts | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        preflight: bool = True,
        max_output_bytes: int = 2 * GIB,
        name: str | None = None,
        max_restarts: int = 0,
        progress: ProgressOption = None,
    ) -> Self:
        """Place a group on the cluster, load a checkpoint into it, and return it READY.

        Calls `ray.init()` where the program has not. Headers and index of the checkpoint are validated before
        anything is placed. Whatever fails, nothing stays behind on the cluster.

        Args:
            checkpoint: A Hugging Face directory, one of LoRA adapters, a `.safetensors` file, an index json, or a URI
                of one that `pyarrow.fs` takes (`file://`, `s3://`, `gs://`, ...). A path must be visible on a node
                that holds ranks; rank 0 runs there. A URI is opened by the driver and by the ranks, with the
                credentials of their environments.
            model: `None`: the class that config.json names; the name of a transformers auto class; or a callable that
                returns a module, called on every rank with parameters on meta and buffers real.
            peft_config: A `peft.LoraConfig`: adapters are put into the model before it is sharded, and trained alone;
                base weights are frozen, and streamed as ever. `save` then writes the adapters alone, as peft does.
                Default: none, or those of `checkpoint`, where that is a directory of adapters, which names its base.
            world_size: Number of ranks. Default: one per GPU of the cluster.
            device: Default: `cuda` where the cluster has GPUs, else `cpu`.
            sharding: How the module is cut. Default `Sharding()`.
            loading: How the bytes travel. Default `Loading()`.
            placement: Where the ranks run. Default `Placement()`.
            timeouts: Deadlines. Default `Timeouts()`.
            optimizer: Factory of the optimizer, called with the parameters, or a `ParamGroups`; `set_optimizer` sets it
                later.
            preflight: Before bytes move, check that versions agree on all nodes, that their interfaces can meet, the
                process group's first collectives, and free memory. Default yes; `False` where you know better.
            max_output_bytes: Cap on what one rank sends back for one call, in bytes. Default 2 GiB.
            name: Lets the group outlive this driver, under a name that `attach` finds it by. It ends by `shutdown()`,
                with which a `with` block ends, too, or by its lease (`Timeouts.lease_s`); neither when its object is
                dropped nor when the program exits. Default: no name; the group goes with the driver.
            max_restarts: How often `fit` restarts a group that broke, and goes on from its last save. Default: never;
                `fit` raises then.
            progress: `None`: a bar in a terminal or notebook; `True` or `False`; or a callable that is given bytes
                done and bytes in all.

        Raises:
            ValueError: A bad argument, or a name that is taken.
            CheckpointError: The checkpoint cannot be found or trusted.
            PlacementError: The cluster has no room (says need against have), or the one that Ray would join is gone.
            PreflightError: Nodes or links are such that the group cannot work; lists everything that was found.
            RendezvousError: Ranks did not meet.
            PlanError: Model and checkpoint do not fit together; lists every mismatch.
            GroupError: A rank died, hung or raised.
            KeyboardInterrupt: At Ctrl-C, when everything is undone.
        """
        spec = GroupSpec(
            checkpoint=os.fspath(checkpoint),
            model=model if peft_config is None else Adapted.of(model, peft_config),
            world_size=world_size,
            device=device,
            sharding=Sharding() if sharding is None else sharding,
            loading=Loading() if loading is None else loading,
            placement=Placement() if placement is None else placement,
            timeouts=Timeouts() if timeouts is None else timeouts,
            optimizer=optimizer,
            max_output_bytes=max_output_bytes,
            progress=progress,
            name=name,
            preflight=preflight,
            max_restarts=max_restarts,
        )
        # Nothing is loaded yet that a wait for the next call boundary could save: one Ctrl-C undoes all.
        with UndoOnInterrupt():
            return cls(launch(spec))

    @classmethod
    @blocking
    def attach(cls, name: str, *, timeouts: Timeouts | None = None) -> Self:
        """Give a named group, loaded as it is, to this driver: after a restart of the kernel, say.

        Calls `ray.init()` where the program has not; `ray.init(address=...)` names another cluster. A driver that has
        the group loses it: its calls raise `GroupTakenOverError`. A call that runs still, of a driver that may be dead,
        runs to its end first, under `Timeouts.call_s`, and its result is dropped.

        Args:
            name: What `from_checkpoint(name=...)` said.
            timeouts: Deadlines from now on. Default: those that the group was made with.

        Returns:
            The group, with the weights, the optimizer and the `load_report` that it has.

        Raises:
            ValueError: There is no group of that name (lists those that there are), or it is still being made.
            CallTimeoutError: The earlier driver's call did not end, or ranks do not answer: the group was stopped.
            GroupBrokenError: Ranks are gone, or the earlier driver's call broke it: the group was stopped.
            PlacementError: The cluster that Ray would join is gone.
        """
        return cls(attach(name, timeouts))

    @staticmethod
    def plan(
        checkpoint: str | os.PathLike[str],
        *,
        model: str | Callable[[], nn.Module] | None = None,
        peft_config: Any = None,
        world_size: int | None = None,
        device: Literal["cuda", "cpu"] | None = None,
        sharding: Sharding | None = None,
        loading: Loading | None = None,
        placement: Placement | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        nodes: Sequence[NodeCapacity] | None = None,
    ) -> GroupPlan:
        """Work out what a group would hold, and whether it fits; nothing is placed, no actor is started.

        The module is built here, on meta, by the code that the ranks run: a callable `model` is called in this
        process, and so is `optimizer`, with parameters that have no memory.

        Args:
            checkpoint: As for `from_checkpoint`.
            model: As for `from_checkpoint`.
            peft_config: As for `from_checkpoint`.
            world_size: As for `from_checkpoint`. Default: one rank per free GPU.
            device: As for `from_checkpoint`.
            sharding: As for `from_checkpoint`.
            loading: As for `from_checkpoint`.
            placement: As for `from_checkpoint`.
            optimizer: With one, gradients and its state are counted.
            nodes: What to fit into. Default: the nodes of the cluster that this program is connected to or would join,
                each asked for its free memory by a task that needs no CPU; without a cluster this machine. No cluster
                is started.

        Returns:
            The plan; it prints as a table. Activations are left out.

        Raises:
            ValueError: A bad argument.
            CheckpointError: The checkpoint cannot be found or trusted.
            PlanError: Model and checkpoint do not fit together, or the optimizer's factory raised.
            PlacementError: The cluster that the environment names does not answer.
        """
        spec = GroupSpec(
            checkpoint=os.fspath(checkpoint),
            model=model if peft_config is None else Adapted.of(model, peft_config),
            world_size=world_size,
            device=device,
            sharding=Sharding() if sharding is None else sharding,
            loading=Loading() if loading is None else loading,
            placement=Placement() if placement is None else placement,
            optimizer=optimizer,
        )
        return plan_group(spec, nodes)

    @handle
    def forward(self, /, *args: Any, mode: Mode = None, out: Out | None = None, **kwargs: Any) -> Call:
        """Run the model on a batch, without gradients and in eval mode.

        Args:
            *args: The model's arguments: `Split` deals rows out, `PerRank` gives one value to each rank, anything else
                goes to all. A sole `Split` of a mapping, such as a tokenizer's batch, is dealt out as keyword
                arguments: `forward(Split(batch))`.
            mode: `"train"` runs the modules in train mode. Default eval.
            out: What comes back. Default: rows gathered in order where the call has a `Split`, else rank 0's output.
            **kwargs: As `args`.

        Returns:
            The model's output on the CPU; its type is kept. Caches are `None`; a loss is the whole batch's.

        Raises:
            ValueError: Splits of different sizes, no rows, a tensor beside a `Split` that looks like rows (`Same(x)`
                says that it is none), ids that the model does not have, values of `PerRank` that would have ranks run
                different code, or a bad `mode` or `out`.
            OutputTooLargeError: A rank's output is over `max_output_bytes`.
        """
        check_mode(mode, default="eval")
        check_out(out)
        batches = self._deal("forward", args, kwargs)
        collect, as_refs = collect_outputs(out, batches[0].rows, batches[0].dim), out == Out.refs()
        call = self._client.submit_batches("forward", batches, mode, out, collect=collect, as_refs=as_refs)
        return call.keep_alive(self)

    @handle
    def generate(self, /, *args: Any, mode: Mode = None, out: Out | None = None, **kwargs: Any) -> Call:
        """Generate token ids, by transformers' own `generate` on every rank with its rows.

        Every token is a forward of all ranks, until the last of them has finished its rows. Greedy and beam search give
        what one process gives; samples are drawn on each rank, from `torch.manual_seed` of rank 0 on.

        Args:
            *args: As for `forward`: the prompt, usually `Split(tokenizer(texts, return_tensors="pt"))`.
            mode: As for `forward`.
            out: As for `forward`.
            **kwargs: The arguments of transformers' `generate`: `max_new_tokens=`, `do_sample=`, `generation_config=`.
                `prefix_allowed_tokens_fn` is given the number of a row among its rank's rows, not the batch's.

        Returns:
            Ids, int64 [rows, length], prompts first where the model is no encoder-decoder; rows that ended early are
            padded at the end.

        Raises:
            ValueError: As for `forward`, or an argument that ranks in step do not have: `streamer`, `assistant_model`,
                `return_dict_in_generate`, `synced_gpus`.
            GroupError: The model cannot generate, or raised.
        """
        check_mode(mode, default="eval")
        check_out(out)
        check_generation(kwargs)
        batches = self._deal("generate", args, kwargs)
        collect, as_refs = collect_generated(out, batches[0].rows), out == Out.refs()
        call = self._client.submit_batches("generate", batches, mode, out, collect=collect, as_refs=as_refs)
        return call.keep_alive(self)

    @handle
    def call(self, fn: Callable[..., Any], /, *args: Any, out: Out | None = None, **kwargs: Any) -> Call:
        """Run `fn(*args, **kwargs)` on every rank inside the process group.

        `raysharding.current_worker()` gives module, mesh and optimizer there; the module's parameters are the shards
        (DTensors), whatever ran before. Ranks must call the same collectives.

        When it ends, these are as they were: default dtype and device, grad, inference and autocast mode, the working
        directory. What is set for a process stays: random generators, the number of threads, deterministic algorithms,
        matmul precision, `torch.backends`, the environment. Signal handlers cannot be set: it is not the main thread.

        Args:
            fn: A function that pickles.
            *args: Its arguments, dealt out as for `forward`, but that `fn` gets a mapping as it is.
            out: `Out.rank0()`, `Out.per_rank()`, `Out.refs()` or `Out.none()`, as for `forward`.
            **kwargs: As `args`.

        Returns:
            A list of what each rank returned, by rank; `None` for a rank that had no rows of a `Split`, only a dummy.

        Raises:
            TypeError: `fn` or an argument cannot be pickled.
            ValueError: As for `forward`, or `out=Out.gather()`.
            GroupError: `fn` raised, destroyed the ranks' process group, or returned what cannot be pickled. Where it
                raised on any rank, all ranks drop their gradients. The group stays READY unless other ranks wait for
                one that raised, or have changed weights or begun collectives that it has not.
            OutputTooLargeError: A rank's value is over `max_output_bytes`.
        """
        check_out(out)
        batches = deal(args, kwargs, self.world_size, positions=positions_of(fn))
        collect, as_refs = collect_returns(out, batches[0].rows), out == Out.refs()
        call = self._client.submit_batches("call", batches, fn, out, collect=collect, as_refs=as_refs)
        self._may_have_optimizer = True
        return call.keep_alive(self)

    @handle
    def train_step(
        self,
        /,
        *args: Any,
        loss: Callable[..., Any] | None = None,
        max_grad_norm: float | None = None,
        mode: Mode = None,
        gradient_accumulation_steps: int = 1,
        **kwargs: Any,
    ) -> Call:
        """Take one optimizer step on a batch: the step that one process would take on the same rows.

        Args:
            *args: The model's arguments, as for `forward`.
            loss: `loss(output, *args, **kwargs)` → a mean, or (sum, count). Default: the output's own `.loss`. To find
                out what it adds up by, the first step also runs it on parts of the batch and on labels that the batch
                does not have: masked by -100 (maps: by 255), or of one of its classes. No weights change then.
            max_grad_norm: Clip gradients to this global norm. Default: no clipping.
            mode: `"eval"` trains with the modules in eval mode: no drop-out, BatchNorm's stored statistics. Default
                train.
            gradient_accumulation_steps: Parts that each rank takes its rows in, one after the other, for less memory;
                the update is that of all rows at once, and gradients are reduced once. Between the parts each rank
                holds full, unsharded gradients. Default 1.
            **kwargs: As `args`.

        Returns:
            `{"loss": float, "grad_norm": float}`; `grad_norm` is the norm before clipping.

        Raises:
            EmptyBatchError: Nothing counts in the batch, so no update was taken; `fit` skips such a batch. The group is
                READY.
            GroupError: The model or the loss raised, or the loss is NaN or infinite in the first step with it.
            ValueError: No optimizer is set, the batch is not valid, or a bad `mode` or number. After a `call`, whose
                function may have set the optimizer, only the ranks know whether there is one: then a `GroupError` says
                so.
        """
        self._require_optimizer("train_step")
        check_mode(mode, default="train")
        check_max_grad_norm(max_grad_norm)
        batches = self._deal("train_step", args, kwargs)
        check_num_parts(gradient_accumulation_steps, batches[0].num_rows)
        extra = (loss, max_grad_norm, mode, gradient_accumulation_steps)
        options: dict[str, Any] = {"collect": collect_rank0, "check": self._unless_fit("train_step")}
        return self._client.submit_batches("train_step", batches, *extra, **options).keep_alive(self)

    @handle
    def forward_backward(
        self,
        /,
        *args: Any,
        loss: Callable[..., Any] | None = None,
        mode: Mode = None,
        sync: bool = True,
        **kwargs: Any,
    ) -> Call:
        """Add a batch's gradients to those since the last update.

        The update that `optim_step` takes then is that of one process on the rows of all these batches at once, each
        weighed by what counts in it. The first call after an update drops the gradients of before.

        Args:
            *args: The model's arguments, as for `forward`.
            loss: As for `train_step`.
            mode: As for `train_step`.
            sync: Whether to reduce the gradients over the ranks, those of earlier calls with them. The last call before
                `optim_step` has to; without it the others save traffic, and each rank holds full, unsharded gradients.
                Default yes.
            **kwargs: As `args`.

        Returns:
            `{"loss": float}` of this batch; NaN where nothing counts in it, which then adds nothing.

        Raises:
            ValueError: The batch is not valid, or a bad `mode`.
            GroupError: The model or the loss raised: the gradients of all calls since the last update are dropped.
        """
        check_mode(mode, default="train")
        batches = self._deal("forward_backward", args, kwargs)
        extra = (loss, mode, sync)
        options: dict[str, Any] = {"collect": collect_rank0, "check": self._unless_fit("forward_backward")}
        return self._client.submit_batches("forward_backward", batches, *extra, **options).keep_alive(self)

    @handle
    def optim_step(self, *, max_grad_norm: float | None = None) -> Call:
        """Update the parameters with the gradients since the last update.

        Args:
            max_grad_norm: As for `train_step`.

        Returns:
            `{"loss": float, "grad_norm": float}`: the loss over the rows of all batches, and the norm before clipping.
            No `loss` where the gradients are those of a `call(fn)` that ran a backward of its own.

        Raises:
            ValueError: No optimizer is set, as for `train_step`, or `max_grad_norm` is not positive.
            EmptyBatchError: Nothing counted in any batch. The group is READY.
            GroupError: There are no gradients, or the last `forward_backward` did not reduce them. The group is READY.
        """
        self._require_optimizer("optim_step")
        check_max_grad_norm(max_grad_norm)
        check = self._unless_fit("optim_step")
        return self._client.submit_same("optim_step", max_grad_norm, check=check).keep_alive(self)

    @handle
    def zero_grad(self) -> Call:
        """Drop the gradients since the last update: give up what `forward_backward` has added up."""
        return self._client.submit_same("zero_grad", check=self._unless_fit("zero_grad")).keep_alive(self)

    @handle
    def clip_grad_norm_(self, max_norm: float | None, norm_type: float = 2.0) -> Call:
        """Scale all gradients so that their global norm is at most `max_norm`.

        For gradients that a `call(fn)` left; `train_step(max_grad_norm=...)` clips its own.

        Args:
            max_norm: Upper bound; `None` only measures.
            norm_type: p of the p-norm, above 0; `inf` for the largest magnitude.

        Returns:
            The norm before clipping, that of one process, as a float.

        Raises:
            ValueError: `norm_type` is not positive, or `max_norm` negative or NaN.
        """
        check_norm(max_norm, norm_type)
        return self._client.submit_same("clip_grad_norm_", max_norm, norm_type).keep_alive(self)

    @blocking
    def set_optimizer(self, factory: Callable[..., torch.optim.Optimizer], **kwargs: Any) -> None:
        """Make the optimizer on every rank, in place of an earlier one; blocks.

        Args:
            factory: An optimizer class, a callable that takes the parameters and returns an optimizer, a
                `ParamGroups`, for hyperparameters by the names of parameters, or a `Scheduled`.
            **kwargs: Given to `factory` after the parameters.

        Raises:
            ValueError: Not a factory.
            TypeError: It cannot be pickled.
        """
        check_optimizer(factory)
        check = self._unless_fit("set_optimizer")
        self._client.submit_same("set_optimizer", factory, kwargs, False, check=check).result()
        self._optimizer = bound(factory, kwargs)
        self._may_have_optimizer = True
        self._update_record()

    @blocking
    def set_scheduler(self, schedule: Schedule, **kwargs: Any) -> None:
        """Give the optimizer a learning-rate schedule, which takes a step with every update; blocks.

        It is saved, loaded, copied and made anew with the optimizer; `train_step` and `optim_step` say the `lr` of
        their update then. `optimizer=Scheduled(...)` gives one from the start.

        Args:
            schedule: A class of `torch.optim.lr_scheduler`, or a callable that takes the optimizer and returns one.
            **kwargs: Given to `schedule` after the optimizer.

        Raises:
            ValueError: No optimizer is set, or no schedule was given.
            TypeError: It cannot be pickled.
            GroupError: It cannot be made; the group is READY, with the schedule that it had.
        """
        self._require_optimizer("set_scheduler")
        check_schedule(schedule)
        whole = partial(schedule, **kwargs) if kwargs else schedule
        self._client.submit_same("set_scheduler", whole, check=self._unless_fit("set_scheduler")).result()
        self._optimizer = None if self._optimizer is None else rescheduled(self._optimizer, whole)
        self._update_record()

    def _require_optimizer(self, method: str) -> None:
        if not self._may_have_optimizer:
            raise ValueError(f"{method} needs an optimizer: call group.set_optimizer(torch.optim.AdamW, lr=...) first")

    def _deal(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[RankBatch]:
        """Deal a batch out, and refuse one that some ranks could not compute while others wait for them."""
        args, kwargs = by_name(args, kwargs)
        bounds = self._running.bounds
        batches = deal(args, kwargs, self.world_size, positions=bounds.positions)
        check_batches(method, batches, bounds)
        return batches

    @driver_handle
    @blocking
    def fit(
        self,
        data: Any,
        *,
        batch_size: int,
        epochs: int = 1,
        max_steps: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        columns: Sequence[str] | None = None,
        collate: Collate | None = None,
        loss: Callable[..., Any] | None = None,
        max_grad_norm: float | None = None,
        gradient_accumulation_steps: int = 1,
        on_empty: Literal["skip", "raise"] = "skip",
        prefetch: int = 2,
        save_to: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
        keep_last: int | None = None,
        async_save: bool = False,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
    ) -> FitReport:
        """Train over data: each rank reads its own rows, and the steps are those that one process would take.

        What a step is fed depends on data, batch size and seed, and not on the number of ranks. Ctrl-C ends the run
        after the steps under way (those of half a second), with the group READY; `resume=True` goes on from there. A
        group that breaks is restarted up to `max_restarts` times (see `from_checkpoint`); the run goes on from its last
        save, or its beginning, which is saved first where no file holds it; random generators go back with it.

        One `fit` runs on a group at a time. Meanwhile other threads and `callbacks` may call what leaves the model as
        it is (`forward`, `generate`, `evaluate`, `state_dict`, `save`, `status` and the like): it runs between two
        steps, in the order of submission, and so does a `call`, whatever its function changes. What would change the
        model (another `fit`, `train_step`, `forward_backward`, `optim_step`, `zero_grad`, `set_optimizer`,
        `set_scheduler`, `load`, `restart`) is refused by a `GroupError`, and the run goes on. `interrupt` ends it after
        the steps under way, by `CallCancelledError`; `shutdown` ends it with the group.

        Args:
            data: A `ray.data.Dataset`, whose blocks are computed once, in the object store; a Parquet file or a
                directory of them, as a path or URI that all ranks' nodes read; a list of rows, or anything with `len`
                and `[number]`; a mapping of names to columns; an iterable that pickles, or a function that returns one,
                which every rank runs through. A row is usually a mapping of names to numbers, lists or tensors.
            batch_size: Rows of a step, all ranks together. The last step of an epoch has what is left.
            epochs: How often the data is gone through.
            max_steps: Steps after which the run ends, those before a resume with them. Default: no such end.
            shuffle: Whether rows come in a random order, which differs from epoch to epoch: single rows of a list; of
                Parquet files and datasets row groups or blocks, their rows in windows of 512, and every batch holds
                rows of as many places as it has. Not for an iterable.
            seed: Of that order.
            columns: Columns of Parquet files or datasets to read. Default: all.
            collate: Makes a batch of a list of rows: a mapping of the model's keyword arguments, a tuple of its
                positional ones, or one tensor; transformers' data collators do. It runs between the steps. Default:
                rows are stacked column by column.
            loss: As for `train_step`.
            max_grad_norm: As for `train_step`.
            gradient_accumulation_steps: As for `train_step`: parts that a batch is taken in.
            on_empty: What becomes of a batch in which nothing counts, because all its labels are masked. `"skip"`: all
                ranks leave it out alike; it takes its number and its place in the data, optimizer and schedule take no
                step, its `loss` and `grad_norm` are NaN in the report, whose `skipped` has its number, and a warning
                says so once. `"raise"`: it ends the run with an `EmptyBatchError`. Default skip.
            prefetch: Batches that each rank reads ahead; two at least where `collate` is not given.
            save_to: Directory or URI of saves, `step-<number>` each, as for `save`. Default:
                nothing is saved. It may hold saves of the same run, and no others.
            save_every: Steps between two saves; one more comes at the end. Default: only that.
            keep_last: Saves that are kept; older ones are removed. Default: all.
            async_save: Write saves in the background, while the ranks train on; see `save`. Default no.
            resume: Go on where the last run stands: in this group, or in the save that it was made from.
            callbacks: Each is given a `FitStep` for every step, in the thread of `fit`, which hears of quick steps many
                at a time: the ranks, and what a callback asks of them, stand after the last of those. They take no
                steps meanwhile. What a callback raises ends the run, with the group READY, and `fit` raises it; where a
                call of the callback broke the group, that is like a step that did. One with a `close` method is closed
                at the end.
            progress: Whether to show a bar. Default: in a terminal or notebook.

        Returns:
            What became of it: losses, rates, restarts, the last save.

        Raises:
            ValueError: A bad argument, no optimizer, or `resume=True` where there is nothing to go on with.
            TypeError: `data` is none, or does not pickle.
            DataError: The data cannot be read, has no rows, or is not what a resumed run was fed before. The group is
                READY.
            CheckpointError: A save failed, in the background too (no later call raises that again), or `save_to` holds
                the saves of another run.
            CallCancelledError: `interrupt` ended the run.
            GroupError: Ranks failed, more often than `max_restarts` allows; or another `fit` runs on the group.
        """
        self._require_optimizer("fit")
        check_max_grad_norm(max_grad_norm)
        with self._fits.running(self.name):
            found = self._dataset(data, columns, collate)
            data_plan = DataPlan(
                source=found.source,
                batch_size=batch_size,
                epochs=epochs,
                max_steps=max_steps,
                shuffle=shuffle,
                seed=seed,
                collate=collate,
                prefetch=prefetch,
                stall_s=self._client.timeouts.load_stall_s,
                run=secrets.token_hex(8),
            )
            plan = FitPlan(data_plan, loss, max_grad_norm, gradient_accumulation_steps, on_empty)
            target = None if save_to is None else normal_path(os.fspath(save_to))
            options = FitOptions(target, save_every, keep_last, async_save, resume, callbacks, progress)
            run = FitRun(
                self,
                lambda: self._client,
                plan,
                found,
                options,
                self._fits,
                self._restart,
                self._running.spec.max_restarts,
            )
            return run.run()

    @handle
    def evaluate(
        self,
        data: Any,
        *,
        batch_size: int,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        loss: Callable[..., Any] | None = None,
        with_loss: bool = True,
        max_steps: int | None = None,
        columns: Sequence[str] | None = None,
        collate: Collate | None = None,
        prefetch: int = 2,
    ) -> Call:
        """Compute loss and metrics over data in eval mode, without gradients: those of one process on the same rows.

        Args:
            data: As for `fit`.
            batch_size: Rows of a forward, all ranks together.
            metrics: Name → `metric(output, ...)`, which takes of the batch's arguments those that it names, and returns
                (sum, count) over its rows: the value is the sum of all sums by that of all counts. Runs on the ranks.
            loss: As for `train_step`.
            with_loss: Whether to compute the loss; without it rows need no labels. Default yes.
            max_steps: Batches after which to end. Default: all.
            columns: As for `fit`.
            collate: As for `fit`.
            prefetch: As for `fit`.

        Returns:
            `{"loss": float, <metric>: float, ..., "num_rows": float}`; NaN where nothing counted in any batch: one in
            which nothing counts adds nothing to the loss.

        Raises:
            ValueError: A bad argument.
            TypeError: `data` is none, or does not pickle.
            DataError: The data cannot be read, or has no rows. The group is READY.
            GroupError: The model or a metric raised, or ranks failed.
        """
        found, members = self._dataset(data, columns, collate), self._client.members
        data_plan = DataPlan(
            source=found.source,
            batch_size=batch_size,
            max_steps=max_steps,
            collate=collate,
            prefetch=prefetch,
            stall_s=self._client.timeouts.load_stall_s,
        )
        plan = EvaluationPlan(data_plan, loss, with_loss, dict(metrics or {}))
        last = LastValue()
        found.pin(members)
        call = self._client.submit_same("evaluate", plan, keep_step=last.keep, collect=Collect(last.collect))
        call.when_done(lambda _: found.unpin(members))
        return call.keep_alive(self)

    def _dataset(self, data: Any, columns: Sequence[str] | None, collate: Collate | None) -> DatasetHandle:
        # A collate function may make anything of a column; without one it is the argument of its name.
        whole = self._running.bounds.num_ids if collate is None else ()
        return dataset_handle(data, columns, self._client.timeouts.load_stall_s, whole)

    @handle
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        optimizer: bool = True,
        keep_last: int | None = None,
        async_save: bool = False,
    ) -> Call:
        """Save the model as a standard Hugging Face directory; each rank writes its own part.

        Args:
            path: Directory to make, on a file system that all ranks' nodes share; or a URI that `pyarrow.fs` takes
                (`s3://`, `gs://`, ...), to which each rank writes with the credentials of its environment; one save at
                a time.
            overwrite: Replace a save that is there. It stays whole until the new one is; in an object store, which has
                no rename, it is removed first. What no save wrote (a model card, `checkpoint-500/`) stays.
            optimizer: Also the optimizer's state, where one is set: in the folder `optimizer`, for `load` and for
                `from_checkpoint(..., optimizer=...)` at any world size; and beside it random generators and, of a
                `fit`, the position in the data. Default yes. While `fit` runs, a restart goes back to no save without.
            keep_last: Of the saves beside this one whose names differ in the last number alone (`step-100`), how many
                stay, this one with them; older ones are removed, but for what no save wrote. Default: all.
            async_save: Return as soon as each rank has copied its shards to host memory, and write in the background:
                the model may be trained on meanwhile. One save at a time: the next waits for it. What it fails of is
                raised by the next call of the group, once; what others have failed of by then is noted on it.
                `wait_for_save` and `shutdown` wait for it. Default no.

        Returns:
            A `SaveReport`; `None` for one in the background.

        Raises:
            ValueError: A bad `keep_last`.
            CheckpointError: The directory exists, is a mount point, holds what no save could carry over (lists it), or
                cannot be written.
        """
        target = normal_path(os.fspath(path))
        stall_s = self._client.timeouts.load_stall_s
        Destination(target, overwrite, keep_last)  # refuses what is wrong
        collect = Collect(lambda _: None) if async_save else collect_rank0
        # A run that a restart took back to weights alone would go on from another step with them.
        save = self._running.files.begin_save(target, is_origin=optimizer or not self._fits.is_running)
        what = (target, overwrite, optimizer, keep_last, async_save, save.token)
        call = self._client.submit_same("save", *what, deadline_s=stall_s, watch=True, collect=collect)
        if async_save:
            self._update_record()  # another driver may be the one to ask how it ended
            self._follow(save, call)
        else:
            call.when_done(partial(self._note_saved, weakref.ref(self), save))
        return call.keep_alive(self)

    @handle
    def load(self, path: str | os.PathLike[str]) -> Call:
        """Load another checkpoint of the same model into the group, in place.

        Args:
            path: A directory, file, index json or URI, as for `from_checkpoint`, that rank 0's node can read. A save
                of ours with an optimizer's state brings that back, too, where an optimizer is set.

        Returns:
            The `LoadReport` of the weights.

        Raises:
            CheckpointError: It cannot be found or trusted.
            PlanError: It does not fit: the group is READY, with the weights and the optimizer that it had.
            GroupError: A rank died, hung or raised after bytes had moved: what was there is overwritten in part.
        """
        target = normal_path(os.fspath(path))
        stall_s = self._client.timeouts.load_stall_s
        check = self._unless_fit("load")
        call = self._client.submit_same("load", target, deadline_s=stall_s, watch=True, check=check)
        call.when_done(partial(self._note_loaded, weakref.ref(self), target, self._running.files.begin_load()))
        return call.keep_alive(self)

    @handle
    def state_dict(self, keys: str | Sequence[str] | None = None) -> Call:
        """Gather full tensors to the driver, a bucket at a time.

        Args:
            keys: FQNs to gather, or one FQN. Default: all.

        Returns:
            FQN → full CPU tensor, tied names included. The driver holds all of them; no rank does.

        Raises:
            GroupError: The model has no tensor of that name; the group stays READY.
        """
        kept = FullStateDict(self._client.timeouts.call_s)
        wanted = None if keys is None else [keys] if isinstance(keys, str) else list(keys)
        collect = Collect(kept.collect)
        return self._client.submit_same("state_dict", wanted, keep_step=kept.keep, collect=collect).keep_alive(self)

    @driver_handle
    @blocking
    def wait_for_save(self, stall_s: float | None = None) -> None:
        """Wait until the saves that `save(async_save=True)` has begun are committed; at once where there are none.

        Args:
            stall_s: Longest time without a byte written. Default: `Timeouts.load_stall_s`.

        Raises:
            CheckpointError: One failed: what was at its place is untouched.
            GroupError: One was lost with its ranks.
            TimeoutError: Nothing was written for so long; they go on.
        """
        self._client.pending.wait(self._client.timeouts.load_stall_s if stall_s is None else stall_s)

    @property
    def saves(self) -> tuple[str, ...]:
        """Paths of the saves that were committed, in that order, those in the background with them."""
        return tuple(self._running.files.saves)

    def _follow(self, save: BegunSave, call: Call) -> None:
        """Hear how a save in the background ends."""
        group = weakref.ref(self)
        actor, supervisor = self._client.members[0].actor, self._supervisor

        def ask(number: int) -> ray.ObjectRef:
            return actor.save_status.remote(number)

        def why_lost() -> str:
            if not ray.is_initialized():  # what it is asked would start another one
                return "Ray was shut down under the group"
            if supervisor.state is GroupState.CLOSED:
                return "the group was shut down"
            cause = supervisor.status.cause
            # Kept ranks may write on; one that is restarted in place says itself how it went.
            return "" if cause is None or supervisor.survivors.is_kept else str(cause).partition("\n")[0]

        def saved() -> None:
            left = group()
            if left is not None:
                left._running.files.committed(save)
                left._update_record()

        self._client.pending.begin(save, call, Asking(ask, why_lost, saved))

    @staticmethod
    def _note_saved(group: weakref.ref[ShardedModelGroup], save: BegunSave, call: Call) -> None:
        """Remember the files of a save that went well."""
        owner = group()
        if owner is not None and call.succeeded():
            owner._running.files.committed(save)
            owner._update_record()

    @staticmethod
    def _note_loaded(group: weakref.ref[ShardedModelGroup], path: str, number: int, call: Call) -> None:
        """Remember the files of a load that went well."""
        owner = group()
        if owner is not None and call.succeeded():
            owner._running.files.loaded(path, number)
            owner._update_record()

    @property
    def _running(self) -> RunningGroup:
        """The group's running parts, which all that it does begins with."""
        refuse_in_fork(self._parts.client.supervisor.name)
        return self._parts

    @property
    def _client(self) -> Client:
        return self._running.client

    @property
    def _supervisor(self) -> Supervisor:
        return self._client.supervisor

    @property
    def name(self) -> str:
        """What errors call the group."""
        return self._supervisor.name

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Where each rank runs."""
        return self._client.ranks

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._client.ranks)

    @property
    def state(self) -> GroupState:
        """The group's state now."""
        return self._supervisor.state

    @property
    def load_report(self) -> LoadReport:
        """Figures of the load that made the group; `load` returns its own."""
        report = self._running.load_report
        assert report is not None, "the group is loaded"
        return report

    @property
    def preflight_report(self) -> PreflightReport | None:
        """What was seen of nodes and links before the load; `None` under `preflight=False`."""
        return self._running.preflight_report

    @driver_handle
    @blocking
    def status(self) -> dict[str, Any]:
        """Ask every rank what it is doing and what memory it holds; ranks answer while they work.

        Returns:
            `state`, `cause` (what broke the group, or `None`), and `ranks`: one dict per rank with where it runs,
            `answers` (`False` where it said nothing within 2 s), and what `Worker.status` says.
        """
        cause = self._supervisor.status.cause
        return {
            "name": self._supervisor.name,
            "state": self.state.value,
            "cause": None if cause is None else str(cause),
            "ranks": self._ask_status() if self.state not in (GroupState.BROKEN, GroupState.CLOSED) else [],
        }

    @blocking
    def memory_summary(self) -> str:
        """Return a table of the memory that each rank holds."""
        self._supervisor.status.refuse_if_unusable()
        return memory_table(self._ask_status())

    @driver_handle
    @blocking
    def restart(self, checkpoint: str | os.PathLike[str] | None = None, world_size: int | None = None) -> RestartReport:
        """Make a broken group whole again; this object and its handles go on to work.

        Where every rank is alive and none was changed in part (one raised while others waited for it, or all wait for
        each other), the ranks meet in a new process group around the shards and the optimizer that they hold: nothing
        is lost or read. Where ranks died or hang, and others hold every shard (`Sharding(replicate_size=)`, one model
        among those that are left), new ranks take the lost ones' places and copy weights, buffers, modes and optimizer
        from their replicas; no file is read either. Random generators of new ranks begin anew, and hooks that a `call`
        registered are not there. Both on CPUs only: an aborted NCCL collective may have left
        anything. Else new ranks are placed on what nodes there are, and load the last `save` of this group that
        is whole in its files, whether the driver has heard of it or not, or what was loaded since, or the checkpoint
        that it was made from, with the optimizer's state where that save holds it. What its killed saves have left is
        removed.

        Args:
            checkpoint: Load this one instead, also where nothing is lost.
            world_size: Number of ranks from now on. Default: as before.

        Returns:
            How it was done, why so, and how long it took.

        Raises:
            ValueError: The group is READY and neither argument is given: there is nothing to restart.
            GroupError: `fit` runs on the group: it restarts it itself, `max_restarts` times.
            GroupTakenOverError: Another driver has the group.
            PlacementError: The cluster has no room any more: try fewer ranks. The group stays BROKEN.
            CheckpointError: What it would load is gone or not valid. The group stays BROKEN.
            GroupError: As for `from_checkpoint`.
        """
        self._unless_fit("restart")()
        return self._restart(checkpoint, world_size)

    def _restart(
        self, checkpoint: str | os.PathLike[str] | None = None, world_size: int | None = None
    ) -> RestartReport:
        # One after the other: who comes second finds the group READY. Bounded by the deadlines of what runs inside.
        with self._restarting:
            running, report = restart(
                self._running,
                checkpoint=None if checkpoint is None else os.fspath(checkpoint),
                world_size=world_size,
                optimizer=self._optimizer,
            )
            if running is not self._running:
                with self._taking:
                    if not self._is_shut:
                        self._take(running)
                if self._is_shut:
                    running.client.supervisor.shutdown()
                    running.client.supervisor.status.refuse_if_unusable()
        return report

    @blocking
    def stacks(self) -> dict[int, str]:
        """Ask every rank for the Python stacks of its threads, while it works; takes 2 s at most.

        Returns:
            Rank → stacks, the work thread's first. Of a rank that does not answer: that, what state the kernel says its
            process is in, and its stacks where it runs (a thread may hold the GIL).

        Raises:
            GroupBrokenError: The group is broken (its error holds the stacks) or shut down.
        """
        self._supervisor.status.refuse_if_unusable()
        return read_stacks(self._client.members)

    @blocking
    def logs(self, rank: int, num_lines: int = 100) -> str:
        """Return the last lines that a rank printed, its stdout and stderr one after the other.

        They are read from Ray's log files on its node: the rank may be busy, stopped or dead, and the group broken or
        shut down, as long as the node and this driver's Ray are there.

        Args:
            rank: Global rank.
            num_lines: Of each of the two.

        Raises:
            ValueError: There is no such rank, or `num_lines` is not positive.
            GroupError: Its node is gone.
        """
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank!r}: give one of 0 to {self.world_size - 1}")
        if type(num_lines) is not int or num_lines < 1:
            raise ValueError(f"num_lines={num_lines!r}: give 1 or more, as an int")
        return read_log(self._client.members[rank], num_lines)

    @blocking
    def interrupt(self, timeout_s: float | None = None) -> int:
        """Do what one Ctrl-C does, from any thread: cancel the calls in the queue and wait for the running one.

        Args:
            timeout_s: How long to wait. Default: until the running call ends, which its own deadline bounds.

        Returns:
            How many calls were cancelled: each raises `CallCancelledError`, and so does a `fit`, before its next steps;
            until it has, calls that change the model are refused. The group is READY, unless the running call has
            failed.

        Raises:
            TimeoutError: `timeout_s` passed; the running call still runs, those behind it are cancelled.
            GroupBrokenError: The group is broken or shut down. A `fit` that restarts it ends all the same.
        """
        self._fits.interrupt()  # first: it may be about to restart a group that is broken
        self._supervisor.status.refuse_if_unusable()
        stopping = self._supervisor.interrupt_soon("")
        self._supervisor.wait_stopped(stopping, timeout_s)
        return stopping.result(0) if stopping.done() else 0

    @driver_handle
    def shutdown(self) -> None:
        """Stop all ranks and give everything back. May be called many times; a running call fails, and a restart.

        A save in the background is waited for, as long as it writes; what it failed of is raised then. In a callback of
        `Call.when_done` all this begins, and nothing is waited for or raised.
        """
        if is_supervision_thread():
            self.shutdown.remote()
            return
        try:
            if self.state in (GroupState.READY, GroupState.BUSY):
                self._client.pending.wait(self._client.timeouts.load_stall_s)
        finally:
            with self._taking:
                self._is_shut = True
                supervisor = self._supervisor  # of ranks that a restart has made, or has not given to this object yet
            supervisor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a group cannot be sent to ranks; use raysharding.current_worker() there")

    def __repr__(self) -> str:
        return f"<ShardedModelGroup {self._title()}>\n{ranks_table(self.ranks)}"

    def _repr_html_(self) -> str:
        return html_table(f"ShardedModelGroup {self._title()}", self.ranks)

    def _title(self) -> str:
        devices = self.ranks[0].device.partition(":")[0]
        return f"{self._running.spec.checkpoint}, {self.world_size} ranks on {devices}, {self.state.value}"

    def _unless_fit(self, method: str) -> Check:
        """Return a check that refuses `method` while `fit` runs."""
        return partial(self._fits.refuse, self.name, method)

    def _update_record(self) -> None:
        """Have a named group remember what a restart would need, for a driver that attaches."""
        running = self._running
        if running.spec.name is not None:
            update_record(running, replace(running.spec, optimizer=self._optimizer))

    def _ask_status(self) -> list[dict[str, Any]]:
        said = probe_all(self._client.members, "status", within_s=_STATUS_S).replies
        return [
            # One that is dead or stopped is the supervision's to report.
            {**said.get(one.rank, {}), "rank": one.rank, "node_ip": one.node_ip, "pid": one.pid}
            | {"answers": one.rank in said}
            for one in self.ranks
        ]
