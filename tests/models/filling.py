"""Fill a module from a checkpoint by its `KeyMap`, in one process: what the distributed loader does, in ten lines."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from raysharding.checkpoint import Checkpoint, FileReader
from raysharding.models import Initialiser, KeyMap, Target, map_keys


def target_value(target: Target, checkpoint: Checkpoint, reader: FileReader) -> torch.Tensor:
    """The full value of one target, in the module's dtype."""

    def read(key: str) -> torch.Tensor:
        return reader.read_tensor(checkpoint.tensors[key])

    if target.runs is None:
        return target.convert(read).to(target.dtype)
    flat = torch.empty(target.shape, dtype=target.source_dtype).flatten()
    filled = torch.zeros(flat.numel(), dtype=torch.int32)
    for run in target.runs:
        source = read(run.source).flatten()[run.source_start : run.source_start + run.num_elements]
        flat[run.target_start : run.target_start + run.num_elements] = source
        filled[run.target_start : run.target_start + run.num_elements] += 1
    assert bool((filled == 1).all()), f"{target.fqn}: the ranges overlap or leave a gap"
    return flat.reshape(target.shape).to(target.dtype)


def load_values(
    module: nn.Module, checkpoint: Checkpoint, key_mapping: dict[str, str] | None = None
) -> tuple[KeyMap, dict[str, torch.Tensor]]:
    """(key map, FQN → value for every name of every parameter and buffer that is on meta)."""
    keys = map_keys(module, checkpoint.tensors, key_mapping)
    with FileReader(checkpoint.files) as reader:
        values = {fqn: target_value(target, checkpoint, reader) for fqn, target in keys.targets.items()}
    initialiser = Initialiser(module, 0)
    values |= {fqn: initialiser.value(fqn) for fqn in keys.initialise}
    return keys, values | {alias: values[fqn] for alias, fqn in keys.aliases.items() if fqn in values}


def everything(module: nn.Module) -> dict[str, torch.Tensor]:
    """FQN → tensor for every name of every parameter and buffer."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return tensors | dict(module.named_buffers(remove_duplicate=False))


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the weights of a saved model."""
    from safetensors.torch import save_file

    for old in folder.glob("*.safetensors*"):
        old.unlink()
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / "model.safetensors")
