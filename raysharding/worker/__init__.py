"""Floor 4: everything that one rank does with a model; state → training → fitting → worker."""

from raysharding.worker.status import check_mode
from raysharding.worker.thread_state import thread_state_restored
from raysharding.worker.training import FitStart, FitSteps
from raysharding.worker.worker import Worker, current_worker

__all__ = ["FitStart", "FitSteps", "Worker", "check_mode", "current_worker", "thread_state_restored"]
