"""The caller's side: the client of a controller, calls, results, input checks, interrupts, progress."""

from raysharding.group.calls.call import (
    Call,
    Collect,
    collect_all,
    collect_outputs,
    collect_rank0,
    collect_returns,
    streamed,
)
from raysharding.group.calls.callback_thread import is_callback_thread
from raysharding.group.calls.client import Client
from raysharding.group.calls.handle import Handle, blocking, driver_handle, handle
from raysharding.group.calls.input_checks import check_no_examples, model_batches, output_path
from raysharding.group.calls.inspection import rank_statuses, read_log
from raysharding.group.calls.interrupts import MaskedInterrupts, UndoOnInterrupt
from raysharding.group.calls.live_view import LiveView
from raysharding.group.calls.pending_saves import is_committed
from raysharding.group.calls.progress import ProgressBar, ProgressOption, follow, progress_bar
