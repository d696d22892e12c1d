"""One rank's figures of a load, and the report that all ranks' figures make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raysharding.distributed.planning import LoadPlan
from raysharding.distributed.report import LoadReport

_TIMES = ("seconds", "plan_s", "stream_s", "read_s", "send_s", "place_s", "initialise_s")


@dataclass
class Figures:
    """What a rank measured, exchanged as JSON; fields as in `LoadReport`."""

    seconds: float = 0.0
    plan_s: float = 0.0
    stream_s: float = 0.0
    read_s: float = 0.0
    send_s: float = 0.0
    place_s: float = 0.0
    initialise_s: float = 0.0
    wire_bytes: int = 0
    shared_bytes: int = 0
    read_bytes: int = 0
    ring_bytes: int = 0
    shard_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    digest: str = ""


def make_report(plan: LoadPlan, every: Sequence[Figures]) -> LoadReport:
    """Put all ranks' figures together."""

    def largest(name: str) -> Any:
        return max(getattr(figures, name) for figures in every)

    mapped_bytes = sum(layout.num_elements * layout.dtype.itemsize for layout in plan.mapped)
    outline = plan.outline
    return LoadReport(
        checkpoint=outline.checkpoint,
        num_tensors=len(outline.tensors),
        checkpoint_bytes=outline.checkpoint_bytes,
        read_bytes=sum(figures.read_bytes for figures in every),
        mapped_bytes=mapped_bytes,
        wire_bytes=sum(figures.wire_bytes for figures in every),
        shared_bytes=sum(figures.shared_bytes for figures in every),
        **{name: largest(name) for name in _TIMES},
        num_buckets=len(plan.buckets.buckets),
        bucket_bytes=plan.buckets.max_bucket_bytes,
        ring_bytes=largest("ring_bytes"),
        transport=plan.choice.transport,
        transport_reason=plan.choice.reason,
        readers=plan.choice.readers,
        world_size=len(every),
        shard_bytes=tuple(figures.shard_bytes for figures in every),
        peak_extra_bytes=tuple(_extra_bytes(figures) for figures in every),
        peak_device_bytes=tuple(figures.device_bytes for figures in every),
        digest=every[0].digest,
        missing=outline.missing,
        unexpected=outline.unexpected,
        ignored=outline.ignored,
        initialised=outline.initialise,
        tied=outline.tied,
        converted=outline.converted,
    )


def _extra_bytes(figures: Figures) -> int:
    """Host memory above the shards that lie there."""
    host_shard_bytes = 0 if figures.device_bytes else figures.shard_bytes
    return max(0, figures.host_bytes - host_shard_bytes)
