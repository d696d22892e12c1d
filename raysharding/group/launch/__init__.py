"""Launches a group from its spec: find the checkpoint, plan memory, start actors, check nodes, load."""

from raysharding.group.launch.doctor import diagnose as diagnose
from raysharding.group.launch.launch import launch as launch
from raysharding.group.launch.launch import rendezvous as rendezvous
from raysharding.group.launch.memory_plan import GroupPlan as GroupPlan
from raysharding.group.launch.memory_plan import plan_group as plan_group
from raysharding.group.launch.preflight import Preflight as Preflight
from raysharding.group.launch.preflight import PreflightReport as PreflightReport
from raysharding.group.launch.record import GroupRecord as GroupRecord
from raysharding.group.launch.record import keep_record as keep_record
from raysharding.group.launch.record import update_record as update_record
from raysharding.group.launch.running_group import RunningGroup as RunningGroup
from raysharding.group.launch.spec import GroupSpec as GroupSpec
from raysharding.group.launch.spec import check_optimizer as check_optimizer
from raysharding.group.launch.start_actors import Started as Started
from raysharding.group.launch.start_actors import start_in_place_of as start_in_place_of
