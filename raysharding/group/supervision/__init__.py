"""Supervision: one thread per group sends calls to the ranks, judges failures, and stops or keeps ranks."""

from raysharding.group.supervision.client import Client as Client
from raysharding.group.supervision.failures import broken as broken
from raysharding.group.supervision.failures import judge as judge
from raysharding.group.supervision.failures import leaves_intact as leaves_intact
from raysharding.group.supervision.failures import resets_some as resets_some
from raysharding.group.supervision.failures import saw_raise as saw_raise
from raysharding.group.supervision.group_state import GroupState as GroupState
from raysharding.group.supervision.probes import probe_all as probe_all
from raysharding.group.supervision.probes import read_log as read_log
from raysharding.group.supervision.probes import read_stacks as read_stacks
from raysharding.group.supervision.running_call import Check as Check
from raysharding.group.supervision.supervisor import Supervisor as Supervisor
from raysharding.group.supervision.survivors import Replicas as Replicas
