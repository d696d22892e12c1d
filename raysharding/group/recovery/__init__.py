"""Restarts of broken groups, and takeovers of named groups by another driver."""

from raysharding.group.recovery.attach import attach as attach
from raysharding.group.recovery.restart import RestartReport as RestartReport
from raysharding.group.recovery.restart import restart as restart
