"""The rank's side: the Ray actor, its commands, the thread that runs them, its ownership by a driver."""

from raysharding.group.actors.actor import REMOTE_RANK_ACTOR, ActorInfo
from raysharding.group.actors.commands import Assignment
from raysharding.group.actors.dataset_blocks import DatasetBlocks
from raysharding.group.actors.model_facts import ModelFacts
from raysharding.group.actors.title import Title
