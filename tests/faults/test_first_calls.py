"""First calls to a new actor that fail as where its port was that of a process which died: Ray repeats them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.group.standing import Driver, StandingCluster

pytestmark = pytest.mark.timeout(180)

NUM_LOST = {"driver": 3, "controller": 2}
"""Calls that are lost: `ping`, and when it is repeated; `probe` of each rank."""

PROGRAM = """
ray.shutdown()
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={**runtime_env(), "env_vars": json.loads(sys.argv[3])})
with make() as group:
    tell(numbers=group.call(int), state=group.state.value)
"""


@pytest.mark.parametrize("lost", ["req", pytest.param("resp", marks=pytest.mark.full)])
@pytest.mark.parametrize("caller", NUM_LOST)
def test_first_calls_that_are_lost(caller: str, lost: str, standing: StandingCluster, checkpoint: Path) -> None:
    """By Ray's own fault injection, at the request or, after the method ran, at the response."""
    failures = {"num_failures": NUM_LOST[caller], f"{lost}_failure_prob": 100}
    variables = {"RAY_testing_rpc_failure": json.dumps({"CoreWorkerService.grpc_client.PushTask": failures})}
    of_driver, of_workers = (variables, {}) if caller == "driver" else ({}, variables)
    cluster = replace(standing, environment={**standing.environment, **of_driver})
    with Driver(cluster, checkpoint, PROGRAM, json.dumps(of_workers)) as driver:
        assert len(driver.hear()["pids"]) == 2
        assert driver.hear() == {"numbers": [0, 0], "state": "ready"}
