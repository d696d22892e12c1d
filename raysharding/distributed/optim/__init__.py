"""Optimizers by parameter name: param groups, schedules, and state that is independent of the world size."""

from raysharding.distributed.optim.factories import OptimizerFactory as OptimizerFactory
from raysharding.distributed.optim.factories import ParamGroups as ParamGroups
from raysharding.distributed.optim.factories import Schedule as Schedule
from raysharding.distributed.optim.factories import Scheduled as Scheduled
from raysharding.distributed.optim.factories import attach_schedule as attach_schedule
from raysharding.distributed.optim.factories import bound as bound
from raysharding.distributed.optim.factories import call_factory as call_factory
from raysharding.distributed.optim.factories import check_schedule as check_schedule
from raysharding.distributed.optim.factories import check_schedule_has_loss as check_schedule_has_loss
from raysharding.distributed.optim.factories import learning_rate as learning_rate
from raysharding.distributed.optim.factories import make_optimizer as make_optimizer
from raysharding.distributed.optim.factories import rescheduled as rescheduled
from raysharding.distributed.optim.factories import step_schedule as step_schedule
from raysharding.distributed.optim.snapshot import OptimizerSnapshot as OptimizerSnapshot
from raysharding.distributed.optim.snapshot import agreed_snapshot as agreed_snapshot
from raysharding.distributed.optim.snapshot import decode as decode
from raysharding.distributed.optim.snapshot import encode as encode
from raysharding.distributed.optim.snapshot import parameter_names as parameter_names
from raysharding.distributed.optim.snapshot import split_state as split_state
from raysharding.distributed.optim.snapshot import state_like as state_like
