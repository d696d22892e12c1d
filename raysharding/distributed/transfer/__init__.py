"""Transfer of tensor bytes in buckets: plan, routes, transport, shared memory, and the gather to rank 0."""

from raysharding.distributed.transfer.bucket_plan import (
    BUCKET_BYTES,
    STRAIGHT_BYTES,
    BucketPlan,
    PlannedTensor,
    Segment,
    plan_buckets,
)
from raysharding.distributed.transfer.buffers import (
    RING_SIZE,
    LocalShards,
    Slot,
    SlotBytes,
    make_ring,
    round_up_pinned,
)
from raysharding.distributed.transfer.gather import (
    GATHER_BUCKET_BYTES,
    Gather,
    full_memory,
    gather_into,
    gather_state_dict,
    gather_tensors,
    named_tensors,
    saved_tensors,
    tied_names,
)
from raysharding.distributed.transfer.memory import (
    RANK_BYTES,
    MemoryPeak,
    available_bytes,
    back,
    is_fresh,
    prefault,
    resident_bytes,
)
from raysharding.distributed.transfer.shared_memory import (
    Counters,
    SharedRings,
    counters_in,
    host_identity,
    map_shared,
    offer_shared,
    reserve_shared,
    share_rings,
)
from raysharding.distributed.transfer.sources import (
    JOB_BYTES,
    REMOTE_GAP_BYTES,
    CheckpointSource,
    Extent,
    Extents,
    Job,
    Request,
    TensorSource,
    as_bytes,
    as_memory,
    extents_from_json,
    extents_of,
    extents_to_json,
    wire_dtype,
)
from raysharding.distributed.transfer.stream import BucketStream
from raysharding.distributed.transfer.transport import Broadcast, BucketTransport, Routes, Scatter, connect_ranks
