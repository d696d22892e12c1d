"""What crosses between driver and rank: packed values, messages, connections, the event loop that serves them."""

from raysharding.group.rpc.connection import Connection, accept_ranks, connect_to_driver
from raysharding.group.rpc.driver_connections import DriverConnections
from raysharding.group.rpc.event_loop import EventLoop, Future, is_supervision_thread, refuse_to_wait
from raysharding.group.rpc.messages import (
    COMMAND_BYTES,
    NEXT_STEP,
    RESULT_BYTES,
    AsValue,
    Command,
    Mode,
    OutputMode,
    Packed,
    Progress,
    RemoteError,
    Response,
    SaveStatus,
    Shared,
    Stacks,
    Stage,
    StateChange,
    in_step,
    number_of,
    one_model,
    pack,
    pack_batches,
    pack_same,
    record_exception,
    taken_over,
)
