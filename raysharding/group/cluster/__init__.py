"""What Ray and its nodes provide: connecting, nodes, placement, names, the GCS monitor, stack dumps."""

from raysharding.group.cluster.connect import connect, join_announced, refuse_in_fork
from raysharding.group.cluster.display import html_rows, html_table, memory_table, ranks_table, tell, text_table
from raysharding.group.cluster.gcs_monitor import GCS_GONE_S, GcsMonitor, exit_without_gcs, gcs_address
from raysharding.group.cluster.names import (
    NAMESPACE,
    Lifetime,
    actor_name,
    actor_names,
    check_free,
    check_name,
    group_names,
    name_taken,
    placement_groups,
    remove_orphans,
)
from raysharding.group.cluster.nodes import (
    NodeCapacity,
    NodeFacts,
    assign,
    cluster_capacity,
    facts_here,
    local_capacity,
    versions_here,
)
from raysharding.group.cluster.placement import (
    Reservation,
    check_world_size,
    choose_device_type,
    choose_num_threads,
    choose_world_size,
    rank_need,
    reserve,
    show_resources,
    wait_placed,
)
from raysharding.group.cluster.ray_internals import dashboard_url, has_started
from raysharding.group.cluster.stack_dump import ProcessSnapshot, dump_stacks, enable_stack_dumps
