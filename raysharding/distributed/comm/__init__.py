"""How ranks meet and talk beside tensors: process group, device mesh, JSON collectives, agreement on failure, links."""

from raysharding.distributed.comm.abort import Connection, between, connections, cut, nobody_connects_later
from raysharding.distributed.comm.agreement import (
    BUCKETS_PER_CHECK,
    FailureFlag,
    agree,
    agree_all_went_well,
    from_rank_0,
    wait_for,
    waits_for_others,
)
from raysharding.distributed.comm.device_mesh import REPLICATE_AXIS, init_mesh
from raysharding.distributed.comm.json_collectives import (
    all_gather_ints,
    all_gather_json,
    broadcast_json,
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
    listen,
    serve_store,
)

__all__ = [
    "BUCKETS_PER_CHECK",
    "REPLICATE_AXIS",
    "Connection",
    "FailureFlag",
    "LinkTimes",
    "StoreAddress",
    "agree",
    "agree_all_went_well",
    "all_gather_ints",
    "all_gather_json",
    "between",
    "broadcast_json",
    "collective_counters",
    "connections",
    "cut",
    "exists",
    "from_rank_0",
    "init_mesh",
    "interface_of",
    "join_process_group",
    "leave_process_group",
    "listen",
    "measure_link",
    "metadata_device",
    "nobody_connects_later",
    "serve_store",
    "wait_for",
    "waits_for_others",
]
