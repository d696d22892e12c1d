"""What ranks do in the tests of merging: save as accelerate and torch do, and merge together."""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from raysharding.checkpoint import DcpReader
from raysharding.distributed import merge_fsdp_weights
from raysharding.distributed.saving import merge_dcp as merging
from raysharding.errors import CheckpointError


class Odd(nn.Module):
    """Sizes that no world size divides, two dtypes, buffers of every kind, a tie."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.low = nn.Sequential(nn.Linear(3, 7, bias=False), nn.Linear(7, 1)).bfloat16()
        self.embed = nn.Embedding(11, 3)
        self.head = nn.Linear(3, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("empty", torch.zeros(0, 4, dtype=torch.float16))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Shape (rows, 5) to (rows, 11)."""
        hidden = self.norm(self.first(rows))
        return self.head(hidden) + self.low(hidden.bfloat16()).float()


def trained(version: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """On every rank: a sharded model and its optimizer, after a step."""
    odd = Odd()
    model: nn.Module = odd
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if version == 2:
        for module in (odd.low, odd):
            fully_shard(module, mesh=mesh)
    else:
        # FSDP1 wants one dtype, and no tie, in what it shards.
        shardable = nn.Sequential(odd.first, odd.norm)
        model = FullyShardedDataParallel(shardable, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(1))).sum().backward()
    optimizer.step()
    return model, optimizer


def save_as_accelerate_does(root: Path, version: int) -> None:
    """On every rank: model and optimizer with one key around each, in two directories."""
    model, optimizer = trained(version)
    if version == 2:
        states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    else:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            states = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
    for name, key, state in zip(("pytorch_model_fsdp_0", "optimizer_0"), ("model", "optimizer"), states, strict=True):
        save({key: state}, checkpoint_id=root / f"fsdp{version}" / name)


def save_with_accelerate(root: Path, version: int) -> None:
    """On every rank: the same by accelerate itself."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, and not used: there is a group
    PartialState(cpu=True)  # its logger asks for it
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    model, optimizer = trained(version)
    stand_in = SimpleNamespace(process_index=rank, num_processes=world_size, is_fsdp2=version == 2)
    save_fsdp_model(plugin, stand_in, model, str(root / f"fsdp{version}"))
    save_fsdp_optimizer(plugin, stand_in, optimizer, model, str(root / f"fsdp{version}"))


def tiny_llama(tie: bool) -> Any:
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=tie)
    return LlamaForCausalLM(config).bfloat16()


def save_llama(root: Path) -> None:
    """On every rank: a plain `dcp.save` of a transformers model that FSDP2 sharded, and config.json for the result."""
    for tie in (False, True):
        model = tiny_llama(tie)
        name = "tied" if tie else "llama"
        if dist.get_rank() == 0:
            model.config.save_pretrained(root / f"{name}-merged")
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        save(get_model_state_dict(model), checkpoint_id=root / name)


MESHES = {
    "rows, columns": (Shard(0), Shard(1)),
    "columns, rows": (Shard(1), Shard(0)),
    "rows twice": (Shard(0), Shard(0)),
    "replicated": (Replicate(), Shard(2)),
    "last": (Shard(2), Shard(1)),
}


def mesh_tensor(index: int) -> torch.Tensor:
    """An odd shape, random."""
    return torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(index))


def save_meshes(root: Path) -> None:
    """On four ranks: tensors cut along two dimensions of a 2-D mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    state = {name: distribute_tensor(mesh_tensor(i), mesh, p) for i, (name, p) in enumerate(MESHES.items())}
    hsdp = Odd()
    for module in (hsdp.low, hsdp):
        fully_shard(module, mesh=mesh)
    full = {f"hsdp.{name}": tensor for name, tensor in hsdp.state_dict().items()}
    assert any(isinstance(tensor, DTensor) for tensor in full.values())
    save(state | full, checkpoint_id=root / "meshes")


def save_all(root: Path) -> dict[str, Any]:
    """On every rank: everything that the tests merge; two ranks also merge together."""
    warnings.simplefilter("ignore")
    world_size = dist.get_world_size()
    for version in (2, 1):
        save_one = save_with_accelerate if world_size == 2 else save_as_accelerate_does
        save_one(root, version)
    if world_size == 4:
        save_meshes(root)
    if world_size != 2:
        return {}
    save_llama(root)
    return merge_together(root)


def raised_by(*arguments: Any) -> str:
    """Type and message of what a merge raises on this rank."""
    try:
        merge_fsdp_weights(*arguments)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def merge_together(root: Path) -> dict[str, Any]:
    """On every rank: a merge that goes well, one that does not, and one that takes longer than a message may."""
    source = root / "fsdp2" / "pytorch_model_fsdp_0"
    merge_fsdp_weights(source, root / "merged")
    found = {"files": sorted(os.listdir(root / "merged")), "wrong": raised_by(root / "fsdp2", root / "nothing")}
    # A timeout that the wait for the whole merge would break.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    dist.barrier()
    read_tensor = DcpReader.read_tensor

    def slow(self: DcpReader, key: str, write: Any) -> None:
        time.sleep(0.2)
        read_tensor(self, key, write)

    merging.HEARTBEAT_S = 0.3
    DcpReader.read_tensor = slow  # type: ignore[method-assign]
    started = time.monotonic()
    merge_fsdp_weights(root / "llama", root / "slow")
    return found | {"seconds": time.monotonic() - started}
