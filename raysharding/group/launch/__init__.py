"""Launches a group from its spec: find the checkpoint, plan memory, start actors, check nodes, load."""

from raysharding.group.launch.copy_weights import WeightPaths, submit_copy
from raysharding.group.launch.doctor import diagnose
from raysharding.group.launch.launch import GroupRecord, RunningGroup, keep_record, launch, rendezvous, update_record
from raysharding.group.launch.memory_plan import GroupPlan, plan_group
from raysharding.group.launch.own_groups import end_own_groups
from raysharding.group.launch.preflight import Preflight, PreflightReport
from raysharding.group.launch.save_load import submit_load, submit_save
from raysharding.group.launch.spec import GroupSpec, check_optimizer
from raysharding.group.launch.start_actors import Started
