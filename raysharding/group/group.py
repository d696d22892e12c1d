"""`ShardedModelGroup`: a checkpoint as a resident FSDP2 model on a Ray cluster, and the calls one makes on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import nn

from raysharding.batch import Out, check_out, deal
from raysharding.config import Loading, Placement, Sharding, Timeouts
from raysharding.distributed.generating import check_generation
from raysharding.distributed.loss_call import positions_of
from raysharding.group.attach import attach
from raysharding.group.call import Call
from raysharding.group.commands import Mode
from raysharding.group.fitting import Fitting
from raysharding.group.group_plan import GroupPlan
from raysharding.group.handle import blocking, handle
from raysharding.group.interrupts import UndoneByInterrupt
from raysharding.group.launch import launch
from raysharding.group.model_files import ModelFiles
from raysharding.group.planning import plan_group
from raysharding.group.progress import ProgressOption
from raysharding.group.results import collect_generated, collect_outputs, collect_returns
from raysharding.group.rooms import NodeRoom
from raysharding.group.spec import GroupSpec
from raysharding.models import Adapted
from raysharding.worker import check_mode

GIB = 1 << 30


class ShardedModelGroup(Fitting):
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
        with UndoneByInterrupt():
            launched = launch(spec)
            return cls(replace(spec, model=launched.model), launched)

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
        attached = attach(name, timeouts)
        group = cls(attached.spec, attached.launched)
        group._files = ModelFiles(attached.origin, attached.begun)
        group._may_have_optimizer = attached.has_optimizer
        return group

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
        nodes: Sequence[NodeRoom] | None = None,
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
        call = self._channel.submit_batches("forward", batches, mode, out, collect=collect, as_refs=as_refs)
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
        call = self._channel.submit_batches("generate", batches, mode, out, collect=collect, as_refs=as_refs)
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
        call = self._channel.submit_batches("call", batches, fn, out, collect=collect, as_refs=as_refs)
        self._may_have_optimizer = True
        return call.keep_alive(self)
