"""The faults that this library survives, and which tests inject each of them, wherever those tests live.

Five invariants, for every row: no driver call outlives its deadline; one typed, picklable error that names rank, node,
process and phase, primary cause first; everything is released within 10 s; a save's destination is the old checkpoint
or the new one, whole; a broken group refuses calls at once. `test_rows.py` checks that the tests named here exist.
"""

from __future__ import annotations

from dataclasses import dataclass

FAULTS = "tests/faults"
SUPERVISION = "tests/group/controller/test_faults.py"
ON_RANKS = "tests/distributed/loading/test_loading.py::test_on_ranks"


@dataclass(frozen=True)
class Row:
    """One fault."""

    fault: str
    """What is done."""
    tests: tuple[str, ...]
    """`file::function`, or `file::function[part of its id]` where one of its cases does it."""


ROWS = {
    1: Row(
        "SIGKILL or SIGTERM of a rank, in each phase",
        (
            f"{FAULTS}/test_death_and_hang.py::test_a_rank_that_is_killed",
            f"{FAULTS}/test_death_and_hang.py::test_a_rank_that_is_terminated",
            f"{SUPERVISION}::test_a_rank_killed_in_a_call",
            f"{SUPERVISION}::test_a_rank_killed_while_idle",
            f"{SUPERVISION}::test_a_rank_killed_while_the_model_is_built",
            "tests/group/controller/test_start.py::test_an_actor_that_died_is_reported_while_another_still_starts",
        ),
    ),
    2: Row(
        "SIGSTOP of a rank, in each phase",
        (
            f"{FAULTS}/test_death_and_hang.py::test_a_rank_that_is_stopped",
            f"{SUPERVISION}::test_a_stopped_rank_is_hung_and_removed",
            f"{SUPERVISION}::test_a_rank_that_sleeps_past_the_deadline",
        ),
    ),
    3: Row(
        "one rank raises while others wait in a collective",
        (f"{SUPERVISION}::test_a_rank_that_raises_while_the_others_wait_for_it",),
    ),
    4: Row(
        "every rank raises alike in forward, in the loss, in backward",
        (
            f"{FAULTS}/test_raised.py::test_what_every_rank_raises_leaves_the_group_right",
            "tests/distributed/training/test_training.py::test_steps_are_right_after_failures",
            "tests/group/calls/test_calls.py::test_an_error_of_all_ranks_is_raised_each_time_and_leaves_the_group_ready",
        ),
    ),
    5: Row(
        "a segmentation fault; a thread that holds the GIL",
        (f"{FAULTS}/test_death_and_hang.py::test_a_rank_that_crashes_or_blocks",),
    ),
    6: Row(
        "slow but alive: a rank, a disk, an object store",
        (
            f"{SUPERVISION}::test_a_slow_disk_that_gives_bytes_is_no_hang",
            f"{SUPERVISION}::test_a_disk_that_gives_no_bytes_is_a_hang",
            f"{FAULTS}/test_healthy.py::test_a_healthy_run_on_a_busy_machine_raises_no_alarm",
            ON_RANKS,
        ),
    ),
    7: Row(
        "truncated file, trailing bytes, hole, overlap, oversized header, shape overflow, unknown dtype",
        (
            f"{FAULTS}/test_data.py::test_a_wrong_file_is_refused_before_there_is_an_actor",
            "tests/checkpoint/format/test_header.py::test_a_wrong_header_is_refused",
            "tests/checkpoint/format/test_header.py::test_a_wrong_header_length_is_refused",
            "tests/checkpoint/format/test_hostile_headers.py::test_a_header_with_any_bytes_replaced",
            "tests/checkpoint/format/test_mutated_checkpoints.py::test_500_mutated_checkpoints",
        ),
    ),
    8: Row(
        "a duplicate JSON key in header or index",
        (
            f"{FAULTS}/test_data.py::test_a_wrong_file_is_refused_before_there_is_an_actor",
            "tests/checkpoint/format/test_header.py::test_a_wrong_header_is_refused",
            "tests/checkpoint/format/test_index.py::test_a_wrong_index_is_refused",
        ),
    ),
    9: Row(
        "missing, unexpected, wrong-shape, wrong-dtype, half-tied keys",
        (
            ON_RANKS,
            "tests/models/test_ties.py::test_another_value_is_a_problem_that_names_the_cure",
            "tests/group/test_group.py::test_a_group_that_cannot_load_leaves_nothing",
        ),
    ),
    10: Row(
        "NaN, Inf or flipped bytes in the payload",
        (ON_RANKS, "tests/checkpoint/writing/test_manifest.py::test_a_flipped_bit_is_found_and_named"),
    ),
    11: Row("ranks differ after the load", (ON_RANKS,)),
    12: Row(
        "the file changes while it is streamed",
        (
            f"{FAULTS}/test_data.py::test_a_file_that_changes_while_it_is_streamed",
            "tests/checkpoint/format/test_reader.py::test_a_file_rewritten_in_place_replaced_or_removed",
            "tests/checkpoint/storage/test_remote.py::test_a_file_replaced_after_its_header_was_read",
        ),
    ),
    13: Row(
        "an index names ../x, an absolute path, a .bin, a symlink out",
        (
            "tests/checkpoint/format/test_index.py::test_a_wrong_index_is_refused",
            "tests/checkpoint/format/test_index.py::test_a_symlink_out_of_the_directory_is_refused",
            "tests/checkpoint/format/test_mutated_checkpoints.py::test_500_mutated_checkpoints",
            "tests/checkpoint/storage/test_remote.py::test_a_hostile_index_is_refused_before_any_weight_file_is_touched",
        ),
    ),
    14: Row(
        "a remote read fails or stalls",
        (
            "tests/checkpoint/storage/test_remote_faults.py::test_what_passes_is_tried_again_and_the_bytes_are_right",
            "tests/checkpoint/storage/test_remote_faults.py::test_what_stays_ends_in_an_error_before_the_deadline",
        ),
    ),
    15: Row(
        "one path, different files on different nodes",
        ("tests/cluster/test_groups_over_hosts.py::test_other_files_under_the_same_path_are_refused",),
    ),
    16: Row(
        "disk full on save",
        (
            f"{FAULTS}/test_saving.py::test_a_full_disk_and_a_destination_that_is_taken",
            "tests/checkpoint/writing/test_writer.py::test_a_full_disk_leaves_the_old_checkpoint_and_no_temporary_files",
            ON_RANKS,
        ),
    ),
    17: Row(
        "SIGKILL at 50 random moments of a save",
        (
            f"{FAULTS}/test_saving.py::test_a_rank_killed_at_any_moment_of_a_save",
            f"{FAULTS}/test_death_and_hang.py::test_a_rank_that_is_killed",
            "tests/checkpoint/writing/test_commit.py::test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint",
        ),
    ),
    18: Row(
        "the destination exists; two saves to one place",
        (
            f"{FAULTS}/test_saving.py::test_a_full_disk_and_a_destination_that_is_taken",
            f"{FAULTS}/test_saving.py::test_two_saves_to_one_place",
            "tests/checkpoint/writing/test_commit.py::test_of_two_saves_to_one_place_the_second_is_refused",
            "tests/checkpoint/writing/test_other_entries.py::test_an_overwrite_is_refused_with_a_list",
        ),
    ),
    19: Row(
        "the driver is killed; ray job stop",
        (
            "tests/group/test_driver.py::test_a_driver_that_is_killed_leaves_nothing",
            "tests/group/test_driver.py::test_a_stopped_job_leaves_nothing",
            "tests/group/rank/test_owners.py::test_an_actor_that_owns_a_group",
            "tests/group/rank/test_owners.py::test_a_task_that_owns_a_group",
            "tests/group/rank/test_owners.py::test_an_owner_that_dies_before_its_named_group_is_loaded",
        ),
    ),
    20: Row(
        "the driver is frozen, with a lease set",
        (
            "tests/group/test_driver.py::test_a_frozen_driver_frees_its_ranks_when_the_lease_runs_out",
            "tests/group/test_driver.py::test_a_lease_raises_no_alarm",
        ),
    ),
    21: Row(
        "Ctrl-C, once and twice",
        (
            "tests/group/calls/test_interrupts.py::test_once_stops_at_the_next_call_boundary",
            "tests/group/calls/test_interrupts.py::test_twice_tears_the_group_down",
            "tests/group/calls/test_interrupts.py::test_a_group_that_is_being_made_is_undone",
        ),
    ),
    22: Row(
        "a node is removed; the head dies",
        (
            "tests/cluster/test_unreachable_hosts.py::test_a_node_that_dies_in_a_call_is_named_at_once",
            "tests/cluster/test_unreachable_hosts.py::test_a_node_that_dies_breaks_an_idle_group_and_gets_ranks_when_it_is_back",
            "tests/cluster/test_unreachable_hosts.py::test_the_head_dies_under_two_drivers_on_another_host",
        ),
    ),
    23: Row(
        "an infeasible or busy cluster",
        (
            "tests/group/cluster/test_placement.py::test_an_infeasible_group_is_refused_at_once_with_need_against_have",
            "tests/group/cluster/test_placement.py::test_a_busy_cluster_is_not_called_infeasible",
            "tests/group/launch/test_plan.py::test_a_plan_says_which_resource_is_short_where",
            "tests/group/launch/test_preflight.py::test_a_model_that_memory_cannot_hold_is_refused_before_it_is_allocated",
        ),
    ),
    24: Row(
        "twenty groups started at once; squatters on ports; strangers at ports",
        (
            "tests/group/rank/test_process_group.py::test_a_rank_lets_nobody_in_when_all_have_met",
            f"{FAULTS}/test_many.py::test_groups_that_start_at_once_do_not_collide",
            f"{FAULTS}/test_many.py::test_groups_side_by_side",
        ),
    ),
    25: Row(
        "the host name is a loopback address; several interfaces; one firewalled",
        (
            "tests/cluster/test_groups_over_hosts.py::test_groups_meet_where_host_names_mislead",
            "tests/cluster/test_firewall.py::test_a_firewalled_host_is_named_within_the_deadline",
            "tests/group/launch/test_preflight.py::test_a_cluster_over_loopback_addresses_is_no_cluster",
            "tests/group/launch/test_preflight.py::test_an_interface_that_leads_nowhere_is_named",
        ),
    ),
    26: Row(
        "a network partition between two hosts",
        (
            "tests/cluster/test_unreachable_hosts.py::test_a_host_that_is_cut_off_is_a_hang",
            "tests/cluster/test_unreachable_hosts.py::test_ranks_that_are_cut_off_for_good_end_themselves",
        ),
    ),
    27: Row(
        "0 rows, 1 row, W-1 rows; shapes that differ over ranks",
        (
            f"{FAULTS}/test_input.py::test_fewer_rows_than_ranks_and_one_more",
            f"{FAULTS}/test_input.py::test_no_rows_are_refused_by_the_driver",
            f"{FAULTS}/test_input.py::test_rows_that_fit_no_rank_alike_are_an_error_that_leaves_the_group_ready",
            f"{FAULTS}/test_input.py::test_a_shape_that_one_rank_alone_cannot_take_is_never_a_hang",
        ),
    ),
    28: Row(
        "an output larger than the cap or the object store",
        (
            "tests/group/test_group.py::test_a_result_over_the_cap_names_size_cap_and_cure",
            f"{FAULTS}/test_input.py::test_values_larger_than_the_object_store_arrive_or_are_refused",
        ),
    ),
    29: Row("50 times create and close", (f"{FAULTS}/test_soak.py::test_create_and_close_again_and_again",)),
    30: Row(
        "an exception, argument or result that cannot be pickled",
        (
            "tests/group/calls/test_calls.py::test_what_cannot_travel_is_a_clear_error",
            "tests/group/calls/test_calls.py::test_a_result_that_unpickles_badly_names_call_and_rank",
        ),
    ),
    31: Row(
        "SIGKILL of the group's controller, in each phase",
        (
            f"{FAULTS}/test_controller.py::test_a_controller_that_is_killed_is_known_within_2_s",
            f"{FAULTS}/test_controller.py::test_a_controller_struck_while_the_group_is_made_leaves_nothing",
            f"{FAULTS}/test_controller.py::test_a_named_group_comes_back_broken_and_restarts_with_its_newest_save",
            f"{FAULTS}/test_controller.py::test_what_a_killed_controller_knew_is_there_without_any_driver",
            f"{FAULTS}/test_controller.py::test_a_save_that_was_under_way_counts_if_its_files_are_whole",
            f"{FAULTS}/test_controller.py::test_a_controller_killed_in_a_copy_leaves_the_other_group_usable",
        ),
    ),
    32: Row(
        "SIGSTOP of the group's controller, in each phase",
        (
            f"{FAULTS}/test_controller.py::test_a_controller_that_is_stopped_is_ended_by_the_driver",
            f"{FAULTS}/test_controller.py::test_a_controller_struck_while_the_group_is_made_leaves_nothing",
            f"{FAULTS}/test_controller.py::test_a_named_group_comes_back_broken_and_restarts_with_its_newest_save",
        ),
    ),
    33: Row(
        "the controller's node is lost, in each phase",
        ("tests/cluster/test_unreachable_hosts.py::test_a_controller_whose_node_is_lost_names_the_node",),
    ),
}
