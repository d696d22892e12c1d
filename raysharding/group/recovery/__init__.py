"""Restarts of broken groups, and takeovers of named groups by another driver."""

from raysharding.group.recovery.attach import attach
from raysharding.group.recovery.claim_name import claim_name
from raysharding.group.recovery.restart import RestartReport, restart
