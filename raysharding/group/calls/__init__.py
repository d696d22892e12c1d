"""The caller's side: calls and pairs of them, results, input checks, interrupts, background saves, progress."""

from raysharding.group.calls.background_saves import Asking, PendingSaves
from raysharding.group.calls.call import (
    Call,
    Collect,
    FullStateDict,
    Sent,
    collect_all,
    collect_generated,
    collect_outputs,
    collect_rank0,
    collect_returns,
)
from raysharding.group.calls.handle import Handle, blocking, driver_handle, handle
from raysharding.group.calls.input_checks import check_no_examples, model_batches, output_path
from raysharding.group.calls.interrupts import DeferredInterrupts, MaskedInterrupts, Stopping, UndoOnInterrupt
from raysharding.group.calls.joint_start import IN_ORDER, JointStart
from raysharding.group.calls.model_files import BegunSave, ModelFiles
from raysharding.group.calls.progress import ProgressBar, ProgressOption, follow, progress_bar
