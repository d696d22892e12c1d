"""A driver in a process of its own that has a group, for all files here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.group.standing import Driver, StandingCluster

MINE = """
from tests.group.calls.test_queue import noted

def loss(output, rows):
    return output.square().mean()

group = make(name="shared", replace=True, timeouts=Timeouts(drain_s=1.0), optimizer=torch.optim.SGD)
ROWS = torch.ones(3, 8)
asks = {
    "train_step": lambda: group.train_step(Split(ROWS), loss=loss)["loss"] > 0,
    "forward": lambda: list(group.forward(Split(ROWS)).shape),
    "fit": lambda: group.fit([{"input": [1.0] * 8}] * 4, batch_size=2, loss=lambda output: output.square().mean(),
                             progress=False).num_steps,
    "load": lambda: group.load(sys.argv[2]) is not None,
    "sleep": lambda: group.call(time.sleep, 0.01),
    "noted": lambda: group.call(noted),
    "state": lambda: group.state.value,
    "pids": lambda: [one.pid for one in group.ranks],
    "restart": lambda: group.restart(world_size=2).world_size,
    "shutdown": lambda: group.shutdown(),
}
for line in sys.stdin:
    begun = now()
    try:
        tell(value=asks[line.strip()](), seconds=now() - begun)
    except GroupError as error:
        tell(error=str(error), seconds=now() - begun)
"""


@pytest.fixture(scope="package")
def mine(standing: StandingCluster, checkpoint: Path) -> Iterator[Driver]:
    """A driver that makes the group `shared`, and does what it is told; tests leave the group READY."""
    with Driver(standing, checkpoint, MINE) as driver:
        driver.hear()
        yield driver
        driver.say("shutdown")
        driver.hear()


def ask(driver: Driver, what: str) -> str:
    """Have a driver do something; returns the error, or what came of it."""
    driver.say(what)
    heard = driver.hear()
    return str(heard.get("error", heard.get("value")))
