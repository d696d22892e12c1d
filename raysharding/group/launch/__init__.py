"""Launches a group from its spec: find the checkpoint, plan memory, start the controller and ranks, check, load."""

from raysharding.group.launch.copy_weights import submit_copy
from raysharding.group.launch.doctor import diagnose
from raysharding.group.launch.launch import RunningGroup, attach, launch, packed_spec
from raysharding.group.launch.memory_plan import GroupPlan, plan_group
from raysharding.group.launch.preflight import PreflightReport
from raysharding.group.launch.restart import RestartReport, restart
from raysharding.group.launch.save_load import submit_load, submit_save
from raysharding.group.launch.spec import GroupSpec, check_optimizer
from raysharding.group.launch.start_report import StartReport
