"""The old name of `raysharding.callbacks`."""

from raysharding.group.fit import EarlyStop, MLflow, RayGauges, TensorBoard, Tracker, WeightsAndBiases, figures

__all__ = ["EarlyStop", "MLflow", "RayGauges", "TensorBoard", "Tracker", "WeightsAndBiases", "figures"]
