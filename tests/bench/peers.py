"""How other libraries load a full checkpoint into an FSDP2 module that is sharded on meta.

Each loader is called by every rank with the module and the checkpoint's directory. Rank 0 alone opens the files, with
`safetensors.torch.load_file`, which maps them: it copies nothing until the loader does.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn


def full_state_dict(directory: Path) -> dict[str, torch.Tensor]:
    """Everything in the files on rank 0, nothing on the other ranks."""
    if dist.get_rank() != 0:
        return {}
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def load_with_accelerate(module: nn.Module, directory: Path) -> None:
    """accelerate's FSDP2 loader (`cpu_ram_efficient_loading`): a broadcast, then a scatter, per tensor."""
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    # The loader reads nothing else of the Accelerator.
    accelerator = SimpleNamespace(is_main_process=dist.get_rank() == 0)
    fsdp2_load_full_state_dict(accelerator, module, full_state_dict(directory))


def load_with_torch(module: nn.Module, directory: Path) -> None:
    """torch's `set_model_state_dict` from a full state dict on rank 0: a broadcast per tensor.

    Into materialised shards: left on meta, the module would be assigned slices that keep more memory, and take longer.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    module.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dict: dict[str, Any] = dict(full_state_dict(directory))
    set_model_state_dict(module, state_dict, options=options)
