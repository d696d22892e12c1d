"""The loss of a whole batch, read from each rank's; how a loss function is called."""

from raysharding.distributed.training.losses.calls import (
    LossFunction,
    call_model,
    call_on_output,
    find_loss,
    known_arguments,
    positions_of,
)
from raysharding.distributed.training.losses.whole_batch import BatchLoss, forward_with_loss, loss_of_batch
