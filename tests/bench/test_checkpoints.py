"""Benchmark checkpoints: what `make` writes is what `build`'s module takes, for every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raysharding.units import GIB
from tests.bench.checkpoints import KINDS, assign_files, build, make
from tests.bench.peers import PEERS, checkpoint_files

TINY_GIB = {"dense": 0.02, "fp32": 0.02, "small": 0.002, "huge": 0.004, "odd": 0.025, "fp8": 0.002}


@pytest.mark.parametrize("kind", KINDS)
def test_files_fill_the_module(kind: str, tmp_path: Path) -> None:
    directory = tmp_path / "made"
    make(kind, directory, TINY_GIB[kind], num_files=3)
    module = build(kind, directory)
    files = checkpoint_files(directory)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    missing = module.state_dict().keys() - tensors.keys()
    assert missing == ({"head.weight"} if kind == "odd" else set())
    for name, tensor in tensors.items():
        target = module.state_dict()[name]
        assert target.shape == tensor.shape
        assert target.dtype == (KINDS[kind].dtype or tensor.dtype)
    assert all(parameter.is_meta for parameter in module.parameters())
    values = [tensor.reshape(-1).view(torch.uint8)[:64].numpy().tobytes() for tensor in tensors.values()]
    assert len(set(values)) == len(values), "tensors that hold the same values hide a mix-up"
    size_gib = sum(file.stat().st_size for file in files) / GIB
    assert size_gib == pytest.approx(TINY_GIB[kind], rel=0.35)
    assert len(files) in (2, 3)


def test_kinds_have_the_size_that_they_state() -> None:
    for kind in KINDS.values():
        if kind.module is None:
            continue
        with torch.device("meta"):
            module = kind.module(**kind.arguments(kind.size_gib))
        num_bytes = sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())
        assert num_bytes == pytest.approx(kind.size_gib * GIB, rel=0.02)
    small = KINDS["small"]
    assert small.module is not None
    with torch.device("meta"):
        assert len(list(small.module(**small.arguments(small.size_gib)).parameters())) == 20_000


def test_reasons_name_peers() -> None:
    for kind in KINDS.values():
        assert kind.cannot.keys() <= PEERS.keys()
        assert all(kind.cannot.values())


def test_large_tensors_leave_no_file_out() -> None:
    assert set(assign_files({"a": 1, "b": 100, "c": 1}, 4).values()) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
