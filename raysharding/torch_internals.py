"""torch's private names that several rooms use; FSDP2's are in `fully_shard/internals.py`, DTensor's in `layout.py`.

Seen in torch 2.13. torch has no public name for any of them, so there is no fallback: a name that torch moves
fails at import, here.
"""

from torch._C import _current_graph_task_id as current_graph_task_id
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.utils._python_dispatch import TorchDispatchMode
