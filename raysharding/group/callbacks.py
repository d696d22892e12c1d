"""The old name of `raysharding.callbacks`."""

from raysharding.group.fit import MLflow, RayGauges, TensorBoard, WeightsAndBiases, figures

__all__ = ["MLflow", "RayGauges", "TensorBoard", "WeightsAndBiases", "figures"]
