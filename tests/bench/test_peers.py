"""Every peer leaves the same shards as cutting the full tensors does: what is compared must be the same load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.config import Loading
from raysharding.distributed import init_mesh, shard_module
from tests.bench.checkpoints import KINDS, build, make
from tests.bench.peers import PEERS, checkpoint_files, first_forward, load_with_forward
from tests.bench.test_checkpoints import TINY_GIB
from tests.spawn import run_ranks

LOADERS = ("accelerate", "torch", "dcp", "transformers", "fastsafetensors")


def named_locals(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """FQN, local part, and whether it is a shard: all parameters, and the buffers that a checkpoint holds."""
    saved = module.state_dict()
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in saved]
    for name, tensor in (*module.named_parameters(), *buffers):
        is_cut = isinstance(tensor, DTensor)
        yield name, (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach(), is_cut


def differences(module: nn.Module, full: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> list[str]:
    """Names whose local part differs, bit by bit, from this rank's chunk of the full tensor, and what is missing."""
    wrong = []
    seen = set()
    for name, local, is_cut in named_locals(module):
        seen.add(name)
        expected = full[name].to(dtype or full[name].dtype)
        if is_cut:
            chunks = expected.chunk(dist.get_world_size())
            rank = dist.get_rank()
            expected = chunks[rank] if rank < len(chunks) else expected[:0]
        if local.dtype != expected.dtype or not torch.equal(_bits(local), _bits(expected)):
            wrong.append(f"{name}: {local.dtype} {tuple(local.shape)}, expected {expected.dtype} {expected.shape}")
    return wrong + [f"{name}: not in the module" for name in full.keys() - seen]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check_peers(directories: Mapping[str, Path], names: Sequence[str]) -> dict[str, list[str]]:
    """On every rank: these peers on all kinds that they can load; returns what went wrong for each."""
    wrong: dict[str, list[str]] = {}
    for kind, directory in directories.items():
        full = {name: value for file in checkpoint_files(directory) for name, value in load_file(file).items()}
        for peer in (PEERS[name] for name in names if name not in KINDS[kind].cannot):
            peer.imports()
            module = None if peer.builds_module else shard_module(build(kind, directory), init_mesh("cpu"))
            loaded = peer.run(module, directory, KINDS[kind].dtype)
            found = differences(loaded, full, KINDS[kind].dtype)
            if kind == "odd" and loaded.get_parameter("head.weight") is not loaded.get_parameter("embed.weight"):
                found.append("head.weight and embed.weight are no longer one")
            wrong[f"{kind}, {peer.name}"] = found
    return wrong


def check_forwards(directory: Path) -> list[float]:
    """The first logits of transformers' native loading and of ours, on every rank."""
    theirs = first_forward(PEERS["transformers_forward"].run(None, directory))
    ours = first_forward(load_with_forward(directory, Loading(transport="scatter")))
    assert ours.shape == theirs.shape == (1, 8, 32_000)
    assert ours.isfinite().all()
    return [float((ours - theirs).abs().max()), float(ours.abs().max())]


def check_refusals(directories: Mapping[str, Path]) -> dict[str, str]:
    """What happens when peers load the kinds that they are said not to load; only those that every rank refuses."""
    raised = {}
    for kind, directory in directories.items():
        for name in KINDS[kind].cannot:
            peer = PEERS[name]
            module = None if peer.builds_module else shard_module(build(kind, directory), init_mesh("cpu"))
            try:
                peer.run(module, directory)
                raised[f"{kind}, {name}"] = "nothing"
            except (RuntimeError, ValueError, AttributeError) as error:
                raised[f"{kind}, {name}"] = str(error)
    return raised


def check_everything(directories: Mapping[str, Path]) -> tuple[dict[str, list[str]], list[float], dict[str, str]]:
    """One group for all checks: most of the time goes into imports."""
    wrong, forwards = check_peers(directories, LOADERS), check_forwards(directories["dense"])
    return wrong, forwards, check_refusals({kind: directories[kind] for kind in ("odd", "fp8")})


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each kind."""
    root = tmp_path_factory.mktemp("kinds")
    for kind, size_gib in TINY_GIB.items():
        make(kind, root / kind, size_gib, num_files=3)
    return {kind: root / kind for kind in TINY_GIB}


@pytest.mark.full
@pytest.mark.timeout(120)
def test_every_peer_loads_the_same_bits_on_two_ranks(directories: dict[str, Path]) -> None:
    for wrong, (difference, largest), raised in run_ranks(2, check_everything, directories, timeout_s=110):
        assert {name: found for name, found in wrong.items() if found} == {}
        assert len(wrong) == 22
        assert difference == 0
        assert largest > 0
        float8 = {message for name, message in raised.items() if name.startswith("fp8") and "transformers" not in name}
        assert float8 == {"Invalid scalar type"}
        assert "nothing" not in raised.values()


@pytest.mark.full
@pytest.mark.timeout(120)
def test_every_peer_loads_the_same_bits_on_four_ranks(directories: dict[str, Path]) -> None:
    # Without the two that take seconds to import: the benchmark itself compares all arms' bytes at W = 4.
    few = {kind: directories[kind] for kind in ("huge", "odd")}
    for wrong in run_ranks(4, check_peers, few, ("torch", "dcp", "fastsafetensors"), timeout_s=110):
        assert len(wrong) == 6
        assert {name: found for name, found in wrong.items() if found} == {}


def test_cuda_loader_refuses_a_module_of_the_cpu(directories: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="cpu mesh"):
        PEERS["safetensors_cuda"].run(nn.Linear(2, 2), directories["dense"])
