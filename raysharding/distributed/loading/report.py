"""`LoadReport`: the report of a load, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from raysharding.distributed.loading.plan import LoadPlan, Matched
from raysharding.report import Report, Table
from raysharding.units import format_bytes


def _names(names: tuple[str, ...], limit: int = 6) -> str:
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


# Fields that each rank measures, with the function that merges the values of all ranks, in rank order.
_SUM: dict[str, Callable[[Iterable[Any]], Any]] = {"merge": sum}
_SLOWEST: dict[str, Callable[[Iterable[Any]], Any]] = {"merge": max}
_LARGEST = _SAME = _SLOWEST
_EACH: dict[str, Callable[[Iterable[Any]], Any]] = {"merge": tuple}


@dataclass(frozen=True, repr=False)
class LoadReport(Report, Matched):
    """Report of one load. `str(report)` is for people, `as_dict()` for programs."""

    num_tensors: int
    """Number of tensors loaded from files."""
    read_bytes: int = field(metadata=_SUM)
    """Bytes read from files, over all ranks, without headers."""
    mapped_bytes: int
    """Bytes of tensors whose shards are pages of the files (`Loading.mmap`)."""
    wire_bytes: int = field(metadata=_SUM)
    """Bytes that ranks sent each other in messages, padding included."""
    shared_bytes: int = field(metadata=_SUM)
    """Bytes that ranks copied from the buffers of a reader on their host instead."""
    seconds: float = field(metadata=_SLOWEST)
    """Seconds from the call to the end on the last rank."""
    plan_s: float = field(metadata=_SLOWEST)
    """Headers, key mapping and bucket plan; slowest rank."""
    stream_s: float = field(metadata=_SLOWEST)
    """From the first bucket to the last; slowest rank."""
    read_s: float = field(metadata=_SLOWEST)
    """Reading files, in a thread that overlaps with sending; slowest rank."""
    send_s: float = field(metadata=_SLOWEST)
    """Starting and waiting for messages; slowest rank."""
    place_s: float = field(metadata=_SLOWEST)
    """Copying from buffers into shards; slowest rank."""
    initialise_s: float = field(metadata=_SLOWEST)
    """Initialising tensors that the checkpoint lacks; slowest rank."""
    num_buckets: int
    """Number of buckets."""
    bucket_bytes: int
    """Size of the largest bucket."""
    ring_bytes: int = field(metadata=_LARGEST)
    """Largest buffers of a rank, in one memory: twice its part of the largest bucket."""
    transport: str
    """`local`, `scatter` or `broadcast`."""
    transport_reason: str
    """Reason for the transport."""
    readers: tuple[int, ...]
    """Ranks that read the files."""
    world_size: int
    """Number of ranks."""
    shard_bytes: tuple[int, ...] = field(metadata=_EACH)
    """Bytes of parameters and buffers on each rank."""
    peak_extra_bytes: tuple[int, ...] = field(metadata=_EACH)
    """Peak host memory (RssAnon + RssShmem) above the start and the host shards, by rank, sampled after each bucket."""
    peak_device_bytes: tuple[int, ...] = field(metadata=_EACH)
    """Peak device memory above the start, including shards, by rank; 0 on the CPU."""
    digest: str = field(metadata=_SAME)
    """Digest of all values, 16 hex digits, equal at every world size; empty unless `Loading.digest`."""

    @classmethod
    def merge(cls, plan: LoadPlan, per_rank: Sequence[Mapping[str, Any]]) -> Self:
        """Make one report from the plan and the measurements of all ranks; the same on every rank.

        Args:
            plan: Plan of the load.
            per_rank: Measurements of each rank, by field; for fields that are tuples, the rank's value.
        """
        matched = {one.name: getattr(plan.outline, one.name) for one in fields(Matched)}
        merged = {one.name: one.metadata["merge"] for one in fields(cls) if one.metadata}
        return cls(
            num_tensors=len(plan.outline.tensors),
            mapped_bytes=sum(layout.num_elements * layout.dtype.itemsize for layout, _ in plan.mapped),
            num_buckets=len(plan.buckets),
            bucket_bytes=plan.buckets.max_bucket_bytes,
            transport=plan.read_plan.transport,
            transport_reason=plan.read_plan.reason,
            readers=plan.read_plan.readers,
            world_size=len(per_rank),
            **matched,
            **{name: merge([measured[name] for measured in per_rank]) for name, merge in merged.items()},
        )

    @property
    def bytes_per_s(self) -> float:
        """Checkpoint bytes per second of the whole load."""
        return self.checkpoint_bytes / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and `bytes_per_s` as a JSON value."""
        return asdict(self) | {"bytes_per_s": self.bytes_per_s}

    def _title(self) -> str:
        return f"loaded {self.num_tensors} tensors, {format_bytes(self.checkpoint_bytes)}, from {self.checkpoint}"

    def _parts(self) -> list[Table]:
        shared = f", {format_bytes(self.shared_bytes)} through shared memory" if self.shared_bytes else ""
        mapped = f", {format_bytes(self.mapped_bytes)} mapped" if self.mapped_bytes else ""
        rows = [
            (
                "time",
                f"{self.seconds:.2f} s, {format_bytes(self.bytes_per_s)}/s (plan {self.plan_s:.2f} s, stream "
                f"{self.stream_s:.2f} s, initialise {self.initialise_s:.2f} s)",
            ),
            ("overlap", f"read {self.read_s:.2f} s, send {self.send_s:.2f} s, place {self.place_s:.2f} s of stream"),
            (
                "transport",
                f"{self.transport} ({self.transport_reason}) to {self.world_size} ranks, {self.num_buckets} "
                f"buckets of at most {format_bytes(self.bucket_bytes)}",
            ),
            ("bytes", f"read {format_bytes(self.read_bytes)}, sent {format_bytes(self.wire_bytes)}{shared}{mapped}"),
            (
                "memory",
                f"shards {self._per_rank(self.shard_bytes)}; peak above them {self._per_rank(self.peak_extra_bytes)}",
            ),
        ]
        if any(self.peak_device_bytes):
            rows.append(("device", f"peak {self._per_rank(self.peak_device_bytes)}"))
        if self.digest:
            rows.append(("digest", self.digest))
        for title in ("missing", "unexpected", "ignored", "initialised", "tied", "converted"):
            names = getattr(self, title)
            if names:
                rows.append((title, f"{len(names)}: {_names(names)}"))
        if self.kept:
            rows.append(("adapters", f"{len(self.kept)} tensors stay in effect on this base: {_names(self.kept)}"))
        return [Table((), rows + [("warning", text) for text in self.warnings])]

    @staticmethod
    def _per_rank(values: tuple[int, ...]) -> str:
        low, high = min(values), max(values)
        return f"{format_bytes(low)} a rank" if low == high else f"{format_bytes(low)} to {format_bytes(high)} a rank"
