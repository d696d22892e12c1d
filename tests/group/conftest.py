"""The fixtures of these tests are in `tests/conftest.py`, shared with `tests/faults`."""

from tests.conftest import NUM_CPUS, free_cpus, make_group, make_mlp, placement_groups, rank_processes, room_for

__all__ = ["NUM_CPUS", "free_cpus", "make_group", "make_mlp", "placement_groups", "rank_processes", "room_for"]
