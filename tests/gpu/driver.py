"""A driver's cluster, groups and oracle, for the parts of `run.sh` that start groups through Ray."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from torch import nn

from raysharding import Placement, ShardedModelGroup, Split, Timeouts
from tests import forking
from tests.distributed.training.training_cases import VOCAB, llama

NUM_ROWS, LENGTH = 8, 6
TIMEOUTS = Timeouts(place_s=30.0, start_s=60.0, rendezvous_s=60.0, load_stall_s=30.0, call_s=60.0)
"""A check that hangs costs a minute, not the others' time."""
CLOSE = 1e-4
"""Largest difference from one process on the CPU, relative to the largest value."""


@contextlib.contextmanager
def cluster(kind: str) -> Iterator[Path]:
    """A cluster on this machine whose workers are forked, and a folder with a tiny Llama in `model`."""
    if kind == "sim":
        from tests.accelerator.device import register

        register()
    with tempfile.TemporaryDirectory() as folder, forking.worker_python() as program:
        torch.manual_seed(0)
        llama().save_pretrained(Path(folder, "model"))  # type: ignore[operator]
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
        options |= {"num_gpus": 4} if kind == "sim" else {}
        with forking.ray_starts_with(program):
            ray.init("local", num_cpus=8, runtime_env=forking.runtime_env(), **options)
        try:
            yield Path(folder)
        finally:
            ray.shutdown()


def placement(kind: str, world_size: int) -> Placement:
    """Room for two groups of so many ranks and one rank more, which share GPUs where there are too few."""
    fields: dict[str, Any] = {"cpus_per_rank": 0.25}
    if kind == "sim":
        fields["runtime_env"] = {"env_vars": {forking.DEVICE: "sim"}}
    gpus = ray.cluster_resources().get("GPU", 0.0) if kind != "cpu" else 0.0
    if 0 < gpus < (num_ranks := 2 * world_size + 1):
        fields["gpus_per_rank"] = int(1000 / math.ceil(num_ranks / gpus)) / 1000
    return Placement(**fields)


def start(path: Path, kind: str, world_size: int, room_for: int | None = None, **options: Any) -> ShardedModelGroup:
    """A group on devices of a kind, in a cluster with room for groups of `room_for` ranks."""
    given = {"placement": placement(kind, room_for or world_size), "timeouts": TIMEOUTS, "progress": False, **options}
    return ShardedModelGroup.from_checkpoint(path, device=kind, world_size=world_size, **given)


def ids(seed: int = 0, num_rows: int = NUM_ROWS) -> torch.Tensor:
    """Rows of tokens."""
    return torch.randint(3, VOCAB, (num_rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Rows to train on, whose labels are masked unevenly."""
    labels = ids(seed)
    labels[0] = labels[3, 1:] = labels[5, :4] = -100
    return {"input_ids": ids(seed), "labels": labels}


def alone(path: Path) -> nn.Module:
    """The model in this process, on the CPU."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(path)
    return model.eval()


def logits(path: Path | nn.Module) -> torch.Tensor:
    """Those of one process."""
    with torch.no_grad():
        found: torch.Tensor = (path if isinstance(path, nn.Module) else alone(path))(input_ids=ids()).logits
    return found


def differ(what: str, found: Any, expected: Any, close: float = CLOSE) -> str:
    """Return by how much tensors, or lists of numbers, differ; an error if that is too much."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), f"{what}: {found.keys() ^ expected.keys()}"
        found, expected = ([one[name] for name in expected] for one in (found, expected))
    pairs = list(zip(*(one if isinstance(one, list) else [one] for one in (found, expected)), strict=True))
    largest = 0.0
    for one, other in pairs:
        one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (one, other))
        assert one.shape == other.shape, f"{what}: {one.shape}, expected {other.shape}"
        assert one.isfinite().all(), f"{what} are not finite: {one}"
        largest = max(largest, float((one - other).abs().max() / other.abs().max().clamp_min(1e-12)))
    said = f"{what} differ by {largest:.1e}"
    assert largest < close, f"{said}, more than {close:g}"
    return said


def forward(group: ShardedModelGroup, expected: torch.Tensor, close: float = CLOSE) -> str:
    """The group's logits are those of one process."""
    return differ("logits", group.forward(input_ids=Split(ids())).logits, expected, close)
