"""The driver's part of a training run over data: steps, saves, restarts, callbacks, the report; and of `predict`."""

from raysharding.group.fit.callbacks import MLflow, RayGauges, TensorBoard, Tracker, WeightsAndBiases, figures
from raysharding.group.fit.early_stop import EarlyStop
from raysharding.group.fit.evaluations import submit_evaluate
from raysharding.group.fit.predict_run import PredictReport, run_predict
from raysharding.group.fit.report import FitReport, FitStep
from raysharding.group.fit.run import Callback, run_fit
from raysharding.group.fit.run_lock import REFUSED_BESIDE, RunLock
