"""Supervision: one thread per group sends calls to the ranks, judges failures, and stops or keeps ranks."""

from raysharding.group.supervision.client import Client
from raysharding.group.supervision.failures import broken, judge, leaves_intact, resets_some, saw_raise
from raysharding.group.supervision.group_state import GroupState
from raysharding.group.supervision.live_view import LiveView, Seen
from raysharding.group.supervision.probes import probe_all, rank_statuses, read_log, read_stacks
from raysharding.group.supervision.running_call import Check
from raysharding.group.supervision.supervisor import Supervisor
