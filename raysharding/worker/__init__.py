"""One rank's operations on a model, without Ray: a `Worker` with its `status`, `trainer` and `predictor`."""

from raysharding.worker.predictor import PredictStart, PredictSteps
from raysharding.worker.status import check_mode
from raysharding.worker.thread_state import thread_state_restored
from raysharding.worker.training import FitStart, FitSteps
from raysharding.worker.worker import Worker, current_worker

__all__ = [
    "FitStart",
    "FitSteps",
    "PredictStart",
    "PredictSteps",
    "Worker",
    "check_mode",
    "current_worker",
    "thread_state_restored",
]
