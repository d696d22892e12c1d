"""`Accumulation`: backward passes that add up to the gradient of one loss over all of their rows.

The loss of several batches is the mean over what counts in all of them: the sum of each one's loss times what it
weighs, by the sum of the weights. How much the later batches weigh is not known yet when the first one's backward
runs. So its gradients are taken as they are, those of the others are scaled to its weight, and all are divided, before
the update, by what the first one weighs among all. One pass alone is scaled by nothing.
"""

from __future__ import annotations

from torch import nn

from raysharding.distributed.gradients import scale_gradients
from raysharding.distributed.loss import LossShare
from raysharding.errors import EmptyBatchError


class Accumulation:
    """The passes since the last update. The same on every rank; no collectives."""

    def __init__(self) -> None:
        """No passes yet."""
        self.num_passes = 0
        self.is_reduced = True
        self._weighed_loss = 0.0
        self._weight = 0.0
        self._first = 0.0
        self._is_sum = False

    def scale(self, share: LossShare) -> float:
        """Return what the next pass's share is to be multiplied with before its backward.

        Raises:
            ValueError: On every rank, when its loss is a sum and earlier ones are means, or the other way round.
        """
        # A pass in which nothing counted may not have shown its loss to be a sum.
        if (self._is_sum or self._weight) and self._is_sum != (share.weight is None):
            kinds = "a mean", "a sum"
            raise ValueError(
                f"the loss of this batch is {kinds[share.weight is None]}, those accumulated before it are "
                f"{kinds[self._is_sum]}: one update needs one kind of loss; call optim_step or zero_grad in between"
            )
        return 1.0 if share.weight is None or not self._first else share.weight / self._first

    def add(self, loss: float, weight: float | None, *, is_reduced: bool) -> None:
        """Note a pass.

        Args:
            loss: Of its whole batch.
            weight: See `LossShare`.
            is_reduced: Whether its backward reduced the gradients of all passes so far.
        """
        self.num_passes += 1
        self.is_reduced = is_reduced
        self._is_sum = weight is None
        self._weight += weight or 0.0
        self._first = self._first or (weight or 0.0)
        if weight is None:
            self._weighed_loss += loss
        elif weight:  # the loss of nothing may be NaN, and NaN · 0 is no 0
            self._weighed_loss += loss * weight

    def loss(self) -> float:
        """Return the loss over all passes; NaN where nothing counted in any of them."""
        if self._is_sum:
            return self._weighed_loss
        return self._weighed_loss / self._weight if self._weight else float("nan")

    def finish(self, module: nn.Module) -> None:
        """Make the gradients of the passes that of the loss over all of them.

        Raises:
            EmptyBatchError: On every rank, when nothing counted in any pass.
            ValueError: On every rank, when they were not reduced.
        """
        if not self.is_reduced:
            raise ValueError(
                "the gradients were not reduced: the last forward_backward before optim_step must have sync=True"
            )
        if self.num_passes and not self._is_sum and not self._weight:
            raise EmptyBatchError(
                "no label counts in any of the accumulated batches, so there is nothing to learn from"
            )
        if self.num_passes > 1 and not self._is_sum:
            scale_gradients(module, self._first / self._weight)
