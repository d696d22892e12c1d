"""The driver's part of a training run over data: steps, saves, restarts, callbacks, the report; and of `predict`."""

from raysharding.group.fit.callbacks import MLflow, RayGauges, TensorBoard, Tracker, WeightsAndBiases, figures
from raysharding.group.fit.datasets import DatasetHandle, dataset_handle, refuse_iterable
from raysharding.group.fit.early_stop import EarlyStop
from raysharding.group.fit.evaluations import eval_options
from raysharding.group.fit.fit_lock import REFUSED_BESIDE, FitLock
from raysharding.group.fit.predict_run import PredictReport, PredictRun
from raysharding.group.fit.report import FitReport, FitStep
from raysharding.group.fit.run import Callback, FitOptions, FitRun
