"""Training steps, forward, generation, evaluation and fit, equal to those of one process on all rows."""

from raysharding.distributed.training.data_loader import DataPlan as DataPlan
from raysharding.distributed.training.evaluate import Evaluation as Evaluation
from raysharding.distributed.training.evaluate import EvaluationPlan as EvaluationPlan
from raysharding.distributed.training.fit import Fit as Fit
from raysharding.distributed.training.fit import FitPlan as FitPlan
from raysharding.distributed.training.fit import StepMetrics as StepMetrics
from raysharding.distributed.training.forward import Forwarding as Forwarding
from raysharding.distributed.training.generate import check_generation as check_generation
from raysharding.distributed.training.generate import generate as generate
from raysharding.distributed.training.loss_call import LossFunction as LossFunction
from raysharding.distributed.training.loss_call import positions_of as positions_of
from raysharding.distributed.training.step import Accumulation as Accumulation
from raysharding.distributed.training.step import check_max_grad_norm as check_max_grad_norm
from raysharding.distributed.training.step import forward_backward as forward_backward
from raysharding.distributed.training.step import optim_step as optim_step
from raysharding.distributed.training.step import train_step as train_step
from raysharding.distributed.training.step import zero_grad as zero_grad
