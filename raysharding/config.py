"""How a group is sharded, loaded, placed and timed: four frozen dataclasses, validated when made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Transport = Literal["auto", "broadcast", "scatter", "local"]
Verify = Literal["header", "finite", "full"]

MIB = 1 << 20


def _require(condition: bool, name: str, value: object, cure: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r}: {cure}")


@dataclass(frozen=True)
class Sharding:
    """How a module is cut over the ranks."""

    wrap: str | Sequence[str] | Callable[[nn.Module], bool] = "auto"
    """Which modules become FSDP groups of their own: `"auto"` (transformers' FSDP plan, else `_no_split_modules`
    innermost first, else the elements of each `ModuleList`), `"size"` (see `min_num_params`), `"none"` (one group),
    a list of module class names, or a predicate over modules. Default `"auto"`."""
    min_num_params: int = 100_000_000
    """Smallest number of parameters that makes a module its own group under `wrap="size"`. Default 1e8, as FSDP1's."""
    reshard_after_forward: bool | int | None = None
    """As `fully_shard`'s: free the full parameters after forward (`True`), keep them (`False`), reshard to a smaller
    world size (an int), or everywhere but in the root (`None`, the default)."""
    replicate_size: int = 1
    """HSDP: number of replicas; each is sharded over `world_size / replicate_size` ranks. Default 1."""
    mixed_precision: str | torch.distributed.fsdp.MixedPrecisionPolicy | None = None
    """`"bf16"`, `"fp16"`, or a policy: dtype of the parameters in forward and backward. Default: the stored dtype."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory between uses. Default no."""

    def __post_init__(self) -> None:
        if isinstance(self.wrap, str):
            named = self.wrap in ("auto", "size", "none")
            _require(named, "wrap", self.wrap, "use 'auto', 'size', 'none', a list of class names, or a callable")
        _require(self.min_num_params > 0, "min_num_params", self.min_num_params, "give a positive number")
        _require(self.replicate_size >= 1, "replicate_size", self.replicate_size, "give 1 (no replicas) or more")
        if isinstance(self.mixed_precision, str):
            known = self.mixed_precision in ("bf16", "fp16")
            _require(known, "mixed_precision", self.mixed_precision, "use 'bf16', 'fp16', a policy, or None")


@dataclass(frozen=True)
class Loading:
    """How checkpoint bytes reach the shards."""

    transport: Transport = "auto"
    """`"scatter"`: each rank is sent only its own part; `"broadcast"`: every rank is sent everything and keeps its
    part; `"auto"` (default): `scatter`. `"local"` is reserved for ranks that read the files themselves."""
    bucket_bytes: int = 32 * MIB
    """Bytes of one bucket, all ranks' parts together. Two are in flight: one is sent while the next is read.
    Default 32 MiB: see the measurement in `distributed/plan.py`."""
    dtype: torch.dtype | None = None
    """Floating dtype of the loaded parameters. Default: config.json's, else the one floating dtype of the files;
    for a callable's model, its parameters' own."""
    strict: bool = True
    """Missing or unexpected keys are a `PlanError`; if not, they are reported, and missing ones initialised."""
    verify: Verify = "header"
    """`"header"`: everything that headers and index can show. Default."""
    key_mapping: Mapping[str, str] | None = None
    """Regular expression on checkpoint keys → replacement, applied before the model's own mapping."""
    seed: int = 0
    """Seed, together with the FQN, of what the checkpoint lacks under `strict=False`. Default 0."""

    def __post_init__(self) -> None:
        known = self.transport in ("auto", "broadcast", "scatter")
        _require(known, "transport", self.transport, "use 'auto', 'broadcast' or 'scatter'")
        _require(self.bucket_bytes >= 4096, "bucket_bytes", self.bucket_bytes, "give at least 4096 bytes")
        _require(self.verify == "header", "verify", self.verify, "only 'header' is supported")
        if self.dtype is not None:
            _require(self.dtype.is_floating_point, "dtype", self.dtype, "give a floating dtype such as torch.bfloat16")


@dataclass(frozen=True)
class Placement:
    """Where the ranks run."""

    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement-group strategy. Default `"PACK"`: as few nodes as hold the group."""
    cpus_per_rank: float = 1.0
    """CPUs reserved for each rank. Default 1."""
    labels: Mapping[str, str] | None = None
    """Node labels that every rank's node must carry. Default: any node."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray runtime environment of the rank actors. Default: the job's."""
    placement_group: Any = None
    """An existing Ray placement group with one bundle for each rank; the caller keeps it. Default: the group makes
    and removes its own."""

    def __post_init__(self) -> None:
        known = self.strategy in ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
        _require(known, "strategy", self.strategy, "use PACK, SPREAD, STRICT_PACK or STRICT_SPREAD")
        _require(self.cpus_per_rank >= 0, "cpus_per_rank", self.cpus_per_rank, "give 0 or more")


@dataclass(frozen=True)
class Timeouts:
    """Deadlines in seconds. Nothing waits without one."""

    place_s: float = 120.0
    """Until Ray has reserved every rank's resources. Default 120."""
    start_s: float = 180.0
    """Until every actor process is up with its imports done. Default 180."""
    rendezvous_s: float = 120.0
    """Until all ranks have joined the process group. Default 120."""
    load_stall_s: float = 120.0
    """Longest time of a load (or save) without a byte of progress. Default 120."""
    call_s: float = 1800.0
    """Longest time of one call, from when the ranks begin it. Default 1800."""
    drain_s: float = 5.0
    """How long ranks may take to finish after another rank failed, before they are stopped. Default 5."""
    lease_s: float | None = None
    """Longest silence of the driver before the ranks end themselves. Default: no lease."""

    def __post_init__(self) -> None:
        for name in ("place_s", "start_s", "rendezvous_s", "load_stall_s", "call_s", "drain_s"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "give a positive number of seconds")
        lease_ok = self.lease_s is None or self.lease_s > 0
        _require(lease_ok, "lease_s", self.lease_s, "give a positive number of seconds, or None")
