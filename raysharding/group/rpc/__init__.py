"""What crosses between driver and rank: packed values, messages, connections, the event loop that serves them."""

from raysharding.group.rpc.connection import Connection, connect_to_driver
from raysharding.group.rpc.driver_connections import DriverConnections
from raysharding.group.rpc.event_loop import EventLoop, Future, is_supervision_thread, refuse_to_wait
from raysharding.group.rpc.handshakes import accept_ranks
from raysharding.group.rpc.messages import (
    COMMAND_BYTES,
    NEXT_STEP,
    RESULT_BYTES,
    Command,
    Mode,
    OutputMode,
    Progress,
    RemoteError,
    Response,
    SaveStatus,
    Stacks,
    Stage,
    StateChange,
    in_step,
    number_of,
    one_model,
    record_exception,
    taken_over,
)
from raysharding.group.rpc.packing import AsValue, Packed, Shared, pack, pack_batches, pack_same
