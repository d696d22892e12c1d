"""The Ray actor of one rank: one thread that works, a few that answer while it works.

The work thread runs `commands.RankCommands`; what it raises or returns crosses to the driver as typed data
(`Outcome`, `Packed`), because an exception that does not pickle, or a result larger than memory, must not end it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Protocol

import ray
from ray.util.placement_group import remove_placement_group

from raysharding.distributed.comm import Connection, connections, cut, waits_for_others
from raysharding.errors import OutputTooLargeError
from raysharding.group.actors.commands import RankCommands
from raysharding.group.actors.dataset_blocks import hold
from raysharding.group.actors.ownership import Fence, RankLease
from raysharding.group.actors.work_thread import WorkThread
from raysharding.group.cluster import Sighting, end_with_head, look, tell, testify
from raysharding.group.rpc import (
    RESULT_BYTES,
    AsValue,
    Order,
    Outcome,
    Packed,
    Progress,
    Raised,
    Request,
    SaveStatus,
    Stacks,
    Stage,
    connect_to_driver,
    numbered,
    pack,
    record_exception,
    split,
    taken_over,
    unseal,
)

# Control threads: one for `lifetime`, the others for questions, of which one may be stuck behind a slow answer. What
# is large for the work thread, or from it, goes through a thread of its own.
CONCURRENCY_GROUPS = {"freight": 1, "control": 5}

_GIVE_BACK_S = 2.0


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Where an actor runs, told by itself."""

    node_id: str
    """Ray's id of the node."""
    node_ip: str
    """Address of the node, as Ray knows it."""
    pid: int
    """Process id."""
    gpu_ids: tuple[str, ...]
    """GPUs that Ray assigned to it, as CUDA_VISIBLE_DEVICES names them."""
    sees_checkpoint: bool
    """Whether the checkpoint's path exists on its node."""
    stacks_descriptor: int
    """What `stack_dump.look` needs."""
    log_paths: tuple[str, ...] = ()
    """Files on its node that it prints into, stdout and stderr."""


class KeptRecord(Protocol):
    """What a driver leaves with the rank for one that attaches; no rank reads it."""

    @property
    def version(self) -> float:
        """The later one is larger."""


class RankActor:
    """One rank. Created by `launch.start_actors` with `max_restarts=0`: recovery is the whole group's."""

    def __init__(self, lease_s: float | None = None, owns_room: bool = False) -> None:
        """Start.

        Args:
            lease_s: The rank's first lease, within which its driver must have begun to renew it; `None`: it has none.
            owns_room: Whether to give the placement group back when the lease runs out.
        """
        # Ray 2.60's own handler waits for running tasks, and takes no others; but `lifetime` ends with the process.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._commands = RankCommands()
        self._fence = Fence()
        self._room = ray.util.get_current_placement_group() if owns_room else None
        self._lease = RankLease(self._end)
        self._lease.renew(lease_s)
        end_with_head()
        self._record: KeptRecord | None = None
        self._last_outcome: dict[int, Outcome] = {}
        self._results: dict[tuple[int, int], Packed | AsValue | None] = {}
        self._control_threads: set[int] = set()
        self._stacks_descriptor = testify()
        self._work = WorkThread(self._serve)

    @ray.method(concurrency_group="control")
    def probe(self, checkpoint_path: str | None) -> ActorInfo:
        """Say where this actor runs and whether a local path exists there."""
        context = ray.get_runtime_context()
        return ActorInfo(
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            gpu_ids=tuple(map(str, context.get_accelerator_ids().get("GPU", ()))),
            sees_checkpoint=checkpoint_path is None or os.path.exists(checkpoint_path),
            stacks_descriptor=self._stacks_descriptor,
            log_paths=_log_paths(),
        )

    @ray.method(concurrency_group="control")
    def lifetime(self, epoch: int) -> None:
        """Block as long as the process lives: the driver sees its death, also while idle, as this call's failure.

        Returns when another driver has taken the group over.
        """
        self._control_threads.add(threading.get_ident())
        self._fence.wait_closed(epoch)

    @ray.method(concurrency_group="control")
    def renew(self, epoch: int, number: int, lease_s: float | None) -> None:
        """Begin the rank's lease anew; see `supervision/lease_renewal.py`."""
        if self._fence.is_open(epoch):
            self._lease.renew(lease_s, (epoch, number))

    @ray.method(concurrency_group="control")
    def keep(self, epoch: int, record: KeptRecord) -> None:
        """Keep what a driver needs that attaches to the group."""
        is_newer = self._record is None or record.version > self._record.version
        if self._fence.is_open(epoch) and is_newer:
            self._record = record

    @ray.method(concurrency_group="control")
    def record(self) -> KeptRecord | None:
        """Return what was kept; `None` while the group is being made."""
        return self._record

    @ray.method(concurrency_group="control")
    def save_status(self, number: int) -> SaveStatus:
        """Say how a save in the background fares."""
        return self._commands.save_status(number)

    @ray.method(concurrency_group="control")
    def hold(self, key: str, refs: Sequence[ray.ObjectRef] | None) -> None:
        """Keep references to a dataset's blocks; see `dataset_blocks.hold`."""
        hold(key, refs)

    @ray.method(concurrency_group="control")
    def take_over(self) -> int:
        """Give out the epoch of another driver. One actor of the group is asked; `admit` tells it to all of them."""
        return self._fence.next()

    @ray.method(concurrency_group="control")
    def admit(self, epoch: int) -> None:
        """Obey the driver of this epoch, and refuse those before it."""
        self._fence.admit(epoch)

    @ray.method(concurrency_group="control")
    def checkpoint(self) -> bytes:
        """Return what the module was built for, the headers of the files: what a new rank builds its own from."""
        return self._commands.checkpoint()

    @ray.method(concurrency_group="control")
    def num_changes(self) -> int:
        """Return how often weights or optimizer have been changed since the module was built."""
        return self._commands.num_changes()

    @ray.method(concurrency_group="control")
    def last_outcome(self, epoch: int) -> Outcome:
        """Return how the last command of the drivers before this epoch ended."""
        before = [one for one in self._last_outcome if one < epoch]
        return (
            self._last_outcome[max(before)] if before else Outcome(self._commands.stamp(self._commands.num_changes()))
        )

    @ray.method(concurrency_group="control")
    def end(self) -> None:
        """End this process at once: for a driver that cannot have Ray do it."""
        os._exit(1)

    @ray.method(concurrency_group="control")
    def progress(self) -> Progress:
        """Say how far the load or save is, while it runs."""
        return Progress(*self._commands.progress())

    @ray.method(concurrency_group="control")
    def status(self) -> dict[str, Any]:
        """Say what the rank is doing and what memory it holds, while it works."""
        return self._commands.status()

    @ray.method(concurrency_group="control")
    def stacks(self) -> Stacks:
        """Format the stacks of all threads but those that only serve Ray and the driver, the work thread's first."""
        self._control_threads.add(threading.get_ident())
        frames = sys._current_frames()
        work = frames.pop(self._work.ident, None)
        parts = [] if work is None else ["work thread:\n" + "".join(traceback.format_stack(work))]
        for ident, frame in frames.items():
            if ident not in self._control_threads and not _is_rays_own(frame):
                parts.append(f"thread {ident}:\n" + "".join(traceback.format_stack(frame)))
        return Stacks("\n".join(parts), work is not None and waits_for_others(work))

    @ray.method(concurrency_group="control")
    def witness(self, pid: int, descriptor: int) -> Sighting | None:
        """Look at another rank of this node, which does not answer; `None` where it cannot be seen."""
        try:
            return look(pid, descriptor)
        except OSError:
            return None

    @ray.method(concurrency_group="control")
    def connections(self) -> list[Connection]:
        """List this process's TCP connections, of which `cut` takes some."""
        return connections()

    @ray.method(concurrency_group="control")
    def cut(self, chosen: list[Connection]) -> None:
        """End collectives that wait for ranks which will not come; see Note [Cutting] in `distributed.comm.abort`."""
        cut(chosen)

    @ray.method(concurrency_group="control")
    def connect(self, epoch: int, address: tuple[str, int], key: bytes, timeout_s: float) -> None:
        """Take orders from the driver that listens at an address; see `rpc/handshakes.py`."""
        connection = connect_to_driver(address, key, timeout_s)
        if self._fence.is_open(epoch):
            self._work.obey(epoch, connection)
        else:
            connection.close()

    @ray.method(concurrency_group="freight")
    def deliver(self, frame: bytes, *beside: Packed) -> None:
        """Run the order of a frame whose large parts Ray has fetched."""
        self._work.deliver(frame, beside)

    @ray.method(concurrency_group="freight", num_returns=2)
    def take(self, epoch: int, number: int) -> tuple[None, Packed | AsValue | None]:
        """Return a large result, behind an object that says that it is stored: the driver fetches it if it needs it."""
        return None, self._results.pop((epoch, number))

    def _serve(self, frame: bytes, beside: Sequence[Packed]) -> bytes:
        """Run the order of a frame; returns the frame of its outcome. On the work thread."""
        number, sealed = split(frame)
        try:
            order = unseal(sealed, beside)
        except Exception as error:  # noqa: BLE001 - of a driver with other code, say; without an answer it would wait
            return numbered(number, self._refusal(error).to_bytes())
        return numbered(number, self._obey(order, number).to_bytes())

    def _obey(self, order: Order, number: int) -> Outcome:
        if not self._fence.is_open(order.epoch):
            return self._refusal(taken_over("the group"))
        self._results.clear()  # the driver has taken what it wanted of those before
        outcome, result = self._run(order)
        self._last_outcome[order.epoch] = outcome
        if isinstance(result, Packed) and result.num_bytes <= RESULT_BYTES:
            return replace(outcome, value=result)
        if result is not None:
            self._results[order.epoch, number] = result
        return replace(outcome, is_beside=result is not None)

    def _refusal(self, error: BaseException) -> Outcome:
        stamp = self._commands.stamp(self._commands.num_changes())
        return Outcome(stamp, raised=self._describe(error, "run"))

    def _run(self, order: Order) -> tuple[Outcome, Packed | AsValue | None]:
        stage: Stage = "run"
        before = self._commands.num_changes()
        try:
            more, value = self._commands.run(order.request, order.own, order.shared)
            stage = "output"
            result = _pack_output(value, order.request)
        except BaseException as error:  # noqa: BLE001
            # The boundary: whatever user code raised, `sys.exit()` too, goes to the driver as data.
            return Outcome(self._commands.stamp(before), raised=self._describe(error, stage)), None
        return Outcome(self._commands.stamp(before), more=more), result

    def _end(self, lease_s: float) -> None:
        """End this process: nobody has renewed its lease. `sys.exit` ends a thread only."""
        tell(f"the driver has not renewed this rank's lease of {lease_s:g} s: the rank ends, pid {os.getpid()}")
        if self._room is not None:
            giving = threading.Thread(target=remove_placement_group, args=(self._room,), daemon=True)
            giving.start()
            giving.join(_GIVE_BACK_S)
        os._exit(1)

    def _describe(self, error: BaseException, stage: Stage) -> Raised:
        return record_exception(
            error,
            stage=stage,
            phase=self._commands.phase(),
            tensor=self._commands.tensor(),
            recovered=self._commands.is_usable(),
        )


def _log_paths() -> tuple[str, ...]:
    """Where Ray has this process print to."""
    paths = [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in (1, 2)]
    return tuple(path for path in paths if os.path.isfile(path))


def _is_rays_own(frame: FrameType) -> bool:
    """Whether a thread runs nothing but Ray's code."""
    own = (os.path.dirname(ray.__file__), threading.__file__)
    return all(each.f_code.co_filename.startswith(own) for each, _ in traceback.walk_stack(frame))


def _pack_output(value: Any, request: Request) -> Packed | AsValue | None:
    if value is None and request.output == "value":
        return None
    packed = pack(value, f"the result of {request.method}")
    cap = request.max_output_bytes
    if cap is not None and packed.num_bytes > cap:
        message = (
            f"the result of {request.method} is {packed.num_bytes} bytes on this rank, over "
            f"max_output_bytes={cap}; return less (out=Out.none() or Out.rank0()), pass fewer rows, keep it on the "
            "cluster (out=Out.refs()), or raise max_output_bytes"
        )
        raise OutputTooLargeError(message, num_bytes=packed.num_bytes, max_output_bytes=cap)
    return AsValue(packed) if request.output == "ref" else packed
