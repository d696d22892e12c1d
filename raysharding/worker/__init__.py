"""Floor 4: everything that one rank does with a model; state → training → worker."""

from raysharding.worker.state import check_mode
from raysharding.worker.worker import Worker, current_worker

__all__ = ["Worker", "check_mode", "current_worker"]
