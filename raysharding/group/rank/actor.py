"""The Ray actor of one rank: one thread runs commands, others answer the controller meanwhile.

The controller creates the actors without importing torch, so this module imports torch only where a rank runs.
Results and exceptions leave a command as typed data (`Response`, `Packed`), so that an exception that does not pickle,
or a result that is too large, does not end the actor.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import FrameType
from typing import Any

import ray

from raysharding.errors import OutputTooLargeError
from raysharding.group.cluster import ProcessSnapshot, dump_stacks, enable_stack_dumps, tell
from raysharding.group.messages import (
    RESULT_BYTES,
    AsValue,
    Command,
    Packed,
    Response,
    Stacks,
    Stage,
    decoded,
    encoded,
    pack,
)
from raysharding.group.rank.assignment import Title
from raysharding.imports import paused_gc

# `work` is one thread, the same for the actor's life: torch's current device is per thread. `lifetime` keeps one thread
# of `control`; the others are for probes, of which a slow one may block its thread.
CONCURRENCY_GROUPS = {"work": 1, "data": 1, "control": 6}

_IMPORTS = {"torch": "torch", "FSDP": "torch.distributed.fsdp", "raysharding": "raysharding.group.rank.commands"}
"""Package → module that imports what a rank needs of it, in order."""
_TICKS = 20  # checks of the lease per lease time
_MAX_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Node, process and files of an actor, as the actor reports them."""

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
    start_s: Mapping[str, float] = field(default_factory=dict)
    """Part of the process's start → its seconds."""


class RankActor:
    """One rank. The controller creates it with `max_restarts=0`: the group restarts as a whole."""

    def __init__(
        self,
        title: Title,
        lease_s: float,
        hub: Packed | None = None,
        imports: tuple[str | None, bytes] | None = None,
    ) -> None:
        """Import what a rank needs, and start the lease.

        Args:
            title: What Ray calls the actor.
            lease_s: Seconds without `renew` after which the rank ends: its node is cut off from the controller.
            hub: The driver's `HubAccess`, packed, if the checkpoint is on the Hugging Face hub. An argument, since Ray
                logs the variables of a runtime environment.
            imports: Arguments of `import_code` in `commands.py`; `None` for a model of the user's own code.
        """
        with paused_gc():
            self._import_s = {name: _imported(module) for name, module in _IMPORTS.items()}
            from raysharding.checkpoint.storage import adopt_access
            from raysharding.group.rank.commands import RankCommands

        if hub is not None:
            adopt_access(hub.unpack())
        # The handler of Ray 2.60 waits for running tasks to end, and `lifetime` runs until the process ends.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._title = title
        self._commands = RankCommands(title, imports)
        self._fetched: dict[int, dict[str, Packed]] = {}
        self._work_thread = 0
        self._control_threads: set[int] = set()
        self._stacks_descriptor = enable_stack_dumps()
        self._renewed = threading.Event()
        threading.Thread(target=self._end_without_renewal, args=(lease_s,), name="lease", daemon=True).start()

    def __repr__(self) -> str:
        return str(self._title)

    @ray.method(concurrency_group="work", num_returns=2)
    def run(self, sent: Any) -> tuple[Any, Packed | AsValue | None]:
        """Run a command; never raises. What is sent is an encoded `Command`, and the first return a `Response`.

        The second return is the result if `is_stored` of the first is True. Ray keeps it in the object store of this
        node until somebody fetches it, so it does not pass through the controller.
        """
        self._work_thread = threading.get_ident()
        response, result = self._run(decoded(sent))
        is_small = isinstance(result, Packed) and result.num_bytes <= RESULT_BYTES and not result.refs
        if isinstance(result, Packed) and is_small:
            response, result = replace(response, value=result), None
        elif result is not None:
            response = replace(response, is_stored=True)
        return encoded(response, has_refs=False), result

    @ray.method(concurrency_group="data")
    def fetch(self, number: int, **fields: Packed) -> None:
        """Hold large fields of a command, which Ray has fetched, until the command of this number or a later one runs.

        Args:
            number: `Command.number`.
            fields: Values of fields of the `Command`.
        """
        self._fetched[number] = fields

    @ray.method(concurrency_group="control", max_task_retries=-1)  # Note [First calls] in controller/actor.py
    def probe(self, paths: Sequence[str]) -> ActorInfo:
        """Return where this actor runs and whether it sees these files of a checkpoint; URIs are seen everywhere."""
        from raysharding.checkpoint.storage import is_remote

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
            start_s=self._import_s,
        )

    @ray.method(concurrency_group="control")
    def lifetime(self) -> None:
        """Block until this process ends: the call then fails, by which the controller notices an idle rank's death."""
        self._control_threads.add(threading.get_ident())
        threading.Event().wait()

    @ray.method(concurrency_group="control")
    def renew(self) -> None:
        """Renew the lease of the rank."""
        self._renewed.set()

    @ray.method(concurrency_group="control")
    def save_status(self, number: int) -> tuple[bool, int, Exception | None]:
        """Return whether a save in the background has ended, its bytes so far, and its failure."""
        return self._commands.save_status(number)

    @ray.method(concurrency_group="control")
    def pin(self, key: str, refs: Sequence[ray.ObjectRef] | None) -> None:
        """Hold references to the blocks of a dataset, so that Ray keeps the blocks; `None` releases them."""
        from raysharding.group.rank.dataset_blocks import pin

        pin(key, refs)

    @ray.method(concurrency_group="control")
    def store_address(self) -> Packed:
        """Return the packed `StoreAddress` of the group, where ranks of another group can meet those of this one."""
        return pack(self._commands.store_address(), "the address of the store")

    @ray.method(concurrency_group="control")
    def stop_copy(self, key: str) -> None:
        """End a copy whose other group has failed, as the controller knows."""
        self._commands.stop_copy(key)

    @ray.method(concurrency_group="control")
    def end(self) -> None:
        """End this process at once, for a controller that cannot kill the actor through Ray."""
        os._exit(1)

    @ray.method(concurrency_group="control")
    def progress(self) -> tuple[str, int, int]:
        """Return phase, bytes done and total bytes of the running load or save."""
        return self._commands.progress()

    @ray.method(concurrency_group="control")
    def status(self) -> dict[str, Any]:
        """Return what the rank is doing and its memory, while a command runs."""
        return self._commands.status()

    @ray.method(concurrency_group="control")
    def stacks(self, is_late: bool = False) -> Stacks:
        """Format the stacks of all threads but Ray's and the control threads, the work thread's first.

        Args:
            is_late: True to look at the device, too, which may take 0.1 s.
        """
        from raysharding.distributed.comm import is_busy, waits_for_others

        self._control_threads.add(threading.get_ident())
        frames = sys._current_frames()
        work = frames.pop(self._work_thread, None)
        parts = [] if work is None else ["work thread:\n" + "".join(traceback.format_stack(work))]
        for ident, frame in frames.items():
            if ident not in self._control_threads and not _is_rays_own(frame):
                parts.append(f"thread {ident}:\n" + "".join(traceback.format_stack(frame)))
        in_collective = work is not None and waits_for_others(work)
        return Stacks("\n".join(parts), in_collective, is_late and work is not None and is_busy(self._commands.device))

    @ray.method(concurrency_group="control")
    def dump_stacks(self, pid: int, descriptor: int) -> ProcessSnapshot | None:
        """Inspect another rank of this node that does not answer; `None` if it is not visible from this process."""
        return dump_stacks(pid, descriptor)

    def _run(self, command: Command) -> tuple[Response, Packed | AsValue | None]:
        stage: Stage = "run"
        try:
            more, value = self._commands.run(self._with_fetched(command))
            stage = "output"
            result = _pack_output(value, command)
        except BaseException as error:  # noqa: BLE001
            # Boundary to user code: every exception, `SystemExit` too, goes to the controller as data.
            return Response(self._commands.change(), error=self._commands.failure(error, stage)), None
        change, keeps_adapters = self._commands.change(), self._commands.keeps_adapters()
        return Response(change, more=more, keeps_adapters=keeps_adapters), result

    def _with_fetched(self, command: Command) -> Command:
        """Return a command with what was fetched for it, and drop what was fetched for commands that did not come."""
        taken = {number: self._fetched.pop(number) for number in list(self._fetched) if number <= command.number}
        assert not command.is_fetched or command.number in taken, "the controller awaits fetch before run"
        return replace(command, **taken.get(command.number, {}))  # type: ignore[arg-type]  # fields that are `Packed`

    def _end_without_renewal(self, lease_s: float) -> None:
        """End this process when its lease has expired; time in which it did not run counts as two ticks at most."""
        tick_s, left_s = min(_MAX_TICK_S, lease_s / _TICKS), lease_s
        while left_s > 0:
            begun = time.monotonic()
            if self._renewed.wait(tick_s):
                self._renewed.clear()
                left_s = lease_s
            else:
                left_s -= min(time.monotonic() - begun, 2 * tick_s)
        tell(f"the controller has not renewed this rank's lease of {lease_s:g} s: the rank ends, pid {os.getpid()}")
        os._exit(1)  # `sys.exit` would only end a thread


def _imported(module: str) -> float:
    """Import a module; return the seconds."""
    begun = time.monotonic()
    import_module(module)
    return time.monotonic() - begun


def _snapshot(paths: Sequence[str]) -> str | None:
    """Return the directory of these files of a hub's model in this node's cache; `None` if one is not there."""
    from raysharding.checkpoint.storage import HubPath, split_path

    hub = HubPath.of_pinned(split_path(paths[0])[0]) if paths else None
    cached = None if hub is None else hub.cached()
    if cached is None or not all(os.path.exists(os.path.join(cached, split_path(path)[1])) for path in paths):
        return None
    return cached


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
    if command.output == "ref" and command.method != "call":
        from raysharding.batch import RankOutput  # imports torch

        value = value.value if isinstance(value, RankOutput) else value
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
