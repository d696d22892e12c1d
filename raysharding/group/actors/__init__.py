"""The rank's side: the Ray actor, its commands, the thread that runs them, its ownership by a driver."""

from raysharding.group.actors.actor import REMOTE_RANK_ACTOR as REMOTE_RANK_ACTOR
from raysharding.group.actors.actor import ActorInfo as ActorInfo
from raysharding.group.actors.commands import Assignment as Assignment
from raysharding.group.actors.commands import Blueprint as Blueprint
from raysharding.group.actors.dataset_blocks import DatasetBlocks as DatasetBlocks
