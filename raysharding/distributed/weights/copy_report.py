"""`CopyReport`: the report of a copy of weights from one group to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from raysharding.html import html_report, html_rows
from raysharding.units import format_bytes


@dataclass(frozen=True)
class CopyReport:
    """Report of one copy. `str(report)` is for people, `as_dict()` for programs."""

    num_tensors: int
    """Number of tensors copied; tied ones count once."""
    num_bytes: int
    """Bytes of the target's tensors, once for each of its replicas, in the narrower of the two groups' dtypes."""
    wire_bytes: int
    """Bytes that ranks of the target received in messages: see `is_through_device`."""
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
            **options,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict that `json.dumps` accepts, up to tuples."""
        return asdict(self)

    def __str__(self) -> str:
        rate = f", {format_bytes(self.num_bytes / self.seconds)}/s" if self.seconds else ""
        messages = "in messages from device to device" if self.is_through_device else "in messages of host memory"
        ways = [
            f"{format_bytes(num_bytes)} {way}"
            for num_bytes, way in ((self.shared_bytes, "through shared memory"), (self.wire_bytes, messages))
            if num_bytes
        ]
        how = [name for flag, name in ((self.is_merged, "merged"), (self.is_staged, "staged")) if flag]
        more = f" ({', '.join(how)})" if how else ""
        return (
            f"copied {self.num_tensors} tensors, {format_bytes(self.num_bytes)}{more}, in {self.seconds:.3f} s{rate}: "
            f"{', '.join(ways) or 'nothing to send'}; {'planned' if self.is_planned else 'plan kept'} "
            f"({self.plan_s * 1e3:.0f} ms); up to "
            f"{format_bytes(max(*self.source_extra_bytes, *self.target_extra_bytes))} of extra memory a rank"
        )

    def _repr_html_(self) -> str:
        return html_report(str(self), html_rows((), [(key, str(value)) for key, value in self.as_dict().items()]))
