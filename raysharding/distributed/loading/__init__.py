"""Loading of a module from files or a state dict."""

from raysharding.distributed.loading.full_state_dict import (
    distribute_state_dict,
    extra_state_owners,
    load_full_state_dict,
    load_full_tensors,
)
from raysharding.distributed.loading.load import load_checkpoint
from raysharding.distributed.loading.plan import Progress, silent
from raysharding.distributed.loading.report import LoadReport
