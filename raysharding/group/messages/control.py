"""Messages between a driver and a group's controller."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import ray

from raysharding.config import Placement
from raysharding.errors import GroupBrokenError, GroupError
from raysharding.group.messages.commands import OutputMode
from raysharding.group.messages.packing import Packed
from raysharding.group.messages.remote_error import RemoteError
from raysharding.group.ranks import RankInfo

E = TypeVar("E", bound=GroupError)


class GroupState(enum.Enum):
    """States of a group: STARTING → READY ↔ BUSY → BROKEN → STARTING, and CLOSED from each of them."""

    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    BROKEN = "broken"
    CLOSED = "closed"


Part: TypeAlias = Packed | ray.ObjectRef
"""Packed arguments: themselves if they are small, else their reference in the object store."""
Sent: TypeAlias = Packed | ray.ObjectRef | None
"""A rank's result: the value itself if it is small, else its reference in the object store."""
Item: TypeAlias = tuple[int, Sent] | None
"""One part of a running call's result: a rank, and what it sent; `None` if the call has ended without such a part."""


@dataclass(frozen=True, slots=True)
class BegunSave:
    """A save that was requested from the ranks."""

    path: str
    """Destination: a path or a normalized URI."""
    is_origin: bool
    """True if a restart may load the save. The controller sets it to False once newer files hold the model."""
    token: str
    """Identifier of the save in its files, different from that of any other save."""


@dataclass(frozen=True, slots=True)
class FilesRecord:
    """The files that hold a group's model, as far as its controller knows."""

    origin: str
    """The newest files that hold the model, which a restart loads."""
    base: str | None = None
    """A whole model that was loaded since the ranks were made, with the adapters kept on it; `None` if none was.

    The origin stays: it holds the adapters, if any file does."""
    begun: tuple[BegunSave, ...] = ()
    """Saves whose outcome is not known, in the order in which the ranks run them."""
    saves: tuple[str, ...] = ()
    """Paths of the committed saves."""
    is_initial: bool = True
    """True if the group was made from the origin, and no save or load has replaced it."""


@dataclass(frozen=True, slots=True)
class Joint:
    """The other part of a call that two groups run together, as a `CopyPair`."""

    key: str
    """Identifies the pair."""
    other: Any
    """Handle of the other group's controller."""
    other_name: str
    """The other group's name in errors."""
    is_leader: bool
    """True if this group's controller has the smaller id, and so queues the pair."""
    driver: str = ""
    """The driver's key at the other group; for the leader."""
    before: int = 0
    """Number of that driver's calls at the other group which come before the pair; for the leader."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A call of a driver."""

    method: str
    """Name of the command."""
    parts: tuple[Part, ...]
    """Packed `(args, kwargs)`: one for all ranks, or one per rank."""
    deadline_s: float
    """Longest time of the call, in seconds; with `watch_progress`, longest time without progress."""
    shared: Part | None = None
    """Packed tuple of the values that all ranks share, for which `Shared` marks stand in `parts`."""
    output: OutputMode = "value"
    """`value`: each result as `Packed`; `ref`: as an object that `ray.get` turns into the result itself."""
    max_output_bytes: int | None = None
    """Cap on each packed result; `None` for results that are bounded otherwise."""
    watch_progress: bool = False
    """True if progress in bytes, which the ranks report, extends the deadline."""
    takes_steps: bool = False
    """True if the call may take several steps (`NEXT_STEP`); its result is rank 0's value of the last one."""
    waits_for_driver: bool = False
    """True if the driver takes rank 0's value of each step, and the next step waits for that."""
    is_stream: bool = False
    """True if one step may run before the driver has taken the value of the one before, and an interrupt ends them."""
    uses_gradients: bool = False
    """True if the call goes on from the gradients that the driver's last call has left."""
    makes: bool = False
    """True for the calls that make the group, or make it again: no other runs meanwhile."""
    generation: str = ""
    """`Snapshot.generation` as the driver knows it."""
    refused_beside: Mapping[str, str] = field(default_factory=dict)
    """Kind of a lock → why the call is refused while another driver holds one of that kind."""
    save: BegunSave | None = None
    """The save that the call is."""
    is_async_save: bool = False
    """True if the save is written in the background; the call's result is its number on rank 0."""
    loads: str | None = None
    """Path or URI of the files that the call loads."""
    joint: Joint | None = None
    """The call of another group that begins together with this one."""
    other: Submission | None = None
    """The call of `joint` in the other group; for the leader."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results or error of a call."""

    sent: tuple[Sent, ...] = ()
    """Results by rank; empty if the call failed."""
    weights_version: int | None = None
    """Version of the weights after a call that succeeded."""
    error: GroupError | None = None
    """The failure."""
    raised: RemoteError | None = None
    """Exception of the rank that failed first; `None` if it died, hung or did not begin."""
    is_common: bool = False
    """True if all ranks raised errors of this type."""
    follows: bool = False
    """True if the error only says that the other part of a joint call could not run."""
    snapshot: Snapshot | None = None
    """The group after the call, if the call has changed what a snapshot says."""
    generation: str | None = None
    """`Snapshot.generation` after another driver's restart, of which the error tells; else `None`."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a group that drivers hold, without asking for each part."""

    version: int
    """Increases with each change."""
    state: GroupState
    """State of the group; never BUSY, which changes too often."""
    cause: GroupError | None
    """The error that broke the group."""
    ranks: tuple[RankInfo, ...]
    """Where the ranks run, by rank; of the last ranks, if they are gone."""
    log_paths: tuple[tuple[str, ...], ...]
    """Files on each rank's node that receive its stdout and stderr."""
    saves: tuple[str, ...]
    """Paths of the committed saves."""
    ended_saves: Mapping[str, Exception | None] = field(default_factory=dict)
    """Token → the failure of a save in the background that has ended, `None` if it is committed."""
    notes: tuple[tuple[int, str], ...] = ()
    """(number, line) of the last lines that drivers print."""
    generation: str = ""
    """Identifies the ranks from one restart to the next, after which the model is that of files."""
    weights_version: int = 0
    """Highest version of the weights after a call that succeeded."""


@dataclass(frozen=True, slots=True)
class Attached:
    """Reply of the controller to a driver that attaches."""

    snapshot: Snapshot
    """The group now."""
    spec: Packed | None
    """The `GroupSpec`; `None` while the group is made for the first time."""
    loaded: Packed | None
    """The packed `Loaded` of the group; `None` while the group is made for the first time."""
    where: str
    """Node and process of the controller, for errors."""


@dataclass(frozen=True, slots=True)
class StartPlan:
    """Everything that a controller needs to start the ranks' processes."""

    actor_class: Any
    """Class of the ranks' actors."""
    concurrency_groups: Mapping[str, int]
    """Concurrency groups of the actors."""
    titles: tuple[Any, ...]
    """What Ray calls each actor, by bundle."""
    world_size: int
    """Number of ranks."""
    device_type: str
    """Type of the ranks' devices."""
    placement: Placement
    """Where the ranks may run."""
    place_s: float | None
    """Longest wait for the ranks' resources, in seconds; `None` for the default of the cluster."""
    start_s: float
    """Longest wait for the processes to start and finish their imports, in seconds."""
    paths: tuple[str, ...]
    """Files of the checkpoint; rank 0 runs on a node that sees them."""
    driver_node: str
    """Ray's id of the driver's node, which comes first among the nodes that see the checkpoint."""
    hub: Packed | None
    """The driver's `HubAccess`, if the ranks need it."""
    imports: tuple[str | None, bytes] | None = None
    """Arguments of the ranks' `import_code`; `None` for a model of the user's own code."""
    held: tuple[str, ...] = ()
    """Lines on what the driver's program itself holds, for the error of a busy cluster."""
    tells: bool = True
    """True to tell every 10 s what is missing."""
    node_ids: tuple[str, ...] = ()
    """Ray's ids of nodes: one rank without resources on each, instead of a placement group."""


@dataclass(frozen=True, slots=True)
class Started:
    """The ranks' processes, numbered."""

    ranks: tuple[RankInfo, ...]
    """Where each rank runs."""
    visible_gpus: tuple[str, ...]
    """CUDA_VISIBLE_DEVICES by rank: all of the group's GPUs on the rank's node, each once; empty for CPU ranks."""
    snapshot: str | None
    """Directory of the checkpoint in the Hugging Face cache of rank 0's node; `None` if it is not there."""
    sees_checkpoint: bool
    """True if rank 0's node sees the checkpoint's files."""
    seconds: tuple[Mapping[str, float], ...]
    """Part of the start → its seconds, by rank."""


@dataclass(frozen=True, slots=True)
class ProbeReplies:
    """Replies to one probe of all ranks."""

    replies: Mapping[int, Any]
    """Rank → its reply."""
    silent: Mapping[int, str]
    """Rank → why it did not reply."""


def without_frames(error: E) -> E:
    """Return a copy of an error without traceback, cause and context, which would keep the frames that they name."""
    return type(error)(error.message, primary=error.primary, failures=error.failures)


def broken(name: str, cause: GroupError) -> GroupBrokenError:
    """Build the error of all later calls."""
    message = f"{name} is broken and refuses calls: {cause.message}; group.restart() makes it whole"
    return GroupBrokenError(message, primary=cause.primary, failures=cause.failures)


def closed(name: str) -> GroupBrokenError:
    """Build the error of calls on a group that was shut down."""
    return GroupBrokenError(f"{name} is shut down; make a new group")
