"""For `fit`: `EarlyStop`, and callbacks that log to Ray, TensorBoard, Weights & Biases, MLflow and accelerate."""

from raysharding.group.fit import EarlyStop, MLflow, RayGauges, TensorBoard, Tracker, WeightsAndBiases, figures

__all__ = ["EarlyStop", "MLflow", "RayGauges", "TensorBoard", "Tracker", "WeightsAndBiases", "figures"]
