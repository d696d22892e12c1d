"""Optimizers by the names of their parameters: param groups, schedules, and state that outlasts world sizes."""

from raysharding.distributed.optim.factories import (
    OptimizerFactory,
    ParamGroups,
    Schedule,
    Scheduled,
    attach_schedule,
    bound,
    call_factory,
    check_schedule,
    check_schedule_has_loss,
    learning_rate,
    make_optimizer,
    rescheduled,
    step_schedule,
)
from raysharding.distributed.optim.snapshot import (
    OptimizerSnapshot,
    agreed_snapshot,
    decode,
    encode,
    parameter_names,
    split_state,
    state_like,
)

__all__ = [
    "OptimizerFactory",
    "OptimizerSnapshot",
    "ParamGroups",
    "Schedule",
    "Scheduled",
    "agreed_snapshot",
    "attach_schedule",
    "bound",
    "call_factory",
    "check_schedule",
    "check_schedule_has_loss",
    "decode",
    "encode",
    "learning_rate",
    "make_optimizer",
    "parameter_names",
    "rescheduled",
    "split_state",
    "state_like",
    "step_schedule",
]
