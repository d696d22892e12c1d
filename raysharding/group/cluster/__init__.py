"""Ray and its nodes: connecting, capacities, placement, names, the GCS monitor, stack dumps."""

from raysharding.group.cluster.connect import connect, join_announced, join_existing, own_node_id, refuse_in_fork
from raysharding.group.cluster.display import (
    StatusReport,
    memory_table,
    ranks_table,
    status_table,
    tell,
    warn,
)
from raysharding.group.cluster.gcs_monitor import GCS_GONE_S, GcsMonitor
from raysharding.group.cluster.nodes import (
    NodeCapacity,
    NodeFacts,
    ask_nodes,
    assign,
    cluster_capacity,
    facts_here,
    local_capacity,
    versions_here,
)
from raysharding.group.cluster.placement import (
    NAMESPACE,
    Reservation,
    Resources,
    able_nodes,
    check_name,
    choose_num_threads,
    choose_ranks,
    cluster_cpus,
    cluster_gpus,
    group_names,
    name_taken,
    own_bundles,
    rank_need,
    ranks_per_gpu,
    remove_placement_groups,
    reserve,
    show_resources,
    wait_placed,
)
from raysharding.group.cluster.ray_internals import (
    accelerator_names,
    actor_id,
    dashboard_url,
    delete_record,
    delete_records_of_dead_jobs,
    is_dead,
    is_in_session,
    is_worker,
    name_log_lines,
    ray_session,
    read_record,
    started_cluster,
    was_restarted,
    write_record,
)
from raysharding.group.cluster.screens import Picture, open_screen
from raysharding.group.cluster.stack_dump import ProcessSnapshot, dump_stacks, enable_stack_dumps
