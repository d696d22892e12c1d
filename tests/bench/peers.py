"""How other libraries load a checkpoint into an FSDP2 module, each used as its documentation says.

A loader is called by every rank with the module, sharded on meta, and the checkpoint's directory; it leaves the module
with this rank's shards. `PEERS` lists them. transformers builds its own module: see `Peer.builds_module`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading
from raysharding.distributed import init_mesh, load_checkpoint, materialize, shard_module
from raysharding.distributed.comm import current_device
from raysharding.distributed.fully_shard.layout import message_device
from raysharding.models import build_module

NUM_TOKENS = 8
"""In the first forward."""


@dataclass(frozen=True)
class Peer:
    """One way to load, as the benchmark runs it."""

    name: str
    load: Callable[[nn.Module, Path], None] | None
    """Fills a module that is sharded on meta; `None` if the peer builds its own module."""
    build_and_load: Callable[[Path, torch.dtype | None], nn.Module] | None = None
    """Builds, shards and loads the module of a Hugging Face directory, in the dtype given or config.json's."""
    requires: tuple[str, ...] = ()
    """Modules that must be importable, imported by `imports`; the first names the distribution to install."""
    device: str | None = None
    """The only type of device that it loads to. Default: any."""

    @property
    def builds_module(self) -> bool:
        """Whether the module is made inside the clock, by the peer."""
        return self.load is None

    def imports(self) -> None:
        """Import what the loader imports: that is no part of a load.

        Raises:
            ModuleNotFoundError: When it is not installed.
        """
        for name in self.requires:
            importlib.import_module(name)

    def run(self, module: nn.Module | None, directory: Path, dtype: torch.dtype | None = None) -> nn.Module:
        """Load; collective. Returns the loaded module: the one given, or the peer's own.

        Args:
            module: Sharded on meta; not used if `builds_module`.
            directory: Hugging Face directory.
            dtype: For a peer that builds its module; others load into the dtype that the module has.
        """
        if self.build_and_load is not None:
            return self.build_and_load(directory, dtype)
        assert self.load is not None
        assert module is not None, f"{self.name} loads into a module that is sharded on meta"
        self.load(module, directory)
        return module


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files, in the order of their names."""
    return sorted(directory.glob("*.safetensors"))


def full_state_dict(directory: Path, module: nn.Module) -> dict[str, torch.Tensor]:
    """Everything in the files on rank 0, under every name of the module; nothing on the other ranks.

    Mapped, not read: `load_file` copies nothing until the loader does.
    """
    if dist.get_rank() != 0:
        return {}
    tensors: dict[str, torch.Tensor] = {}
    for file in checkpoint_files(directory):
        tensors.update(load_file(file))
    add_aliases(module, tensors)
    return {name: tensors[name] for name in module.state_dict()}


def add_aliases(module: nn.Module, tensors: dict[str, Any]) -> None:
    """Give each name of a tied tensor the value that the checkpoint holds under one of them."""
    values = {value: tensors[name] for name, value in _named_tensors(module) if name in tensors}
    for name, value in _named_tensors(module):
        if value in values:
            tensors.setdefault(name, values[value])


def _named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def load_with_accelerate(module: nn.Module, directory: Path) -> None:
    """accelerate's FSDP2 loader (`cpu_ram_efficient_loading`): a broadcast, then a scatter, per tensor."""
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    # The loader reads nothing else of the Accelerator.
    accelerator = SimpleNamespace(is_main_process=dist.get_rank() == 0)
    targets = module.state_dict()
    # In the model's dtypes, as rank 0 has it after `from_pretrained(dtype=...)`: the broadcast takes no other.
    full = {name: value.to(targets[name].dtype) for name, value in full_state_dict(directory, module).items()}
    fsdp2_load_full_state_dict(accelerator, module, full)


def load_with_torch(module: nn.Module, directory: Path) -> None:
    """torch's `set_model_state_dict` from a full state dict on rank 0: a broadcast per tensor.

    Into materialised shards: left on meta, the module would be assigned slices that keep more memory, and take longer.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state_dict: dict[str, Any] = dict(full_state_dict(directory, module))
    materialize(module, message_device(module))  # `Module.to_empty` that keeps ties
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, state_dict, options=options)


def load_with_dcp(module: nn.Module, directory: Path) -> None:
    """torch's distributed checkpoint: every rank reads its slices through `HuggingFaceStorageReader`'s maps."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    materialize(module, message_device(module))
    persistent = module.state_dict()
    # The planner wants every key in the files, and those have each tied tensor once: under its first name.
    first_names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    tensors: dict[str, Any] = {name: persistent[name] for name in first_names if name in persistent}
    load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)))


def load_with_fastsafetensors(module: nn.Module, directory: Path) -> None:
    """fastsafetensors: each rank reads whole files, a tensor is scattered by the rank that has it.

    Files are dealt out as in its examples. Its scatter takes equal parts only: a tensor whose rows the world size does
    not divide is broadcast and cut. Shards are assigned, not copied.
    """
    from fastsafetensors import SafeTensorsFileLoader

    world_size = dist.get_world_size()
    device = message_device(module)
    files: dict[int, list[str]] = {rank: [] for rank in range(world_size)}
    for index, file in enumerate(checkpoint_files(directory)):
        files[index % world_size].append(str(file))
    targets = module.state_dict()
    loaded: dict[str, Any] = {}
    loader = SafeTensorsFileLoader(dist.group.WORLD, str(device), nogds=True)
    loader.add_filenames(files)
    buffers = loader.copy_files_to_device()
    for name in loader.get_keys():
        target = targets[name]
        if not isinstance(target, DTensor):
            loaded[name] = buffers.get_tensor(name).to(target.dtype)
        elif target.shape[0] % world_size:
            loaded[name] = _as_shard(_own_rows(buffers.get_tensor(name), target).clone(), target)
        else:
            loaded[name] = _as_shard(buffers.get_sharded(name, dim=0), target)
    buffers.close()
    loader.close()
    assign(module, loaded)


def load_with_safetensors_cuda(module: nn.Module, directory: Path) -> None:
    """safetensors' own loader to this rank's GPU, file by file; a shard is cut from the full tensor there."""
    device = message_device(module)
    if device.type != "cuda":
        raise ValueError(f"the module is sharded over a {device.type} mesh: this loader fills modules on GPUs")
    files = checkpoint_files(directory)
    assign_rows(module, (item for file in files for item in load_file(file, device=str(device)).items()))


def load_with_runai(module: nn.Module, directory: Path) -> None:
    """run:ai's streamer: every rank streams all files to its device, and keeps its rows."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(file) for file in checkpoint_files(directory)], device=str(message_device(module)))
        assign_rows(module, streamer.get_tensors())


def load_with_instanttensor(module: nn.Module, directory: Path) -> None:
    """InstantTensor, all files in one call; with several ranks it coordinates their reads through NCCL.

    Through the page cache, as all arms: its default, direct I/O, is for cold files.
    """
    from instanttensor import BackendPolicy, safe_open

    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    files = [str(file) for file in checkpoint_files(directory)]
    device = message_device(module)
    with safe_open(files, "pt", device, process_group=group, backend=BackendPolicy.BUFFERED) as opened:
        assign_rows(module, opened.tensors())


def assign_rows(module: nn.Module, full: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Make this rank's rows of full tensors, which own their memory, the module's shards."""
    targets = module.state_dict()
    loaded: dict[str, Any] = {}
    for name, tensor in full:
        target = targets[name]
        if not isinstance(target, DTensor):
            loaded[name] = tensor.to(target.dtype)
            continue
        rows = _own_rows(tensor, target)
        # A view of some rows would keep the whole tensor.
        loaded[name] = _as_shard(rows if len(rows) == len(tensor) else rows.clone(), target)
    assign(module, loaded)


def _own_rows(tensor: torch.Tensor, target: DTensor) -> torch.Tensor:
    """A view of the rows of a full tensor that this rank's shard holds."""
    shard_rows = -(-target.shape[0] // target.device_mesh.size())
    return tensor[target.device_mesh.get_local_rank() * shard_rows :][:shard_rows]


def _as_shard(local: torch.Tensor, target: DTensor) -> DTensor:
    """A DTensor like `target`, in its dtype, that owns this rank's part."""
    return DTensor.from_local(
        local.to(target.dtype),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def assign(module: nn.Module, tensors: dict[str, Any]) -> None:
    """Make `tensors` (FQN → shard or buffer) the module's own, ties kept."""
    flags = {value: value.requires_grad for value in module.parameters()}
    own = dict(module.named_parameters(remove_duplicate=False))
    for name, value in list(tensors.items()):
        if name in own:
            # `load_state_dict` takes a Parameter as it is, so that tied names share one.
            tensors[name] = nn.Parameter(value, requires_grad=flags[own[name]])
    add_aliases(module, tensors)
    module.load_state_dict(tensors, assign=True)


def load_with_transformers(directory: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """transformers' native FSDP2 loading: builds the model that config.json names, every rank takes its slices.

    On CPU the shards are views of the mapped files: nothing is read before it is used. Time it to the end of a forward.
    """
    import transformers
    from transformers import AutoConfig, DistributedConfig

    # The class that config.json names, as ours builds it; the user of an auto class knows which one to take.
    model_class = getattr(transformers, AutoConfig.from_pretrained(directory).architectures[0])
    distributed_config = DistributedConfig(fsdp_size=dist.get_world_size())
    model: nn.Module = model_class.from_pretrained(
        directory, dtype=dtype or "auto", distributed_config=distributed_config
    )
    return model


def load_with_device_map(directory: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """transformers without sharding: `device_map` with this rank's device, one rank only."""
    import transformers
    from transformers import AutoConfig

    if dist.get_world_size() > 1:
        raise ValueError("device_map puts the whole model on one device: measure it with --world-size 1")
    model_class = getattr(transformers, AutoConfig.from_pretrained(directory).architectures[0])
    backends = (one.split(":") for one in dist.get_backend_config().split(","))
    device = current_device(next((kind for kind, backend in backends if backend != "gloo"), "cpu"))
    model: nn.Module = model_class.from_pretrained(directory, dtype=dtype or "auto", device_map={"": device})
    return model


def transformers_with_forward(directory: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """`load_with_transformers` to the end of the first forward: what a lazily mapped load costs shows only there."""
    module = load_with_transformers(directory, dtype)
    first_forward(module)
    return module


def load_with_forward(directory: Path, loading: Loading) -> nn.Module:
    """Ours, as `transformers_with_forward` does it: builds, shards and loads the module, then runs the first forward.

    Of a Hugging Face directory, into the dtype that `loading` names; collective.
    """
    module = build_module(None, open_checkpoint(directory), loading.dtype)
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    shard_module(module, init_mesh(device_type))
    load_checkpoint(module, str(directory), loading=loading)
    first_forward(module)
    return module


def first_forward(module: nn.Module) -> torch.Tensor:
    """Logits [1, NUM_TOKENS, vocabulary] of fixed tokens, on every rank: few, so that the weights' way in counts."""
    tokens = torch.arange(NUM_TOKENS, device=message_device(module))[None]
    with torch.no_grad():
        logits: torch.Tensor = module(input_ids=tokens).logits
    return logits


_TRANSFORMERS = ("transformers", "transformers.modeling_utils")

_PEERS = (
    Peer("accelerate", load_with_accelerate, requires=("accelerate", "accelerate.utils.fsdp_utils")),
    Peer("torch", load_with_torch, requires=("torch", "torch.distributed.checkpoint.state_dict")),
    Peer("dcp", load_with_dcp, requires=("torch", "torch.distributed.checkpoint.hf_storage")),
    Peer("transformers", None, load_with_transformers, requires=_TRANSFORMERS),
    Peer("transformers_device_map", None, load_with_device_map, requires=(*_TRANSFORMERS, "accelerate")),
    Peer("transformers_forward", None, transformers_with_forward, requires=_TRANSFORMERS),
    Peer("fastsafetensors", load_with_fastsafetensors, requires=("fastsafetensors",)),
    Peer("runai", load_with_runai, requires=("runai_model_streamer",)),
    Peer("instanttensor", load_with_instanttensor, requires=("instanttensor",), device="cuda"),
    Peer("safetensors_cuda", load_with_safetensors_cuda, requires=("safetensors", "safetensors.torch"), device="cuda"),
)

PEERS: Mapping[str, Peer] = {peer.name: peer for peer in _PEERS}
"""Name → peer. What a peer cannot load is stated with the checkpoint: see `checkpoints.KINDS`."""
