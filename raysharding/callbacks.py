"""Callbacks for `fit(callbacks=...)`: metrics for Ray, TensorBoard, Weights & Biases and MLflow."""

from raysharding.group.fit import MLflow, RayGauges, TensorBoard, WeightsAndBiases, figures

__all__ = ["MLflow", "RayGauges", "TensorBoard", "WeightsAndBiases", "figures"]
