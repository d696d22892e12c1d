"""The driver's part of a training run over data: steps, saves, restarts, callbacks, the report."""

from raysharding.group.fit.callbacks import MLflow as MLflow
from raysharding.group.fit.callbacks import RayGauges as RayGauges
from raysharding.group.fit.callbacks import TensorBoard as TensorBoard
from raysharding.group.fit.callbacks import WeightsAndBiases as WeightsAndBiases
from raysharding.group.fit.callbacks import figures as figures
from raysharding.group.fit.datasets import DatasetHandle as DatasetHandle
from raysharding.group.fit.datasets import dataset_handle as dataset_handle
from raysharding.group.fit.lock import FitLock as FitLock
from raysharding.group.fit.report import FitReport as FitReport
from raysharding.group.fit.report import FitStep as FitStep
from raysharding.group.fit.run import Callback as Callback
from raysharding.group.fit.run import FitOptions as FitOptions
from raysharding.group.fit.run import FitRun as FitRun
