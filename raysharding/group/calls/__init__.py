"""The caller's side: calls, results, input checks, interrupts, background saves, progress."""

from raysharding.group.calls.background_saves import Asking as Asking
from raysharding.group.calls.background_saves import PendingSaves as PendingSaves
from raysharding.group.calls.call import Call as Call
from raysharding.group.calls.call import Collect as Collect
from raysharding.group.calls.call import Handle as Handle
from raysharding.group.calls.call import Sent as Sent
from raysharding.group.calls.call import blocking as blocking
from raysharding.group.calls.call import driver_handle as driver_handle
from raysharding.group.calls.call import handle as handle
from raysharding.group.calls.input_checks import check_batches as check_batches
from raysharding.group.calls.interrupts import DeferredInterrupts as DeferredInterrupts
from raysharding.group.calls.interrupts import MaskedInterrupts as MaskedInterrupts
from raysharding.group.calls.interrupts import Stopping as Stopping
from raysharding.group.calls.interrupts import UndoOnInterrupt as UndoOnInterrupt
from raysharding.group.calls.model_files import BegunSave as BegunSave
from raysharding.group.calls.model_files import ModelFiles as ModelFiles
from raysharding.group.calls.progress import ProgressOption as ProgressOption
from raysharding.group.calls.progress import follow as follow
from raysharding.group.calls.progress import is_shown as is_shown
from raysharding.group.calls.results import FullStateDict as FullStateDict
from raysharding.group.calls.results import LastValue as LastValue
from raysharding.group.calls.results import collect_all as collect_all
from raysharding.group.calls.results import collect_generated as collect_generated
from raysharding.group.calls.results import collect_outputs as collect_outputs
from raysharding.group.calls.results import collect_rank0 as collect_rank0
from raysharding.group.calls.results import collect_returns as collect_returns
