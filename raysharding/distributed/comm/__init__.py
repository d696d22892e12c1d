"""Communication beside tensors: process group, device mesh, JSON collectives, agreement on failure, link test."""

from raysharding.distributed.comm.abort import closed_listeners
from raysharding.distributed.comm.agreement import BUCKETS_PER_CHECK, FailureFlag, agree, agreeing, from_rank_0
from raysharding.distributed.comm.current_group import (
    current_group,
    get_rank,
    get_world_size,
    global_ranks,
    rank_name,
    require_group,
    require_member,
    using_group,
)
from raysharding.distributed.comm.device import (
    accelerator_in_use,
    check_device_type,
    current_device,
    device_module,
    device_uuid,
    is_accelerator,
    is_available,
    passes_shared_device,
    set_current_device,
    share_device,
    use_expandable_segments,
)
from raysharding.distributed.comm.device_mesh import REPLICATE_AXIS, init_mesh, mesh_group
from raysharding.distributed.comm.json_collectives import (
    all_gather_ints,
    all_gather_json,
    any_rank,
    broadcast_json,
    broadcast_tensor,
    metadata_device,
)
from raysharding.distributed.comm.link_test import LinkTimes, measure_link
from raysharding.distributed.comm.rendezvous import (
    StoreAddress,
    collective_counters,
    exists,
    interface_of,
    join_process_group,
    leave_process_group,
    serve_store,
)
from raysharding.distributed.comm.spanning_group import PeerLostError, SpanningGroup
from raysharding.distributed.comm.waiting import (
    HostCopy,
    is_busy,
    to_host,
    wait_for,
    wait_for_event,
    waits_for_others,
    waits_for_ranks,
)
