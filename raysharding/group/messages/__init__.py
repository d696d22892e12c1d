"""Messages between driver, controller and rank: packed values, commands and responses, exceptions as data."""

from raysharding.group.messages.commands import (
    COMMAND_BYTES,
    END_STEPS,
    NEXT_STEP,
    RESULT_BYTES,
    Command,
    Mode,
    Response,
    Stacks,
    StateChange,
    in_step,
    one_model,
)
from raysharding.group.messages.control import (
    Attached,
    BegunSave,
    FilesRecord,
    GroupState,
    Item,
    Joint,
    Outcome,
    Part,
    ProbeReplies,
    Sent,
    Snapshot,
    Started,
    StartPlan,
    Submission,
    broken,
    closed,
    without_frames,
)
from raysharding.group.messages.packing import (
    AsValue,
    Packed,
    Shared,
    decoded,
    encoded,
    pack,
    pack_batches,
    pack_same,
)
from raysharding.group.messages.remote_error import RemoteError, Stage, record_exception
