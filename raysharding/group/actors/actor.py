"""The Ray actor of one rank: a work thread for commands, and control threads that serve the driver meanwhile.

The work thread runs `commands.RankCommands`. Results and exceptions reach the driver as typed data (`Response`,
`Packed`), so that an exception that does not pickle, or a result that is too large, does not end the actor.
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

from raysharding.checkpoint.storage import HubAccess, HubPath, adopt_access, is_remote, split_path
from raysharding.distributed.comm import Connection, StoreAddress, connections, cut, waits_for_others
from raysharding.errors import OutputTooLargeError
from raysharding.group.actors.commands import RankCommands
from raysharding.group.actors.dataset_blocks import pin
from raysharding.group.actors.ownership import Ownership, RankLease
from raysharding.group.actors.title import Title
from raysharding.group.actors.work_thread import WorkThread
from raysharding.group.cluster import ProcessSnapshot, dump_stacks, enable_stack_dumps, exit_without_gcs, tell
from raysharding.group.rpc import (
    RESULT_BYTES,
    AsValue,
    Command,
    Packed,
    Progress,
    RemoteError,
    Response,
    SaveStatus,
    Stacks,
    Stage,
    StateChange,
    connect_to_driver,
    number_of,
    pack,
    record_exception,
    taken_over,
)

# Control threads: one for `lifetime`, the others for probes, of which a slow one may block its thread. Large
# arguments and results of commands have a thread of their own.
CONCURRENCY_GROUPS = {"data": 1, "control": 5}

_GIVE_BACK_S = 2.0


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Where an actor runs, as the actor reports it."""

    node_id: str
    """Ray's id of the node."""
    node_ip: str
    """Address of the node, as Ray knows it."""
    pid: int
    """Process id."""
    gpu_ids: tuple[str, ...]
    """GPUs that Ray assigned to it, as CUDA_VISIBLE_DEVICES names them."""
    sees_checkpoint: bool
    """True if the checkpoint is one that any node reads, or its files exist on the node."""
    stacks_descriptor: int
    """File descriptor that `stack_dump.dump_stacks` needs."""
    log_paths: tuple[str, ...] = ()
    """Files on the node that receive the actor's stdout and stderr."""
    snapshot: str | None = None
    """Directory of the checkpoint in the node's Hugging Face cache, if the checkpoint is a model of the hub."""


class KeptRecord(Protocol):
    """Record that a driver stores on the rank for drivers that attach later; ranks do not read it."""

    @property
    def version(self) -> float:
        """Version of the record; a later record has a greater version."""


class RankActor:
    """One rank. `launch.start_actors` creates it with `max_restarts=0`: the group recovers as a whole."""

    def __init__(
        self,
        title: Title,
        lease_s: float | None = None,
        owns_placement_group: bool = False,
        hub: HubAccess | None = None,
    ) -> None:
        """Start the work thread and the lease.

        Args:
            title: What Ray calls the actor.
            lease_s: Length of the first lease, in seconds; the driver renews it. `None`: no lease.
            owns_placement_group: True to remove the placement group when the lease expires.
            hub: The driver's access to the Hugging Face hub, if the checkpoint is there. An argument, since Ray logs
                the variables of a runtime environment.
        """
        if hub is not None:
            adopt_access(hub)
        # The handler of Ray 2.60 waits for running tasks to end, and `lifetime` runs until the process ends.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._title = title
        self._commands = RankCommands(title)
        self._ownership = Ownership()
        self._placement_group = ray.util.get_current_placement_group() if owns_placement_group else None
        self._lease = RankLease(self._end)
        self._lease.renew(lease_s)
        exit_without_gcs()
        self._record: KeptRecord | None = None
        self._last_response: dict[int, Response] = {}
        self._results: dict[tuple[int, int], Packed | AsValue | None] = {}
        self._control_threads: set[int] = set()
        self._stacks_descriptor = enable_stack_dumps()
        self._work = WorkThread(self._serve)

    def __repr__(self) -> str:
        return str(self._title)

    @ray.method(concurrency_group="control")
    def probe(self, paths: Sequence[str]) -> ActorInfo:
        """Return where this actor runs and whether it sees these files of a checkpoint; URIs are seen everywhere."""
        snapshot = _snapshot(paths)
        context = ray.get_runtime_context()
        return ActorInfo(
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            gpu_ids=tuple(str(number) for ids in context.get_accelerator_ids().values() for number in ids),
            sees_checkpoint=snapshot is not None or all(is_remote(path) or os.path.exists(path) for path in paths),
            stacks_descriptor=self._stacks_descriptor,
            log_paths=_log_paths(),
            snapshot=snapshot,
        )

    @ray.method(concurrency_group="control")
    def lifetime(self, epoch: int) -> None:
        """Block until another driver takes the group over.

        If the process dies, this call fails: so the driver notices the death of an idle rank.
        """
        self._control_threads.add(threading.get_ident())
        self._ownership.wait_superseded(epoch)

    @ray.method(concurrency_group="control")
    def renew(self, epoch: int, number: int, lease_s: float | None) -> None:
        """Renew the lease of the rank; see `supervision/lease_renewal.py`."""
        if self._ownership.owns(epoch):
            self._lease.renew(lease_s, (epoch, number))

    @ray.method(concurrency_group="control")
    def keep(self, epoch: int, record: KeptRecord) -> None:
        """Store the record that a driver needs to attach to the group."""
        is_newer = self._record is None or record.version > self._record.version
        if self._ownership.owns(epoch) and is_newer:
            self._record = record

    @ray.method(concurrency_group="control")
    def record(self) -> KeptRecord | None:
        """Return the stored record; `None` while the group starts."""
        return self._record

    @ray.method(concurrency_group="control")
    def save_status(self, number: int) -> SaveStatus:
        """Return the status of a save in the background."""
        return self._commands.save_status(number)

    @ray.method(concurrency_group="control")
    def pin(self, key: str, refs: Sequence[ray.ObjectRef] | None) -> None:
        """Hold references to the blocks of a dataset; see `dataset_blocks.pin`."""
        pin(key, refs)

    @ray.method(concurrency_group="control")
    def take_over(self) -> int:
        """Return the epoch for a new driver, which calls this on one actor and then `accept_epoch` on all."""
        return self._ownership.next_epoch()

    @ray.method(concurrency_group="control")
    def accept_epoch(self, epoch: int, lease_s: float | None) -> None:
        """Accept commands of the driver of this epoch, and refuse those of earlier drivers, whose lease ends."""
        self._ownership.accept_epoch(epoch)
        # No earlier driver renews its lease from now on. Renewals of this epoch, which may have arrived, come later.
        self._lease.renew(lease_s, (epoch, 0))

    @ray.method(concurrency_group="control")
    def store_address(self) -> StoreAddress:
        """Return the address of the group's store, where ranks of another group can meet those of this one."""
        return self._commands.store_address()

    @ray.method(concurrency_group="control")
    def stop_copy(self, epoch: int, key: str) -> None:
        """End a copy whose other group has failed, as the driver of this epoch knows."""
        if self._ownership.owns(epoch):
            self._commands.stop_copy(key)

    @ray.method(concurrency_group="control")
    def last_response(self, epoch: int) -> Response:
        """Return the response to the last command of the drivers before this epoch."""
        before = [one for one in self._last_response if one < epoch]
        return self._last_response[max(before)] if before else Response(self._unchanged())

    @ray.method(concurrency_group="control")
    def end(self) -> None:
        """End this process at once, for a driver that cannot kill the actor through Ray."""
        os._exit(1)

    @ray.method(concurrency_group="control")
    def progress(self) -> Progress:
        """Return the progress of the running load or save."""
        return Progress(*self._commands.progress())

    @ray.method(concurrency_group="control")
    def status(self) -> dict[str, Any]:
        """Return what the rank is doing and its memory, while a command runs."""
        return self._commands.status()

    @ray.method(concurrency_group="control")
    def stacks(self) -> Stacks:
        """Format the stacks of all threads but Ray's and the control threads, the work thread's first."""
        self._control_threads.add(threading.get_ident())
        frames = sys._current_frames()
        work = frames.pop(self._work.ident, None)
        parts = [] if work is None else ["work thread:\n" + "".join(traceback.format_stack(work))]
        for ident, frame in frames.items():
            if ident not in self._control_threads and not _is_rays_own(frame):
                parts.append(f"thread {ident}:\n" + "".join(traceback.format_stack(frame)))
        return Stacks("\n".join(parts), work is not None and waits_for_others(work))

    @ray.method(concurrency_group="control")
    def dump_stacks(self, pid: int, descriptor: int) -> ProcessSnapshot | None:
        """Inspect another rank of this node that does not answer; `None` if it is not visible from this process."""
        return dump_stacks(pid, descriptor)

    @ray.method(concurrency_group="control")
    def connections(self) -> list[Connection]:
        """List the TCP connections of this process, the candidates for `cut`."""
        return connections()

    @ray.method(concurrency_group="control")
    def cut(self, chosen: list[Connection]) -> None:
        """End collectives that wait for ranks that raised; see Note [Cutting] in `distributed.comm.abort`."""
        cut(chosen)

    @ray.method(concurrency_group="control")
    def connect(self, epoch: int, address: tuple[str, int], key: bytes, timeout_s: float) -> None:
        """Connect to the driver that listens at an address, and run its commands; see `rpc/connection.py`."""
        connection = connect_to_driver(address, key, timeout_s)
        if self._ownership.owns(epoch):
            self._work.obey(epoch, connection)
        else:
            connection.close()

    @ray.method(concurrency_group="data")
    def deliver(self, message: bytes, *stored: Packed) -> None:
        """Run a command whose large arguments Ray has fetched."""
        self._work.deliver(message, stored)

    @ray.method(concurrency_group="data", num_returns=2)
    def take(self, epoch: int, number: int) -> tuple[None, Packed | AsValue | None]:
        """Return `None`, as a sign that the result is stored, and a large result, fetched on demand."""
        return None, self._results.pop((epoch, number))

    def _serve(self, message: bytes, stored: Sequence[Packed]) -> bytes:
        """Run a command; return the message of its response. On the work thread."""
        try:
            command = Command.decode(message, stored)
        except Exception as error:  # noqa: BLE001 - e.g. of a driver with other code; the driver waits for a response
            return replace(self._refusal(error), number=number_of(message)).encode()
        return replace(self._obey(command), number=command.number).encode()

    def _obey(self, command: Command) -> Response:
        if not self._ownership.owns(command.epoch):
            return self._refusal(taken_over("the group"))
        self._results.clear()  # the driver has fetched the earlier results it needs
        response, result = self._run(command)
        self._last_response[command.epoch] = response
        if isinstance(result, Packed) and result.num_bytes <= RESULT_BYTES and not result.refs:
            return replace(response, value=result)
        if result is not None:
            self._results[command.epoch, command.number] = result
        return replace(response, is_stored=result is not None)

    def _unchanged(self) -> StateChange:
        return self._commands.change_since(self._commands.num_changes())

    def _refusal(self, error: BaseException) -> Response:
        return Response(self._unchanged(), error=self._describe(error, "run"))

    def _run(self, command: Command) -> tuple[Response, Packed | AsValue | None]:
        stage: Stage = "run"
        before = self._commands.num_changes()
        try:
            more, value = self._commands.run(command)
            stage = "output"
            result = _pack_output(value, command)
        except BaseException as error:  # noqa: BLE001
            # Boundary to user code: every exception, `SystemExit` too, goes to the driver as data.
            return Response(self._commands.change_since(before), error=self._describe(error, stage)), None
        return Response(self._commands.change_since(before), more=more), result

    def _end(self, lease_s: float) -> None:
        """End this process, whose lease has expired. `sys.exit` would only end a thread."""
        tell(f"the driver has not renewed this rank's lease of {lease_s:g} s: the rank ends, pid {os.getpid()}")
        if self._placement_group is not None:
            giving = threading.Thread(target=remove_placement_group, args=(self._placement_group,), daemon=True)
            giving.start()
            giving.join(_GIVE_BACK_S)
        os._exit(1)

    def _describe(self, error: BaseException, stage: Stage) -> RemoteError:
        return record_exception(
            error,
            stage=stage,
            phase=self._commands.phase(),
            tensor=self._commands.tensor(),
            recovered=self._commands.is_usable(),
        )


REMOTE_RANK_ACTOR = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RankActor)
"""Actor class of the ranks, made once: Ray disassembles and exports every class that `ray.remote` makes."""


def _snapshot(paths: Sequence[str]) -> str | None:
    """Return the directory of these files of a hub's model in this node's cache; `None` if one is not there."""
    hub = HubPath.of_pinned(split_path(paths[0])[0]) if paths else None
    found = None if hub is None else hub.cached()
    if found is None or not all(os.path.exists(os.path.join(found, split_path(path)[1])) for path in paths):
        return None
    return found


def _log_paths() -> tuple[str, ...]:
    """Return the files that Ray redirects stdout and stderr to."""
    paths = [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in (1, 2)]
    return tuple(path for path in paths if os.path.isfile(path))


def _is_rays_own(frame: FrameType) -> bool:
    """Return True if a thread runs only Ray's code."""
    own = (os.path.dirname(ray.__file__), threading.__file__)
    return all(each.f_code.co_filename.startswith(own) for each, _ in traceback.walk_stack(frame))


def _pack_output(value: Any, command: Command) -> Packed | AsValue | None:
    if value is None and command.output == "value":
        return None
    packed = pack(value, f"the result of {command.method}")
    cap = command.max_output_bytes
    if cap is not None and packed.num_bytes > cap:
        message = (
            f"the result of {command.method} is {packed.num_bytes} bytes on this rank, over "
            f"max_output_bytes={cap}; return less (out=Out.none() or Out.rank0()), pass fewer rows, keep it on the "
            "cluster (out=Out.refs()), or raise max_output_bytes"
        )
        raise OutputTooLargeError(message, num_bytes=packed.num_bytes, max_output_bytes=cap)
    return AsValue(packed) if command.output == "ref" else packed
