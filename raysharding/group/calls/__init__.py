"""The caller's side: calls, results, input checks, interrupts, background saves, progress."""

from raysharding.group.calls.background_saves import Asking, PendingSaves
from raysharding.group.calls.call import (
    Call,
    Collect,
    FullStateDict,
    Handle,
    LastValue,
    ProgressOption,
    Sent,
    blocking,
    collect_all,
    collect_generated,
    collect_outputs,
    collect_rank0,
    collect_returns,
    driver_handle,
    follow,
    handle,
    is_shown,
)
from raysharding.group.calls.input_checks import model_batches
from raysharding.group.calls.interrupts import DeferredInterrupts, MaskedInterrupts, Stopping, UndoOnInterrupt
from raysharding.group.calls.model_files import BegunSave, ModelFiles
