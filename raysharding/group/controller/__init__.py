"""The controller: the actor that owns a group's ranks; its state machine, queue, judgement, lease and record."""

from raysharding.group.controller.actor import REMOTE_CONTROLLER, Identity
