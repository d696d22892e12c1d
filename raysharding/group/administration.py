"""`Administration`: what one asks and does of a group beside its calls: where it runs, how it fares, its end."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from raysharding.group import describe
from raysharding.group.answers import ask_all
from raysharding.group.channel import Channel
from raysharding.group.connect import refuse_in_fork
from raysharding.group.events import is_supervision_thread
from raysharding.group.fit_lock import FitLock
from raysharding.group.handle import blocking, driver_handle
from raysharding.group.inspection import read_log, read_stacks
from raysharding.group.keeping import update_record
from raysharding.group.launched import Launched
from raysharding.group.locate import anchored
from raysharding.group.model_files import ModelFiles
from raysharding.group.preflight import PreflightReport
from raysharding.group.ranks import RankInfo
from raysharding.group.restart import RestartReport, restart
from raysharding.group.spec import GroupSpec
from raysharding.group.state import GroupState
from raysharding.group.supervision import Supervisor
from raysharding.group.waiting import Check

if TYPE_CHECKING:
    from raysharding.distributed import LoadReport

_STATUS_S = 2.0


class Administration:
    """The ranks that a group stands for now, and everything about them that is no call of the model."""

    def __init__(self, spec: GroupSpec, launched: Launched) -> None:
        """Not for users: `from_checkpoint` makes groups.

        Args:
            spec: What the group was asked to be.
            launched: Loaded ranks.
        """
        self._spec = spec
        self._files = ModelFiles(anchored(spec.checkpoint))
        self._optimizer = spec.optimizer
        self._fits = FitLock()
        self._restarting = threading.Lock()
        self._taking = threading.Lock()
        self._is_shut = False
        self._finalizer: Any = None
        self._take(launched)

    def _take(self, launched: Launched) -> None:
        """Stand for these ranks from now on."""
        self._parts = launched
        # A call(fn) may have set one: after it, the ranks decide.
        self._may_have_optimizer = self._optimizer is not None
        if self._finalizer is not None:
            self._finalizer.detach()
        # For a group that is dropped without shutdown(). The collector may run in any thread: this does not wait.
        self._finalizer = weakref.finalize(self, self._supervisor.dropped_soon)
        self._finalizer.atexit = False

    @property
    def _launched(self) -> Launched:
        """The group's running parts, which all that it does begins with."""
        refuse_in_fork(self._parts.channel.supervisor.name)
        return self._parts

    @property
    def _channel(self) -> Channel:
        return self._launched.channel

    @property
    def _supervisor(self) -> Supervisor:
        return self._launched.channel.supervisor

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Where each rank runs."""
        return self._channel.ranks

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._channel.ranks)

    @property
    def state(self) -> GroupState:
        """The group's state now."""
        return self._supervisor.state

    @property
    def load_report(self) -> LoadReport:
        """Figures of the load that made the group; `load` returns its own."""
        return self._launched.load_report

    @property
    def preflight_report(self) -> PreflightReport | None:
        """What was seen of nodes and links before the load; `None` under `preflight=False`."""
        return self._launched.preflight_report

    @driver_handle
    @blocking
    def status(self) -> dict[str, Any]:
        """Ask every rank what it is doing and what memory it holds; ranks answer while they work.

        Returns:
            `state`, `cause` (what broke the group, or `None`), and `ranks`: one dict per rank with where it runs,
            `answers` (`False` where it said nothing within 2 s), and what `Worker.status` says.
        """
        cause = self._supervisor.standing.cause
        return {
            "name": self._supervisor.name,
            "state": self.state.value,
            "cause": None if cause is None else str(cause),
            "ranks": self._ask_status() if self.state not in (GroupState.BROKEN, GroupState.CLOSED) else [],
        }

    @blocking
    def memory_summary(self) -> str:
        """Return a table of the memory that each rank holds."""
        self._supervisor.standing.refuse_if_unusable()
        return describe.memory_table(self._ask_status())

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
            again = restart(
                self._spec,
                self._launched,
                files=self._files,
                checkpoint=None if checkpoint is None else os.fspath(checkpoint),
                world_size=world_size,
                optimizer=self._optimizer,
            )
            if again.launched is not self._launched:
                with self._taking:
                    if not self._is_shut:
                        self._take(again.launched)
                if self._is_shut:
                    again.launched.channel.supervisor.shutdown()
                    again.launched.channel.supervisor.standing.refuse_if_unusable()
        return again.report

    @blocking
    def stacks(self) -> dict[int, str]:
        """Ask every rank for the Python stacks of its threads, while it works; takes 2 s at most.

        Returns:
            Rank → stacks, the work thread's first. Of a rank that does not answer: that, what state the kernel says its
            process is in, and its stacks where it runs (a thread may hold the GIL).

        Raises:
            GroupBrokenError: The group is broken (its error holds the stacks) or shut down.
        """
        self._supervisor.standing.refuse_if_unusable()
        return read_stacks(self._channel.members)

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
        return read_log(self._channel.members[rank], num_lines)

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
        self._supervisor.standing.refuse_if_unusable()
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
                self._channel.pending.wait(self._channel.timeouts.load_stall_s)
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
        return f"<ShardedModelGroup {self._title()}>\n{describe.ranks_table(self.ranks)}"

    def _repr_html_(self) -> str:
        return describe.html_table(f"ShardedModelGroup {self._title()}", self.ranks)

    def _title(self) -> str:
        devices = self.ranks[0].device.partition(":")[0]
        return f"{self._spec.checkpoint}, {self.world_size} ranks on {devices}, {self.state.value}"

    def _unless_fit(self, method: str) -> Check:
        """Return a check that refuses `method` while `fit` runs."""
        return partial(self._fits.refuse, self.name, method)

    def _update_record(self) -> None:
        """Have a named group remember what a restart would need, for a driver that attaches."""
        if self._spec.name is not None:
            update_record(self._launched, replace(self._spec, optimizer=self._optimizer), self._files)

    def _ask_status(self) -> list[dict[str, Any]]:
        said = ask_all(self._channel.members, "status", within_s=_STATUS_S).said
        return [
            # One that is dead or stopped is the supervision's to report.
            {**said.get(one.rank, {}), "rank": one.rank, "node_ip": one.node_ip, "pid": one.pid}
            | {"answers": one.rank in said}
            for one in self.ranks
        ]

    @property
    def name(self) -> str:
        """What errors call the group."""
        return self._supervisor.name
