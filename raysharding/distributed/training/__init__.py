"""Training steps, forward, generation, evaluation, fit and predict, equal to those of one process on all rows."""

from raysharding.distributed.training.data_loader import DataPlan
from raysharding.distributed.training.evaluate import Evaluation, EvaluationPlan, Metric
from raysharding.distributed.training.fit import Fit, FitPlan, StepMetrics
from raysharding.distributed.training.forward import Forwarding, OutputFunction
from raysharding.distributed.training.generate import check_generation, generate
from raysharding.distributed.training.losses import LossFunction, positions_of
from raysharding.distributed.training.predict import Columns, Prediction, PredictPlan
from raysharding.distributed.training.step import (
    Accumulation,
    check_max_grad_norm,
    forward_backward,
    optim_step,
    train_step,
    zero_grad,
)
from raysharding.distributed.training.token_stream import TokenStream
