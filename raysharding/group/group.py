"""`ShardedModelGroup`: a checkpoint as a resident FSDP2 model on a Ray cluster, and the calls on it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, Self

import torch
from torch import nn

from raysharding.arguments import check_function, check_int, check_summon_full_params, given, with_hints
from raysharding.batch import Collate, Out, RankBatch, check_num_parts, check_out, deal
from raysharding.config import Loading, Placement, Sharding, Timeouts, floating_dtype
from raysharding.distributed import LoadReport
from raysharding.distributed.fully_shard import check_norm
from raysharding.distributed.optim import Schedule, bound, check_schedule, rescheduled
from raysharding.distributed.saving import Destination, SaveReport
from raysharding.distributed.training import (
    Columns,
    Metric,
    OutputFunction,
    check_generation,
    check_max_grad_norm,
    positions_of,
)
from raysharding.distributed.weights import CopyReport
from raysharding.group.calls import (
    Call,
    Client,
    Collect,
    LiveView,
    ProgressOption,
    blocking,
    check_no_examples,
    collect_outputs,
    collect_returns,
    driver_handle,
    handle,
    is_callback_thread,
    model_batches,
    output_path,
    rank_statuses,
    read_log,
    streamed,
)
from raysharding.group.cluster import (
    NodeCapacity,
    StatusReport,
    memory_table,
    ranks_table,
    refuse_in_fork,
    tell,
    warn,
)
from raysharding.group.fit import (
    REFUSED_BESIDE,
    Callback,
    EarlyStop,
    FitReport,
    RunLock,
    run_fit,
    run_predict,
    submit_evaluate,
)
from raysharding.group.launch import (
    GroupPlan,
    PreflightReport,
    RestartReport,
    RunningGroup,
    StartReport,
    attach,
    check_optimizer,
    launch,
    packed_spec,
    plan_group,
    restart,
    submit_copy,
    submit_load,
    submit_save,
)
from raysharding.group.messages import GroupState, Mode
from raysharding.group.ranks import RankInfo
from raysharding.report import html_report
from raysharding.units import GIB
from raysharding.worker import check_mode


class ShardedModelGroup:
    """A model sharded over Ray actors, one actor per rank; made by `from_checkpoint`, and a context manager.

    `forward`, `generate`, `train_step`, `forward_backward`, `optim_step`, `zero_grad`, `call`, `state_dict`, `save`,
    `load`, `copy_to`, `status` and `shutdown` are handles: `group.forward(...)` blocks and returns the result, and
    `group.forward.remote(...)` returns a `Call`. Calls run in the order of their submission, each under
    `Timeouts.call_s`; `status` and `shutdown` do not queue behind them. When a rank dies, hangs, or raises alone, the
    call raises a `GroupError`, and later calls raise `GroupBrokenError` until a `restart`. The other ranks are stopped,
    and all resources are released at once.

    An actor of Ray, the controller, owns the ranks and runs the calls; this object is one driver's end of the group.
    Several drivers may use a group that has a name (`attach`): each driver's calls run in its own order.

    Ctrl-C while a call blocks the main thread (`group.x(...)`, `Call.result`, `per_rank`, `stream`) cancels this
    driver's calls in the queue (`CallCancelledError`), waits for its running call, raises KeyboardInterrupt and leaves
    the group READY. A second Ctrl-C during that wait stops the ranks, for all drivers. Cancelling an asyncio task that
    awaits a `Call` ends the task only: the ranks' call continues.
    """

    def __init__(self, running: RunningGroup, *, is_attached: bool = False) -> None:
        """Create a group from loaded ranks. Users call `from_checkpoint`.

        Args:
            running: Loaded ranks.
            is_attached: True if the end of a `with` block leaves the group to its other drivers.
        """
        self._is_attached = is_attached
        self._run_lock = RunLock()
        self._view: LiveView | None = None
        self._restarting = threading.Lock()
        self._warned: set[str] = set()
        self._parts = running
        # A call(fn), or another driver, may set an optimizer: only the ranks know.
        self._may_have_optimizer = is_attached or running.spec.optimizer is not None
        # For a group that is dropped without shutdown(). Does not wait, since the collector may run in any thread.
        weakref.finalize(self, running.client.dropped_soon).atexit = False

    # Section: making a group

    @classmethod
    @blocking
    @with_hints
    def from_checkpoint(
        cls,
        checkpoint: str | os.PathLike[str],
        *,
        revision: str | None = None,
        model: str | Callable[[], nn.Module] | None = None,
        peft_config: Any = None,
        base: str | os.PathLike[str] | None = None,
        world_size: int | None = None,
        device: str | None = None,
        sharding: Sharding | None = None,
        loading: Loading | None = None,
        placement: Placement | None = None,
        timeouts: Timeouts | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        preflight: bool = True,
        max_output_bytes: int = 2 * GIB,
        name: str | None = None,
        replace: bool = False,
        max_restarts: int = 0,
        progress: ProgressOption = None,
        random_weights: bool = False,
        config_overrides: Mapping[str, Any] | None = None,
    ) -> Self:
        """Place a group on the cluster, load a checkpoint into it, and return it READY.

        Calls `ray.init()` if Ray is not initialized. Headers and index of the checkpoint are validated before anything
        is placed, and after a failure nothing stays on the cluster. docs/pages/loading.md (Arguments) says more.

        Args:
            checkpoint: A Hugging Face directory, a directory of LoRA adapters, a `.safetensors` file, an index json, or
                a URI of one that `pyarrow.fs` supports; or a model of the Hugging Face hub, `org/name`.
            revision: Branch, tag or commit of a hub id. Default `main`.
            model: `None`: the class that config.json names; the name of a transformers auto class; or a callable that
                returns a module, called on every rank with parameters on meta and real buffers.
            peft_config: A `peft.LoraConfig`: train adapters alone, on frozen base weights. Default: no adapters, or
                those of `checkpoint`.
            base: Base model of a directory of adapters. Default: the hub id that its files name.
            world_size: Number of ranks. Default: one per GPU, or as `Placement.gpus_per_rank` allows; on CPUs two if a
                node has two CPUs, else one, which a line on stderr tells.
            device: `cuda`, `cpu`, or another type for which torch has collectives. Default: `cuda` if the cluster has
                GPUs, else `cpu`.
            sharding: Options of the sharding. Default `Sharding()`.
            loading: Options of the load. Default `Loading()`.
            placement: Options of the ranks' placement. Default `Placement()`.
            timeouts: Deadlines. Default `Timeouts()`.
            optimizer: Factory of the optimizer, called with the parameters, or a `ParamGroups`.
            preflight: True to check versions, interfaces, collectives and free memory before bytes move. Default True.
            max_output_bytes: Cap on the bytes that one rank sends back for one call. Default 2 GiB.
            name: Name under which the group outlives this driver, until `shutdown()` or the end of its lease
                (`Timeouts.lease_s`), and `attach` finds it. Default: the group ends with the driver.
            replace: True to shut down the group that has the name, once the checkpoint is found valid. Default False.
            max_restarts: Number of times that `fit` may restart a broken group and continue from its last save.
            progress: `None`: a bar in a terminal or notebook; `True` or `False`; or a callable that is called with the
                bytes done and the bytes in total.
            random_weights: For a dry run: read config.json only; weights are drawn as transformers does, by
                `Loading.seed` and name, equal ones at every world size.
            config_overrides: Field of config.json → other value, such as `{"num_labels": 3}`; parts by mappings.

        Raises:
            ValueError: An argument is invalid, or the name is taken.
            CheckpointError: The checkpoint cannot be found or trusted.
            PlacementError: The cluster lacks resources (the error lists need against have), or is gone.
            PreflightError: The group cannot work with the nodes or links; the error lists all findings.
            RendezvousError: The ranks did not form a process group.
            PlanError: Model and checkpoint do not fit together; the error lists every mismatch.
            GroupError: A rank died, hung or raised.
            KeyboardInterrupt: Ctrl-C, after everything is undone.
        """
        options = given(locals())
        return cls(launch(options))

    @classmethod
    @blocking
    @with_hints
    def attach(cls, name: str, *, timeouts: Timeouts | None = None) -> Self:
        """Join the drivers of a named group that is loaded, for example after a restart of a notebook kernel.

        Joins the cluster that the environment names if Ray is not initialized, and never starts one; call
        `ray.init(address=...)` first to choose another cluster. The group stays that of its other drivers, too: the
        calls of each run in its own order, between those of the others. A call of a dead driver that ranks run goes on
        to its end; its later ones are dropped. While one driver's `fit`, `predict` or open accumulation
        (`forward_backward` without `optim_step`) lasts, calls of the others that change the model are refused with its
        name. The end of a `with` block leaves the group; `shutdown()` ends it for all.

        Args:
            name: The name that `from_checkpoint(name=...)` was given.
            timeouts: Deadlines of this driver; `drain_s` and `lease_s` stay those of the group. Default: all as the
                group was made.

        Returns:
            The group, with its current weights, optimizer and `load_report`. One that is BROKEN can be restarted.

        Raises:
            ValueError: There is no group of that name (the error lists the groups), or it is still being made.
            GroupError: The group's controller does not answer (`CallTimeoutError`), or has ended.
            PlacementError: There is no cluster, or it is gone; the error says where it was looked for.
        """
        return cls(attach(name, timeouts), is_attached=True)

    @staticmethod
    @with_hints
    def plan(
        checkpoint: str | os.PathLike[str],
        *,
        revision: str | None = None,
        model: str | Callable[[], nn.Module] | None = None,
        peft_config: Any = None,
        base: str | os.PathLike[str] | None = None,
        world_size: int | None = None,
        device: str | None = None,
        sharding: Sharding | None = None,
        loading: Loading | None = None,
        placement: Placement | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        nodes: Sequence[NodeCapacity] | None = None,
        random_weights: bool = False,
        config_overrides: Mapping[str, Any] | None = None,
    ) -> GroupPlan:
        """Compute the memory that a group would need, and whether it fits; place nothing and start no actor.

        The module is built in this process, on meta, by the code that the ranks run: a callable `model` is called in
        this process, and so is `optimizer`, with parameters that have no memory.

        Args:
            checkpoint: As for `from_checkpoint`.
            revision: As for `from_checkpoint`.
            model: As for `from_checkpoint`.
            peft_config: As for `from_checkpoint`.
            base: As for `from_checkpoint`.
            world_size: As for `from_checkpoint`, but GPUs and CPUs are those that are free.
            device: As for `from_checkpoint`.
            sharding: As for `from_checkpoint`.
            loading: As for `from_checkpoint`.
            placement: As for `from_checkpoint`.
            optimizer: Factory of the optimizer; if given, gradients and optimizer state are counted.
            nodes: Nodes that the group must fit on. Default: the nodes of the cluster that this program is connected to
                or would join, each queried for its free memory by a task that needs no CPU; without a cluster, this
                machine. No cluster is started.
            random_weights: As for `from_checkpoint`: the plan needs config.json only.
            config_overrides: As for `from_checkpoint`.

        Returns:
            The plan; it prints as a table. Activations are not included.

        Raises:
            ValueError: An argument is invalid.
            CheckpointError: The checkpoint cannot be found or trusted.
            PlanError: Model and checkpoint do not fit together, or the optimizer's factory raised.
            PlacementError: The cluster that the environment names does not answer.
        """
        options = given(locals())
        return plan_group(options)

    # Section: calls on batches

    @handle
    def forward(
        self,
        /,
        *args: Any,
        fn: OutputFunction | None = None,
        mode: Mode = None,
        out: Out | None = None,
        summon_full_params: bool | None = None,
        **kwargs: Any,
    ) -> Call[Any]:
        """Run the model on a batch, without gradients and in eval mode.

        Args:
            *args: The model's arguments: `Split` distributes rows, `PerRank` passes one value to each rank, and any
                other value is passed to all ranks. A sole `Split` of a mapping, such as a tokenizer's batch, is
                distributed as keyword arguments: `forward(Split(batch))`. The ranks fetch the value of an `ObjectRef`,
                and the model gets numpy arrays as tensors.
            fn: `fn(outputs, batch)`, which runs on each rank: what it returns is the output of the call, and the rest
                stays there. `outputs` is the model's output, on its device; `batch` its arguments, a mapping or a
                tuple. Tensors with this rank's rows in the first dim are joined in row order, as outputs are. It must
                not run the model or a collective, and may run twice; `current_worker().module` is the module. Default:
                the output itself.
            mode: `"train"` runs the modules in train mode. Default eval.
            out: Form of the result. Default: rows gathered in order if the call has a `Split`, else rank 0's output.
            summon_full_params: True for one of many forwards: gather all parameters, and keep them on the ranks until a
                call without it. Default: `Sharding.summon_full_params`.
            **kwargs: As `args`.

        Returns:
            The model's output on the CPU, of the model's output type. Caches are `None`; a loss is that of the whole
            batch.

        Raises:
            ValueError: Splits have different sizes or no rows; a tensor beside a `Split` looks like rows (`Same(x)`
                marks a tensor that is not); an id is one that the model does not have; values of `PerRank` would make
                ranks run different code; the model's forward has no argument of a name; or `mode` or `out` is invalid.
            GroupError: The model raised, or a rank could not fetch the value of an `ObjectRef`; the group is READY if
                all ranks raised.
            OutputTooLargeError: A rank's output is larger than `max_output_bytes`.
        """
        check_mode(mode, default="eval")
        check_summon_full_params(summon_full_params)
        check_function("fn", fn)
        check_out(out)
        batches = self._deal("forward", args, kwargs)
        collect = collect_outputs(out, batches[0].rows, batches[0].dim)
        extra = (mode, out, summon_full_params, fn)
        return self._client.submit_batches("forward", batches, *extra, collect=collect).keep_alive(self)

    @handle
    def generate(
        self,
        /,
        *args: Any,
        fn: OutputFunction | None = None,
        mode: Mode = None,
        out: Out | None = None,
        summon_full_params: bool | None = None,
        stream: bool = False,
        **kwargs: Any,
    ) -> Call[Any]:
        """Generate token ids by transformers' own `generate`, on every rank for its rows.

        All parameters are gathered once, if every rank has the memory, and freed at the end; else anew for each token.
        Greedy and beam search return the result of one process; sampling draws on each rank, from `seed`. Defaults are
        those of the checkpoint's generation_config.json, as with `from_pretrained`.

        Args:
            *args: As for `forward`: the prompt, usually `Split(tokenizer(texts, return_tensors="pt"))`.
            fn: As for `forward`; `outputs` is what transformers returns on the rank: ids, or with
                `return_dict_in_generate=True` its output class. There `output_scores=True` and
                `compute_transition_scores` of the module give the log-probabilities of the chosen tokens, and the
                scores, rows x tokens x vocabulary, do not travel.
            mode: As for `forward`.
            out: As for `forward`.
            summon_full_params: True to gather all parameters once in any case, False to gather by groups, for each
                token anew. Default: `Sharding.summon_full_params`.
            stream: True for tokens as they come: `call = group.generate.remote(..., stream=True)`, and `call.stream()`
                yields `(row, token id)`. Ends with `call.cancel()` or a loop that is left; a rank that raises alone
                breaks the group. Not for beam search.
            **kwargs: The arguments of transformers' `generate`: `max_new_tokens=`, `do_sample=`, `generation_config=`;
                and `seed=`, an int, for the same samples again (by the same number of ranks).
                `prefix_allowed_tokens_fn` receives the index of a row among its rank's rows, not in the batch.

        Returns:
            Ids, int64 [rows, length], with the prompts first unless the model is an encoder-decoder; rows that ended
            early are padded at the end. With `return_dict_in_generate=True` transformers' output class, with what was
            asked for (`output_scores=True`; not of beams, but in `fn`), without caches; the scores of a rank whose rows
            have all ended go on as if the pad token were certain: 0 for it, -inf for the others.

        Raises:
            ValueError: As for `forward`, or an argument that ranks in lockstep do not support: `streamer`,
                `assistant_model`, `synced_gpus`.
            GroupError: The model cannot generate, or raised.
        """
        check_mode(mode, default="eval")
        check_summon_full_params(summon_full_params)
        check_function("fn", fn)
        check_out(out)
        check_generation(kwargs)
        batches = self._deal("generate", args, kwargs)
        method, collect = "generate", collect_outputs(out, batches[0].rows, 0)
        if stream:
            method, collect = "generate_stream", streamed(collect)
        extra = (mode, out, summon_full_params, fn)
        return self._client.submit_batches(method, batches, *extra, collect=collect).keep_alive(self)

    @handle
    def call(self, fn: Callable[..., Any], /, *args: Any, out: Out | None = None, **kwargs: Any) -> Call[Any]:
        """Run `fn(*args, **kwargs)` on every rank inside the process group.

        On a rank, `raysharding.current_worker()` gives access to module, mesh and optimizer; the module's parameters
        are the shards (DTensors), whatever ran before. All ranks must call the same collectives.

        When `fn` ends, these are restored: default dtype and device, grad, inference and autocast mode, the working
        directory. Settings of the process stay: random generators, the number of threads, deterministic algorithms,
        matmul precision, `torch.backends`, the environment. `fn` cannot set signal handlers, since it does not run on
        the main thread.

        Args:
            fn: A function that pickles.
            *args: Arguments of `fn`, distributed as for `forward`, except that `fn` gets a mapping unchanged.
            out: `Out.rank0()`, `Out.per_rank()`, `Out.refs()` or `Out.none()`, as for `forward`.
            **kwargs: As `args`.

        Returns:
            A list of the ranks' return values, by rank; `None` for a rank that had no rows of a `Split`, only a dummy.

        Raises:
            TypeError: `fn` or an argument cannot be pickled.
            ValueError: As for `forward`, or `out=Out.gather()`.
            GroupError: `fn` raised, destroyed the ranks' process group, or returned a value that cannot be pickled. If
                `fn` raised on any rank, all ranks drop their gradients. The group stays READY unless other ranks wait
                for a rank that raised, or have changed weights or begun collectives that this rank has not.
            OutputTooLargeError: A rank's value is larger than `max_output_bytes`.
        """
        check_out(out)
        batches = deal(args, kwargs, self.world_size, positions=positions_of(fn))
        check_no_examples("call", batches[0], "call it in the function")
        collect = collect_returns(out, batches[0].rows)
        call = self._client.submit_batches("call", batches, fn, out, collect=collect)
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
    ) -> Call[dict[str, float]]:
        """Take one optimizer step on a batch: the step that one process would take on the same rows.

        Args:
            *args: The model's arguments, as for `forward`.
            loss: `loss(output, *args, **kwargs)` → a scalar, `(sum, count)`, a list of such pairs for several terms
                with counts of their own, or `(sum, None)` for a sum. Sums are over the rows that the function is given,
                those of one rank: pairs are added up over all ranks and parts. A scalar must be a linear combination of
                means that torch states: its loss functions with `reduction="mean"`, and `mean()` over all elements of
                what keeps rows apart. Anything else is an `UnreadableLossError`, which names the operation and the way
                out. Default: the output's own `.loss`, which is read in the same way.
            max_grad_norm: Clip gradients to this global norm. Default: no clipping.
            mode: `"eval"` trains with the modules in eval mode: no dropout, BatchNorm with its stored statistics.
                Default train.
            gradient_accumulation_steps: Number of parts in which each rank processes its rows, one after the other, to
                save memory; the update is that of all rows at once, and gradients are reduced once. Between the parts
                each rank holds full, unsharded gradients. If the loss has several terms with counts of their own, the
                forwards of all parts but the first run twice. Default 1.
            **kwargs: As `args`.

        Returns:
            `{"loss": float, "grad_norm": float}`; `grad_norm` is the norm before clipping.

        Raises:
            EmptyBatchError: Nothing in the batch counts, so no update was taken; `fit` skips such a batch. The group is
                READY.
            UnreadableLossError: It is not known how `loss` averages over the rows. The group is READY.
            GroupError: The model or the loss raised.
            ValueError: No optimizer is set, the batch is not valid or lacks labels for the model's own loss, or `mode`
                or a number is invalid. After a `call`, whose function may have set the optimizer, only the ranks know
                whether there is one: a missing optimizer then raises a `GroupError`.
        """
        self._require_optimizer("train_step")
        check_mode(mode, default="train")
        check_max_grad_norm(max_grad_norm)
        batches = self._deal("train_step", args, kwargs, needs_loss=loss is None)
        check_num_parts(gradient_accumulation_steps, batches[0].num_rows)
        extra = (loss, max_grad_norm, mode, gradient_accumulation_steps)
        options = self._unless_fit("train_step")
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
    ) -> Call[dict[str, float]]:
        """Add a batch's gradients to those since the last update.

        `optim_step` then takes the update of one process on the rows of all these batches at once; each batch has the
        weight of what counts in it. The first call after an update drops the gradients from before the update.

        Args:
            *args: The model's arguments, as for `forward`.
            loss: As for `train_step`.
            mode: As for `train_step`.
            sync: True to reduce the gradients over the ranks, including the gradients of earlier calls. The last call
                before `optim_step` must do so; `False` in the other calls saves traffic, and each rank then holds full,
                unsharded gradients. Default True.
            **kwargs: As `args`.

        Returns:
            `{"loss": float}` of this batch; NaN if nothing in the batch counts, in which case the batch adds nothing.

        Raises:
            ValueError: The batch is not valid, or `mode` is invalid.
            GroupError: The model or the loss raised: the gradients of all calls since the last update are dropped.
        """
        check_mode(mode, default="train")
        batches = self._deal("forward_backward", args, kwargs, needs_loss=loss is None)
        extra = (loss, mode, sync)
        options = self._unless_fit("forward_backward", uses_gradients=True)
        return self._client.submit_batches("forward_backward", batches, *extra, **options).keep_alive(self)

    @handle
    def optim_step(self, *, max_grad_norm: float | None = None) -> Call[dict[str, float]]:
        """Update the parameters with the gradients since the last update.

        Args:
            max_grad_norm: As for `train_step`.

        Returns:
            `{"loss": float, "grad_norm": float}`: the loss over the rows of all batches, and the norm before clipping.
            There is no `loss` if the gradients come from a `call(fn)` that ran its own backward.

        Raises:
            ValueError: No optimizer is set, as for `train_step`, or `max_grad_norm` is not positive.
            EmptyBatchError: Nothing counted in any batch. The group is READY.
            GroupError: There are no gradients, or the last `forward_backward` did not reduce them. The group is READY.
        """
        self._require_optimizer("optim_step")
        check_max_grad_norm(max_grad_norm)
        options = self._unless_fit("optim_step", uses_gradients=True)
        return self._client.submit_same("optim_step", max_grad_norm, **options).keep_alive(self)

    @handle
    def zero_grad(self) -> Call[None]:
        """Drop the gradients since the last update, which `forward_backward` has accumulated."""
        return self._client.submit_same("zero_grad", **self._unless_fit("zero_grad")).keep_alive(self)

    @handle
    def clip_grad_norm_(self, max_norm: float | None, norm_type: float = 2.0) -> Call[float]:
        """Scale all gradients so that their global norm is at most `max_norm`.

        Use it for gradients that a `call(fn)` left; `train_step(max_grad_norm=...)` clips its own gradients.

        Args:
            max_norm: Upper bound; `None` only measures the norm.
            norm_type: p of the p-norm, above 0; `inf` for the largest magnitude.

        Returns:
            The norm before clipping, equal to that of one process, as a float.

        Raises:
            ValueError: `norm_type` is not positive, or `max_norm` negative or NaN.
        """
        check_norm(max_norm, norm_type)
        # Not beside one's own `fit`, in whose callbacks it measures.
        beside = {"forward_backward": REFUSED_BESIDE["forward_backward"]}
        call = self._client.submit_same(
            "clip_grad_norm_", max_norm, norm_type, refused_beside=beside, uses_gradients=True
        )
        return call.keep_alive(self)

    @blocking
    def set_optimizer(self, factory: Callable[..., torch.optim.Optimizer], **kwargs: Any) -> None:
        """Make the optimizer on every rank, in place of an earlier one and without state; blocks.

        Warns if trained weights are in bf16 or fp16, in which small updates are lost; so do `from_checkpoint`, a
        `restart` with new ranks, and `fit`, each only if these ranks have not led to a warning before.

        Args:
            factory: An optimizer class, a callable that takes the parameters and returns an optimizer, a
                `ParamGroups`, for hyperparameters by the names of parameters, or a `Scheduled`.
            **kwargs: Passed to `factory` after the parameters.

        Raises:
            ValueError: `factory` is not a factory.
            TypeError: `factory` cannot be pickled.
        """
        check_optimizer(factory)
        options = self._unless_fit("set_optimizer")
        warning = self._client.submit_same("set_optimizer", factory, kwargs, False, **options).result()
        self._keep_optimizer(lambda _: bound(factory, kwargs))
        self._may_have_optimizer = True
        if warning is not None:  # last: a program may make warnings errors
            warn(warning)

    @blocking
    def set_scheduler(self, schedule: Schedule, **kwargs: Any) -> None:
        """Set a learning-rate schedule, which takes a step with every update of the optimizer; blocks.

        The schedule is saved, loaded, copied and made again together with the optimizer; `train_step` and `optim_step`
        then also return the `lr` of their update. `optimizer=Scheduled(...)` sets a schedule from the start.

        A schedule that replaces another continues at its step, and a line on stderr says so: after 10 steps,
        `set_scheduler(CosineAnnealingLR, T_max=20)` gives step 11 the rate that it has in a schedule over 20 steps.
        `set_optimizer(Scheduled(...))` begins one anew. A `ReduceLROnPlateau` begins with the current rate. Warns if
        the replaced schedule (`OneCycleLR`, `CyclicLR`, `ReduceLROnPlateau`) wrote over the optimizer's own rate or
        momentum, and the new one goes on from that.

        Args:
            schedule: A class of `torch.optim.lr_scheduler`, or a callable that takes the optimizer and returns one.
            **kwargs: Passed to `schedule` after the optimizer.

        Raises:
            ValueError: No optimizer is set, or `schedule` is not a schedule.
            TypeError: `schedule` cannot be pickled.
            GroupError: The schedule cannot be made; the group is READY, with its earlier schedule.
        """
        self._require_optimizer("set_scheduler")
        check_schedule(schedule)
        whole = partial(schedule, **kwargs) if kwargs else schedule
        made = self._client.submit_same("set_scheduler", whole, **self._unless_fit("set_scheduler"))
        continues, inherited = made.result()
        self._keep_optimizer(lambda before: None if before is None else rescheduled(before, whole))
        if continues:
            tell(f"set_scheduler: {continues}; set_optimizer(Scheduled(...)) begins at step 1")
        if inherited:
            warn(f"set_scheduler: {inherited}")

    # Section: runs and weights

    @driver_handle
    @blocking
    @with_hints
    def fit(
        self,
        data: Any,
        *,
        batch_size: int,
        rows_per_item: int = 1,
        epochs: int = 1,
        max_steps: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        columns: Sequence[str] | None = None,
        collate_fn: Collate | None = None,
        loss: Callable[..., Any] | None = None,
        eval_data: Any = None,
        eval_every: int | None = None,
        metrics: Mapping[str, Metric] | None = None,
        keep_best: str | None = None,
        stop: EarlyStop | None = None,
        max_grad_norm: float | None = None,
        gradient_accumulation_steps: int = 1,
        on_empty: Literal["skip", "raise"] = "skip",
        prefetch: int = 2,
        save_to: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
        keep_last: int | None = None,
        async_save: bool = False,
        resume: bool | Literal["latest"] = False,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
        save_on_signal: bool = False,
    ) -> FitReport:
        """Train over data: each rank reads its own rows, and the steps are those that one process would take.

        The rows of a step depend on data, batch size and seed, not on the number of ranks. Ctrl-C ends the run after
        the steps in progress, and leaves the group READY; a second one raises at once. A group that breaks is restarted
        up to `max_restarts` times, an option of the group, and continues from the last save. One `fit` runs on a group
        at a time; calls that change the model are refused during it, and others run between two steps.
        docs/pages/training.md (Runs) says what each option does.

        Args:
            data: Parquet, JSON Lines or CSV files, as path or URI, or a list of paths; a `ray.data.Dataset`; the name
                of a dataset for Hugging Face's `datasets`; rows, columns, or an iterable that pickles.
            batch_size: Rows of a step, over all ranks. The last step of an epoch has the remaining rows.
            rows_per_item: Number of consecutive rows that stay together, such as 2 for pairs. Default 1.
            epochs: Number of passes over the data, including those before a resume.
            max_steps: Number of steps after which the run ends, including those before a resume. Default: no limit.
            shuffle: True for a random order, in each epoch another; files are shuffled by row groups and windows.
            seed: Seed of the random order.
            columns: Columns of files or Ray datasets to read. Default: all.
            collate_fn: Makes the model's arguments of a list of rows. Default: rows are stacked column by column.
            loss: As for `train_step`.
            eval_data: Data to evaluate between the steps, read as `data`. Default: no evaluation.
            eval_every: Number of steps between two evaluations. Default: the end of each epoch.
            metrics: Metrics of `eval_data`, as for `evaluate`.
            keep_best: `"loss"` or a name in `metrics`: save at the best evaluation so far, and keep that save.
            stop: Ends the run when a metric of `eval_data` no longer improves. Default: all steps are taken.
            max_grad_norm: As for `train_step`.
            gradient_accumulation_steps: As for `train_step`: number of parts in which a batch is processed.
            on_empty: A batch in which nothing counts is skipped, or (`"raise"`) ends the run. Default `"skip"`.
            prefetch: Number of batches that each rank reads ahead.
            save_to: Directory or URI of the saves `step-<number>`, of this run alone. Default: nothing is saved.
            save_every: Number of steps between two saves. Default: only the save at the end.
            keep_last: Number of saves to keep; older ones are removed if loss and gradient are finite. Default: all.
            async_save: Write saves in the background, as `save` does. Default False.
            resume: True to continue where the last run ended, in this group or in the save that it was made from;
                `"latest"`: after the newest save in `save_to`, or a new run if there is none. Default False.
            callbacks: Callables that receive a `FitStep` for every step; with an attribute `every`, at its multiples,
                before the next step is taken. Their method `close`, if any, is called at the end.
            progress: True for a bar, False for nothing. Default: a bar in a terminal or notebook, else lines.
            save_on_signal: At SIGTERM save to `save_to`, and raise `SystemExit(0)`; at Ctrl-C save too. Default False.

        Returns:
            The report of the run: losses, rates, restarts, the last save.

        Raises:
            ValueError: An argument is invalid, there is no optimizer, or there is nothing to resume for `resume=True`.
            SystemExit: With `save_on_signal`: SIGTERM ended the run, after a save.
            KeyboardInterrupt: Ctrl-C ended the run; its `__cause__` is the CheckpointError of a save that failed.
            TypeError: `data` is not data, or does not pickle.
            DataError: The data cannot be read, is empty, or is not that of the run that is resumed. The group is READY.
            CheckpointError: A save failed, or `save_to` holds another run, or a node cannot write to it.
            CallCancelledError: `interrupt` ended the run.
            GroupError: Ranks failed more often than `max_restarts` allows, or another `fit` runs on the group.
        """
        options = given(locals())
        self._require_optimizer("fit")
        return run_fit(self._running, self._run_lock, options, save=self.save, restart=self._restart, load=self._load)

    @property
    def last_fit(self) -> FitReport | None:
        """Report of the last `fit` that has ended, also of one that was interrupted or failed; `None` before any.

        A `fit` that ends before the ranks have opened the data leaves the report of the one before.
        """
        return self._run_lock.last_report

    @handle
    @with_hints
    def evaluate(
        self,
        data: Any,
        *,
        batch_size: int,
        rows_per_item: int = 1,
        metrics: Mapping[str, Metric] | None = None,
        loss: Callable[..., Any] | None = None,
        with_loss: bool = True,
        max_steps: int | None = None,
        columns: Sequence[str] | None = None,
        collate_fn: Collate | None = None,
        prefetch: int = 2,
        summon_full_params: bool | None = None,
    ) -> Call[dict[str, float]]:
        """Compute loss and metrics over data in eval mode, without gradients: those of one process on the same rows.

        Args:
            data: As for `fit`.
            batch_size: Rows of a forward, over all ranks.
            rows_per_item: As for `fit`.
            metrics: Name → `metric(output, ...)`, which receives the arguments of the batch that its signature names,
                and returns (sum, count) over its rows: the value is the sum of all sums divided by the sum of all
                counts. Metrics run on the ranks. What is no such sum (F1, AUC) is a pair `(values, compute)`:
                `values(output, ...)` returns a tensor or a tuple of tensors with rows in the first dim, which stay on
                the ranks' CPUs until the end, and then go to all; `compute(*values)`, a function or a torchmetrics
                `Metric`, gets those of all rows in the data's order, on rank 0.
            loss: As for `train_step`.
            with_loss: True to compute the loss; without it rows need no labels. Default True.
            max_steps: Number of batches after which to end. Default: all.
            columns: As for `fit`.
            collate_fn: As for `fit`.
            prefetch: As for `fit`.
            summon_full_params: As for `generate`, over all batches.

        Returns:
            `{"loss": float, <metric>: float, ..., "num_rows": float}`; NaN if nothing counted in any batch. A batch in
            which nothing counts adds nothing to the loss.

        Raises:
            ValueError: An argument is invalid.
            TypeError: `data` is not data, or does not pickle.
            DataError: The data cannot be read, has no rows, or ends in an incomplete item; or a metric raised. The
                group is READY.
            GroupError: The model raised, or ranks failed.
        """
        check_summon_full_params(summon_full_params)
        options = given(locals())
        return submit_evaluate(self._running, options).keep_alive(self)

    @driver_handle
    @blocking
    @with_hints
    def predict(
        self,
        data: Any,
        *,
        batch_size: int,
        fn: Columns | None = None,
        output: str | os.PathLike[str] | None = None,
        keys: Sequence[str] = (),
        columns: Sequence[str] | None = None,
        collate_fn: Collate | None = None,
        generate_kwargs: Mapping[str, Any] | None = None,
        sort_by: Literal["length"] | None = None,
        rows_per_file: int | None = None,
        resume: bool = False,
        prefetch: int = 2,
        progress: bool | None = None,
        summon_full_params: bool | None = None,
    ) -> Any:
        """Compute columns for every row of data, in eval mode, without gradients: those of one process, in order.

        Each rank reads, computes and writes parts of adjacent rows. Ctrl-C ends the run after the forwards in progress
        (a second of them), with the group READY. A group that breaks is restarted up to `max_restarts` times (see
        `from_checkpoint`), and computes the parts that are not complete. Calls beside a `predict` are those that may
        run beside a `fit`.

        Args:
            data: As for `fit`, but not an iterable.
            batch_size: Rows of a forward, over all ranks; each rank takes its share, rounded up, of rows of its own.
            fn: `fn(outputs, batch)` → columns, by name, with one value per row: tensors or arrays whose first dim is
                the row (rows of more dims become lists, bfloat16 becomes float32), pyarrow arrays, or lists. With
                `output`, a column has the type that it has in the first batches of the ranks, so it must have one: not
                `None` or empty lists alone. Without, a type holds the values of all batches: of integers and floats
                it is that of floats. `fn` runs on the ranks, once for each batch of a rank: `outputs` is the model's
                output on its device, or the ids of `generate` on the CPU; `batch` is what the model got, a mapping or a
                tuple. It must not run the model or a collective. Default: `logits`, those of the last position that is
                not padding if there is one per position; with `generate_kwargs`, `generated`: the new ids of a row up
                to its first end token.
            output: Directory, on a file system that all ranks' nodes share, or URI that `pyarrow.fs` supports, of the
                result: Parquet files of adjacent rows, which in the order of their names hold the rows in the order of
                the data. A file appears when it is complete. Default: the result is returned.
            keys: Columns of the data that the result has as well, with the types of the data. Default: none.
            columns: As for `fit`; `keys` are read, too.
            collate_fn: As for `fit`; runs on a thread beside the model, and must not use torch's random generators.
                Padding must be masked (`attention_mask`), since rows are padded to other lengths than in one process.
            generate_kwargs: Arguments of transformers' `generate`, which then runs in place of a forward; see
                `generate`. Samples differ from run to run. Default: a forward.
            sort_by: `"length"`: bring rows of like length together, in windows of 64 batches, so that fewer positions
                are padding; a row's length is that of its `input_ids`, or of its longest text or list. The result is
                in the order of the data. A rank then holds the rows of a window, and their results. Default: no.
            rows_per_file: Largest number of rows of a part, which has one file; an interrupted run computes a part
                anew that was not complete. Default: 64 batches, or a thousandth of the rows if that is more.
            resume: True to continue the run in `output` that was killed or interrupted, with any number of ranks and
                any `batch_size`: complete files stay, and the rows of the others are computed. Without a run there, a
                new one begins. It must be a run with the same weights on the same rows, with the same `fn`,
                `collate_fn`, `keys` and `generate_kwargs`, as far as that can be told
                (docs/pages/embed-a-dataset.md). Default False: `output` must be empty, or not exist.
            prefetch: Number of batches that each rank reads ahead.
            progress: True to show a bar with rows per second, False for nothing. Default: as for `fit`.
            summon_full_params: As for `generate`, over all batches.

        Returns:
            With `output` a `PredictReport`. Without it a `pyarrow.Table`; or, if the result is larger than
            the group's `max_output_bytes`, a `ray.data.Dataset` over the tables in the object store, which
            end with the group.

        Raises:
            ValueError: An argument is invalid; or, with `max_restarts`, the group was trained, or got weights by
                `copy_to`, since it was loaded or saved, so that a restart would continue with other weights.
            TypeError: `data` is not data, or it or `fn` does not pickle.
            DataError: The data cannot be read or has no rows; `fn` raised, or returned no columns; `output` cannot be
                written, or holds something else. The group is READY.
            OutputTooLargeError: Without `output`: the result of a part is larger than `max_output_bytes`.
            CallCancelledError: `interrupt` ended the run.
            GroupError: The model raised, or ranks failed more often than `max_restarts` allows; or a `fit` or another
                `predict` runs on the group.
        """
        check_summon_full_params(summon_full_params)
        options = given(locals())
        return run_predict(self._running, self._run_lock, options, self._restart)

    @handle
    @with_hints
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        optimizer: bool = True,
        keep_last: int | None = None,
        dtype: str | torch.dtype | None = None,
        async_save: bool = False,
    ) -> Call[SaveReport | None]:
        """Save the model as a standard Hugging Face directory; each rank writes its own part.

        Args:
            path: Directory to create, on a file system that all ranks' nodes share; or a URI that `pyarrow.fs` supports
                (`s3://`, `gs://`, ...), to which each rank writes with the credentials of its environment. Only one
                save may write to a URI at a time.
            overwrite: Replace an existing save. The existing save stays complete until the new one is; in an object
                store, which has no rename, it is removed first. A directory that also holds what no save wrote (a
                model card, `checkpoint-500/`) is refused.
            optimizer: Also save the optimizer's state, if an optimizer is set, in the folder `optimizer`, for `load`
                and for `from_checkpoint(..., optimizer=...)` at any world size. Beside that folder the save then holds
                the random generators and, during a `fit`, the position in the data. Default True. While `fit` runs, a
                restart does not go back to a save without the optimizer's state.
            keep_last: Number of saves to keep, including this one, among the saves beside it whose names differ only in
                the last number (`step-100`); older ones are removed, except for files that no save wrote. Default: all.
            dtype: Export in this dtype, such as `"bfloat16"`: floating tensors are cast while they are written, except
                those that transformers keeps in float32, and config.json names it. Not with an optimizer's state, which
                would continue from rounded weights: also pass `optimizer=False`. A restart does not go back to such a
                save. Default: the stored dtypes.
            async_save: Return as soon as each rank has copied its shards to host memory, and write in the background:
                training may continue during the write. One save is written at a time; the next save waits for it. The
                next call of the group raises the save's failure, once, with failures of other saves as notes.
                `wait_for_save` and `shutdown` wait for the save. Default False.

        Returns:
            A `SaveReport`; `None` for a background save.

        Raises:
            ValueError: `keep_last` or `dtype` is invalid, or there is a `dtype` and an optimizer's state to save; or
                `path` is relative to a copy of a directory that Ray removes (a job's `--working-dir`, a Tune trial).
            CheckpointError: The directory exists, is a mount point, holds files that no save wrote (the error
                lists them), or cannot be written.
        """
        # After a restart from a save of weights alone, a run would continue with these weights from another step.
        is_origin = dtype is None and (optimizer or not self._run_lock.is_running)
        cast = None if dtype is None else floating_dtype(dtype)
        to = Destination(output_path("path", path), overwrite, keep_last, dtype=cast)
        what = to, optimizer, async_save, is_origin
        return submit_save(self._running, *what).keep_alive(self)

    @handle
    @with_hints
    def load(self, path: str | os.PathLike[str], *, revision: str | None = None) -> Call[LoadReport]:
        """Load another checkpoint of the same model into the group, in place.

        A hub id is looked up on the caller's thread, with a deadline, before the call is queued: in an event loop, use
        `asyncio.to_thread` or give a path.

        Args:
            path: A directory, file, index json, URI or hub id, as for `from_checkpoint`; rank 0's node must be able to
                read it. If it is a save of this library with an optimizer's state, and an optimizer is set, that state
                is loaded as well.
            revision: Branch, tag or commit of a hub id. Default `main`.

        Returns:
            The `LoadReport` of the weights.

        Raises:
            ValueError: A revision for what is no hub id.
            CheckpointError: The checkpoint cannot be found or trusted.
            PlanError: The checkpoint does not fit: the group is READY, with its earlier weights and optimizer.
            GroupError: A rank died, hung or raised after bytes had moved: the earlier state is overwritten in part.
        """
        return self._load(path, revision, **self._unless_fit("load"))

    @handle
    @with_hints
    def copy_to(self, other: Self, *, merge: bool = False, staged: bool = False) -> Call[CopyReport]:
        """Copy this group's weights into another running group of the same model, from shard to shard.

        The groups may differ in world size, sharding, dtype and device. The tensors are those that a `save` of this
        group and a `load` in the other would move, and the values are bit for bit theirs. The copy waits for the calls
        before it in both groups, and calls after it see the new weights. Optimizers stay as they are; gradients of the
        other group are dropped.

        The first copy connects the ranks of both groups and makes the plan, which later ones between the same groups
        find again. Ranks of one host meet in shared memory, others in messages, and no rank holds a full model. Wire:
        the other group's parameters, once for each of its replicas, in the narrower of the two dtypes. Memory: at most
        two buckets of 16 MiB on each rank, which stay for the next copy between the two groups, and go with the first
        copy after one of them is gone.

        Args:
            other: The group that gets the weights. This driver must have both.
            merge: True to merge this group's LoRA adapters into the weights on the way, as peft's `merge_and_unload`
                does; this group keeps them. Takes the adapters, whole, and one weight's delta on each of its ranks.
                Default False: between two groups with adapters of one shape, the adapters alone are copied.
            staged: True to receive beside the old weights, which takes one more shard of memory on each rank of
                `other`: if the copy fails, `other` keeps its old weights and stays READY, unless a rank of its own
                died. Default False: weights are overwritten as they arrive.

        Returns:
            A `CopyReport`: bytes, seconds, and memory.

        Raises:
            ValueError: `other` is this group, or no group.
            PlanError: The groups hold different models, or one has adapters and the other none; both stay READY.
            RendezvousError: Nodes of the two groups cannot connect to each other; both stay READY.
            GroupError: A rank of either group died or hung, and its own group is BROKEN; or a rank raised. Otherwise
                this group stays READY, and `other` is BROKEN where some of its shards had the new weights ("mixed
                weights"), and `other.restart()` brings its last files; else it stays READY. The error's last lines say
                the state of both. Or `fit` runs on `other`.
        """
        if type(other) is not type(self) or other is self:
            raise ValueError(f"copy_to({type(other).__name__}): give another ShardedModelGroup, not this one")
        options = {"merge": merge, "staged": staged} | other._unless_fit("copy_to")
        return submit_copy(self._client, other._client, **options).keep_alive((self, other))

    @handle
    def state_dict(self, keys: str | Sequence[str] | None = None) -> Call[dict[str, torch.Tensor]]:
        """Gather full tensors to the driver, a bucket at a time.

        Args:
            keys: FQNs to gather, or one FQN. Default: all.

        Returns:
            FQN → full CPU tensor, including tied names. The driver holds all full tensors; no rank does.

        Raises:
            GroupError: The model has no tensor of that name; the group stays READY.
        """
        wanted = None if keys is None else [keys] if isinstance(keys, str) else list(keys)
        tensors: dict[str, torch.Tensor] = {}

        def keep(bucket: dict[str, torch.Tensor] | None) -> None:
            tensors.update(bucket or {})

        def join(call: Call) -> dict[str, torch.Tensor]:
            call.wait_taken()
            return tensors

        return self._client.submit_same("state_dict", wanted, collect=Collect(join, keep=keep)).keep_alive(self)

    @driver_handle
    @blocking
    def wait_for_save(self, stall_s: float | None = None) -> None:
        """Wait until the saves that `save(async_save=True)` began are committed; return at once without such saves.

        Args:
            stall_s: Longest time without a byte written. Default: `Timeouts.load_stall_s`.

        Raises:
            CheckpointError: A save failed: the files that were at its path before are untouched.
            GroupError: A save was lost with its ranks.
            TimeoutError: Nothing was written for `stall_s`; the saves continue.
        """
        self._client.pending.wait(self._client.timeouts.load_stall_s if stall_s is None else stall_s)

    @property
    def saves(self) -> tuple[str, ...]:
        """Paths of the committed saves, including background saves, in the order in which they were committed."""
        return self._client.connection.snapshot.saves

    # Section: administration

    @property
    def name(self) -> str:
        """The group's name in errors."""
        return self._client.name

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Where each rank runs."""
        return self._client.ranks

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        # This driver knows no ranks if their controller died before it attached.
        return len(self.ranks) or self._running.spec.world_size or 0

    @property
    def state(self) -> GroupState:
        """The current state of the group."""
        return self._client.state

    @property
    def config(self) -> Any:
        """A copy of the model's transformers config, as `model.config`; `None` for a model that has none."""
        return self._running.loaded.facts.config

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters of the unsharded model, frozen ones and adapters too; tied ones count once."""
        return self._running.loaded.facts.num_parameters

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the model's first floating parameter, as `model.dtype` of transformers; `None` without one."""
        return self._running.loaded.facts.dtype

    @property
    def device(self) -> torch.device:
        """Device type of the ranks, such as `torch.device("cuda")`; `ranks` has the index of each."""
        return torch.device(self._running.loaded.device_type)

    @property
    def load_report(self) -> LoadReport:
        """Report of the load that made the group; `load` returns a report of its own."""
        return self._running.loaded.load_report

    @property
    def start_report(self) -> StartReport:
        """Report of the start that made the group, or of its last restart: seconds of each phase, here and on ranks."""
        return self._running.loaded.start_report

    @property
    def preflight_report(self) -> PreflightReport | None:
        """Report of the checks of nodes and links before the load; `None` with `preflight=False`."""
        return self._running.loaded.preflight_report

    @driver_handle
    @blocking
    def status(self) -> StatusReport:
        """Probe every rank for its activity and its memory; ranks answer while they work.

        Returns:
            A dict: `name`, `state`, `cause` (what broke the group, or `None`), and `ranks`: one dict per rank with
            where the rank runs, `answers` (`False` if the rank did not answer within 2 s), and the items of
            `Worker.status`.
        """
        cause, is_gone = self._client.cause, self.state in (GroupState.BROKEN, GroupState.CLOSED)
        return StatusReport(
            name=self.name,
            state=self.state.value,
            cause=None if cause is None else str(cause),
            ranks=[] if is_gone else rank_statuses(self._client),
        )

    def watch(self, refresh_s: float = 1.0) -> LiveView:
        """Show a live view of the group: its state, the last step of `fit`, and phase, last call and memory per rank.

        In a notebook, the output of the cell is updated while other cells run. On a terminal, the lines on stderr are
        drawn again; in a log, there is a line when the state changes or a `fit` reports steps. The ranks are probed
        as by `status` once per `refresh_s` while the view lasts, and not otherwise. A group has one view: another
        `watch` ends the earlier one.

        Args:
            refresh_s: Seconds between two probes of the ranks.

        Returns:
            The view. It ends by `stop()` or its `with` block, and when the group is shut down or dropped: it holds no
            reference to the group.

        Raises:
            ValueError: `refresh_s` is not a positive number.
        """
        if self._view is not None:
            self._view.stop()
        lock = self._run_lock  # not the group, which the view must not keep alive
        self._view = LiveView(self._client, lambda: lock.last_step, refresh_s)
        return self._view

    @blocking
    def memory_summary(self) -> str:
        """Return a table of the memory that each rank holds, in MiB."""
        self._client.connection.refuse_if_unusable()
        return memory_table(rank_statuses(self._client))

    @driver_handle
    @blocking
    def restart(self, checkpoint: str | os.PathLike[str] | None = None, world_size: int | None = None) -> RestartReport:
        """Restart a broken group with new ranks; this object, its handles and other drivers remain usable.

        New ranks are placed on the available nodes. They load the newest of: the last `save` of this group, of any of
        its drivers, that is complete in its files, whether or not a driver knows its outcome; the last checkpoint that
        was loaded; the checkpoint that the group was made from. "Last" is the order in which the ranks ran them. The
        ranks also load the optimizer's state if the save holds it. Files that killed saves of the group left behind are
        removed. Training since then is lost: `save(async_save=True)` to memory (`/dev/shm`) costs a copy, and can be
        frequent.

        Args:
            checkpoint: Checkpoint to load instead. The ranks of a READY group are stopped for it.
            world_size: Number of ranks from now on, likewise. Default: as before.

        Returns:
            The report: the reason for the restart, what was loaded, the number of ranks, and the duration.

        Raises:
            ValueError: The group is READY and neither argument is given: there is nothing to restart.
            GroupError: `fit` runs on the group and restarts it itself, up to `max_restarts` times.
            GroupBrokenError: The group is shut down, or another driver restarts it.
            PlacementError: The cluster no longer has the resources: try fewer ranks. The group stays BROKEN.
            CheckpointError: The checkpoint to load is gone or not valid. The group stays BROKEN.
            GroupError: As for `from_checkpoint`.
        """
        self._unless_fit("restart")
        return self._restart(checkpoint, world_size)

    @blocking
    def stacks(self) -> dict[int, str]:
        """Return the Python stacks of every rank's threads, while the ranks work; takes 2 s at most.

        Returns:
            Rank → stacks, the work thread's first. For a rank that does not answer, the text says so, and gives the
            state of its process according to the kernel and, if the process runs (a thread may hold the GIL), a stack
            dump.

        Raises:
            GroupBrokenError: The group is broken (its error holds the stacks) or shut down.
        """
        self._client.connection.refuse_if_unusable()
        stacks: dict[int, str] = self._client.connection.ask("stacks")
        return stacks

    @blocking
    def logs(self, rank: int, num_lines: int = 100) -> str:
        """Return the last lines that a rank printed, its stdout and stderr one after the other.

        The lines are read from Ray's log files on the rank's node: the rank may be busy, stopped or dead, and the group
        may be broken or shut down, as long as the node and this driver's Ray are alive.

        Args:
            rank: Global rank.
            num_lines: Number of lines of each of the two streams.

        Raises:
            ValueError: There is no such rank, or `num_lines` is not positive.
            GroupError: The rank's node is gone.
        """
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank!r}: give one of 0 to {self.world_size - 1}")
        check_int("num_lines", num_lines)
        return read_log(self._client, rank, num_lines)

    @blocking
    def interrupt(self, timeout_s: float | None = None) -> int:
        """Do what one Ctrl-C does, from any thread: cancel this driver's queued calls and wait for the running one.

        Args:
            timeout_s: Longest wait. Default: until the running call ends, which its own deadline bounds.

        Returns:
            The number of cancelled calls. Each of them raises `CallCancelledError`, and so does a `fit`, before its
            next steps; until then, calls that change the model are refused. The group is READY, unless the running call
            has failed.

        Raises:
            TimeoutError: `timeout_s` passed; the running call still runs, and the calls behind it are cancelled.
            GroupBrokenError: The group is broken or shut down. A `fit` that is restarting it ends nevertheless.
        """
        self._run_lock.interrupt()  # first: a `fit` may be about to restart a broken group
        self._client.connection.refuse_if_unusable()
        return self._client.interrupt(timeout_s)

    @driver_handle
    def shutdown(self) -> None:
        """Stop all ranks and release all resources, for all drivers of the group.

        May be called many times; makes a running call or restart fail.

        Results that are still in the object store end with the group: `Out.refs()`, and values over 48 KiB of calls
        whose result was not requested. A `Call.ref()` outlives it.

        `shutdown` waits for background saves of all drivers as long as they write, and raises the failure of one of
        this driver. In a callback of `Call.when_done`, `shutdown` only begins: it neither waits nor raises.
        """
        if is_callback_thread():
            self.shutdown.remote()
            return
        self._client.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_attached:  # the group is that of others, too
            self._client.detach()
        else:
            self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a group cannot be sent to ranks; use raysharding.current_worker() there")

    def __repr__(self) -> str:
        return f"<ShardedModelGroup {self._title()}>\n{ranks_table(self.ranks)}"

    def _repr_html_(self) -> str:
        return html_report(f"ShardedModelGroup {self._title()}", ranks_table(self.ranks).html())

    def _title(self) -> str:
        return f"{self._running.spec.checkpoint}, {self.world_size} ranks on {self.device}, {self.state.value}"

    def _unless_fit(self, method: str, **options: Any) -> dict[str, Any]:
        """Return the options of a call that changes the model, and refuse it while this driver's `fit` runs."""
        self._run_lock.refuse(self.name, method)
        return {"refused_beside": REFUSED_BESIDE, **options}

    def _keep_optimizer(self, change: Callable[[Callable[..., Any] | None], Callable[..., Any] | None]) -> None:
        """Change the optimizer's factory of the spec that a restart uses."""
        spec = self._running.stored_spec()
        self._client.connection.ask("update", packed_spec(replace(spec, optimizer=change(spec.optimizer))))

    # What the sections share

    @property
    def _running(self) -> RunningGroup:
        """The group's running parts; raises in a forked child, since every method of the group begins here."""
        refuse_in_fork(self._parts.client.name)
        return self._parts

    @property
    def _client(self) -> Client:
        return self._running.client

    def _require_optimizer(self, method: str) -> None:
        self._may_have_optimizer = self._may_have_optimizer or self._running.stored_spec().optimizer is not None
        if not self._may_have_optimizer:
            raise ValueError(f"{method} needs an optimizer: call group.set_optimizer(torch.optim.AdamW, lr=...) first")

    def _deal(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], needs_loss: bool = False
    ) -> list[RankBatch]:
        """Distribute a batch, and refuse a batch that some ranks could not compute while others wait for them."""
        bounds, warned = self._running.loaded.bounds, self._warned
        return model_batches(method, args, kwargs, bounds, self.world_size, needs_loss=needs_loss, warned=warned)

    def _restart(
        self, checkpoint: str | os.PathLike[str] | None = None, world_size: int | None = None
    ) -> RestartReport:
        # Restarts run one after the other: a second caller finds the group READY. Inner deadlines bound the wait.
        with self._restarting:
            path = None if checkpoint is None else os.fspath(checkpoint)
            return restart(self._running, checkpoint=path, world_size=world_size, lock=self._run_lock.held)

    def _load(
        self,
        path: str | os.PathLike[str],
        revision: str | None = None,
        *,
        refused_beside: Mapping[str, str] | None = None,
    ) -> Call:
        return submit_load(self._running, os.fspath(path), revision, refused_beside or {}).keep_alive(self)
