"""Optimizers by parameter name: param groups, schedules, and state that is independent of the world size."""

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
    precision_warning,
    rescheduled,
    step_schedule,
)
from raysharding.distributed.optim.rules import adapt
from raysharding.distributed.optim.snapshot import (
    OptimizerSnapshot,
    agreed_snapshot,
    decode,
    encode,
    parameter_names,
    split_state,
    state_like,
)
