"""`CopyReport`: the report of a copy of weights from one group to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from raysharding.report import Report, Table
from raysharding.units import format_bytes


@dataclass(frozen=True, repr=False)
class CopyReport(Report):
    """Report of one copy. `str(report)` is for people, `as_dict()` for programs."""

    num_tensors: int
    """Number of tensors copied; tied ones count once."""
    num_bytes: int
    """Bytes of the target's tensors, once for each of its replicas, in the narrower of the two groups' dtypes."""
    wire_bytes: int
    """Bytes that ranks of the target received in messages."""
    shared_bytes: int
    """Bytes that ranks of the target took from shared memory of their host."""
    seconds: float
    """Seconds from the call to the end on the last rank."""
    plan_s: float
    """Seconds of these for connections and plan; a later copy between the same groups only checks that they hold."""
    is_planned: bool
    """True if this copy made the plan: it was the first between the groups, or a layout had changed."""
    source_extra_bytes: tuple[int, ...]
    """Peak host memory (RssAnon + RssShmem) above the start, by rank of the source, sampled after each round."""
    target_extra_bytes: tuple[int, ...]
    """The same by rank of the target."""
    is_merged: bool = False
    """True if LoRA adapters were merged into the weights on the way."""
    is_staged: bool = False
    """True if the target received the weights beside its own before it took them."""
    is_through_device: bool = False
    """True if messages went from device to device, by NCCL on GPUs; False if all bytes went through host memory."""
    weights_version: int = 0
    """Version of the copied weights; see `Call.weights_version`."""

    @classmethod
    def of(cls, source: Sequence[Mapping[str, Any]], target: Sequence[Mapping[str, Any]], **options: bool) -> Self:
        """Put the figures of all ranks of both groups together."""
        every = (*source, *target)
        return cls(
            num_tensors=target[0]["num_tensors"],
            num_bytes=target[0]["num_bytes"],
            wire_bytes=sum(one["wire_bytes"] for one in target),
            shared_bytes=sum(one["shared_bytes"] for one in target),
            seconds=max(one["seconds"] for one in every),
            plan_s=max(one["plan_s"] for one in every),
            is_planned=any(one["is_planned"] for one in every),
            source_extra_bytes=tuple(one["host_bytes"] for one in source),
            target_extra_bytes=tuple(one["host_bytes"] for one in target),
            is_through_device=target[0]["is_through_device"],
            weights_version=target[0]["weights_version"],
            **options,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict that `json.dumps` accepts, up to tuples."""
        return asdict(self)

    def _title(self) -> str:
        how = ", merged" * self.is_merged + ", staged" * self.is_staged
        return f"copied {self.num_tensors} tensors, {format_bytes(self.num_bytes)}{how}"

    def _parts(self) -> list[Table]:
        rate = f", {format_bytes(self.num_bytes / self.seconds)}/s" if self.seconds else ""
        plan = f"{'planned' if self.is_planned else 'plan kept'} in {self.plan_s * 1e3:.0f} ms"
        messages = "in messages from device to device" if self.is_through_device else "in messages of host memory"
        sent = ((self.shared_bytes, "through shared memory"), (self.wire_bytes, messages))
        ways = [f"{format_bytes(num_bytes)} {way}" for num_bytes, way in sent if num_bytes]
        peak = format_bytes(max(*self.source_extra_bytes, *self.target_extra_bytes))
        rows = (
            ("time", f"{self.seconds:.3f} s{rate}; {plan}"),
            ("bytes", ", ".join(ways) or "nothing to send"),
            ("memory", f"peak above the start {peak} a rank"),
        )
        return [Table((), rows)]
