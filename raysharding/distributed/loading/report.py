"""What a load did: the same report on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from raysharding.distributed.loading.plan import LoadPlan
from raysharding.units import format_bytes


def _names(names: tuple[str, ...], limit: int = 6) -> str:
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


# Fields that every rank measures for itself, and what makes the report's value of theirs, in rank order.
_SUM: dict[str, Callable[[Iterable[Any]], Any]] = {"merge": sum}
_SLOWEST: dict[str, Callable[[Iterable[Any]], Any]] = {"merge": max}
_LARGEST = _SAME = _SLOWEST
_EACH: dict[str, Callable[[Iterable[Any]], Any]] = {"merge": tuple}


@dataclass(frozen=True)
class LoadReport:
    """One load. `str(report)` is for people, `as_dict()` for programs."""

    checkpoint: str
    """The checkpoint, as it was named."""
    num_tensors: int
    """Tensors loaded from files."""
    checkpoint_bytes: int
    """Bytes of the files' tensors."""
    read_bytes: int = field(metadata=_SUM)
    """Bytes read from files, all ranks together, headers not counted."""
    mapped_bytes: int
    """Bytes of tensors whose shards are pages of the files (`Loading.mmap`)."""
    wire_bytes: int = field(metadata=_SUM)
    """Bytes that ranks sent each other in messages, padding included."""
    shared_bytes: int = field(metadata=_SUM)
    """Bytes that ranks took out of the buffers of a reader of their host instead."""
    seconds: float = field(metadata=_SLOWEST)
    """From the call to the last rank's end."""
    plan_s: float = field(metadata=_SLOWEST)
    """Headers, key mapping and bucket plan; slowest rank."""
    stream_s: float = field(metadata=_SLOWEST)
    """From the first bucket to the last; slowest rank."""
    read_s: float = field(metadata=_SLOWEST)
    """Reading files, in a thread that overlaps with sending; slowest rank."""
    send_s: float = field(metadata=_SLOWEST)
    """Starting and waiting for messages; slowest rank."""
    place_s: float = field(metadata=_SLOWEST)
    """Copying out of buffers into shards; slowest rank."""
    initialise_s: float = field(metadata=_SLOWEST)
    """Values that the checkpoint does not hold; slowest rank."""
    num_buckets: int
    """Buckets streamed."""
    bucket_bytes: int
    """Size of the largest bucket."""
    ring_bytes: int = field(metadata=_LARGEST)
    """Buffers of the rank that needs most: twice the largest bucket's part that passes through it."""
    transport: str
    """`local`, `scatter` or `broadcast`; see `Loading`."""
    transport_reason: str
    """Why that transport."""
    readers: tuple[int, ...]
    """Ranks that read the files."""
    world_size: int
    """Ranks."""
    shard_bytes: tuple[int, ...] = field(metadata=_EACH)
    """Bytes of parameters and buffers on each rank."""
    peak_extra_bytes: tuple[int, ...] = field(metadata=_EACH)
    """Highest host memory (RssAnon + RssShmem) above the start and the host shards, on each rank, seen after each
    bucket."""
    peak_device_bytes: tuple[int, ...] = field(metadata=_EACH)
    """Highest device memory above the start, shards included, on each rank; 0 on the CPU."""
    digest: str = field(default="", metadata=_SAME)
    """Of all values, 16 hex digits, the same at every world size; empty unless `Loading.digest`."""
    missing: tuple[str, ...] = ()
    """FQNs without a tensor in the checkpoint."""
    unexpected: tuple[str, ...] = ()
    """Checkpoint keys that no FQN takes."""
    ignored: tuple[str, ...] = ()
    """Checkpoint keys and FQNs that do not count as missing or unexpected."""
    initialised: tuple[str, ...] = ()
    """FQNs that were given a value by the module's own rule."""
    tied: tuple[str, ...] = ()
    """FQNs that share another one's parameter."""
    converted: tuple[str, ...] = ()
    """`FQN: operations` of the tensors that went whole through transformers' own operations on rank 0."""

    @classmethod
    def merge(cls, plan: LoadPlan, per_rank: Sequence[Mapping[str, Any]]) -> Self:
        """Make one report of what the plan says and all ranks measured; the same on every rank.

        Args:
            plan: What was loaded, and how.
            per_rank: Of each rank, by field: seconds and bytes of its own, of each tuple its one value.
        """
        names = {one.name for one in fields(cls)}
        # What the outline says under the report's own names is the report's; ranks measure the rest.
        outlined = {name: value for name, value in vars(plan.outline).items() if name in names}
        merged = {one.name: one.metadata["merge"] for one in fields(cls) if one.metadata}
        return cls(
            num_tensors=len(plan.outline.tensors),
            mapped_bytes=sum(layout.num_elements * layout.dtype.itemsize for layout in plan.mapped),
            num_buckets=len(plan.buckets.buckets),
            bucket_bytes=plan.buckets.max_bucket_bytes,
            transport=plan.read_plan.transport,
            transport_reason=plan.read_plan.reason,
            readers=plan.read_plan.readers,
            world_size=len(per_rank),
            initialised=plan.outline.initialise,
            **outlined,
            **{name: merge([measured[name] for measured in per_rank]) for name, merge in merged.items()},
        )

    @property
    def bytes_per_s(self) -> float:
        """Checkpoint bytes over the whole time."""
        return self.checkpoint_bytes / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields and `bytes_per_s`, ready for JSON."""
        return asdict(self) | {"bytes_per_s": self.bytes_per_s}

    def __str__(self) -> str:
        lines = [
            f"loaded {self.num_tensors} tensors, {format_bytes(self.checkpoint_bytes)}, from {self.checkpoint}",
            f"  time       {self.seconds:.2f} s, {format_bytes(self.bytes_per_s)}/s (plan {self.plan_s:.2f} s, stream "
            f"{self.stream_s:.2f} s, initialise {self.initialise_s:.2f} s)",
            f"  overlap    read {self.read_s:.2f} s, send {self.send_s:.2f} s, place {self.place_s:.2f} s of stream",
            f"  transport  {self.transport} ({self.transport_reason}) to {self.world_size} ranks, {self.num_buckets} "
            f"buckets of at most {format_bytes(self.bucket_bytes)}",
            f"  bytes      read {format_bytes(self.read_bytes)}, sent {format_bytes(self.wire_bytes)}"
            + (f", {format_bytes(self.shared_bytes)} through shared memory" if self.shared_bytes else "")
            + (f", {format_bytes(self.mapped_bytes)} mapped" if self.mapped_bytes else ""),
            f"  memory     shards {self._per_rank(self.shard_bytes)}; peak above them "
            f"{self._per_rank(self.peak_extra_bytes)}",
        ]
        if any(self.peak_device_bytes):
            lines.append(f"  device     peak {self._per_rank(self.peak_device_bytes)}")
        if self.digest:
            lines.append(f"  digest     {self.digest}")
        for title in ("missing", "unexpected", "ignored", "initialised", "tied", "converted"):
            names = getattr(self, title)
            if names:
                lines.append(f"  {title:<10} {len(names)}: {_names(names)}")
        return "\n".join(lines)

    @staticmethod
    def _per_rank(values: tuple[int, ...]) -> str:
        low, high = min(values), max(values)
        return f"{format_bytes(low)} a rank" if low == high else f"{format_bytes(low)} to {format_bytes(high)} a rank"
