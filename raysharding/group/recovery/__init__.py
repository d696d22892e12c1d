"""Groups made whole again, and groups taken over by another driver."""

from raysharding.group.recovery.attach import attach
from raysharding.group.recovery.restart import RestartReport, restart

__all__ = ["RestartReport", "attach", "restart"]
