"""Groups of drivers behind `ray://` (Ray Client), with a head and drivers in processes of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import programs
from tests.distributed.fidelity import CASES, make_checkpoint
from tests.group.standing import StandingCluster

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

BEGIN = """
import os, signal, sys, time
import ray, torch
from torch import nn
from raysharding import GroupError, Out, PlacementError, ShardedModelGroup, Split, Timeouts
from tests.forking import runtime_env

def build():
    from torch import nn
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def collate(rows):
    import torch
    return torch.tensor([row["x"] for row in rows])

def loss(output):
    return output.square().mean()

address, checkpoint, llama = sys.argv[1:]
ray.init(address, log_to_driver=False, runtime_env=runtime_env())
options = dict(model=build, world_size=2, device="cpu")
rows = torch.ones(3, 8)
"""

DRIVER = """
assert "2 ranks on cpu" in str(ShardedModelGroup.plan(checkpoint, **options))
group = ShardedModelGroup.from_checkpoint(checkpoint, **options, name="llama")
before = group.forward(Split(rows))
os.kill(group.ranks[1].pid, signal.SIGKILL)
try:
    group.forward(Split(rows))
except GroupError as error:
    print(error)
group.restart()
assert torch.equal(group.forward(Split(rows)), before)
large = torch.arange(100_000.0)  # crosses Ray Client by references
assert [rank for rank, value in sorted(group.call.remote(large.add, 1.0).stream()) if value[-1] == 100_000] == [0, 1]
assert ray.get(group.call.remote(len, large).ref(), timeout=60) == [100_000] * 2
assert group.call(torch.sum, ray.get(list(group.call(lambda: large, out=Out.refs())))[0])[0] == large.sum()
with ShardedModelGroup.from_checkpoint(llama, world_size=2, device="cpu") as generating:
    prompts = torch.tensor([[3, 4], [5, 6]])
    length = dict(min_new_tokens=3, max_new_tokens=3)
    call = generating.generate.remote(Split(prompts), stream=True, do_sample=False, **length)
    came = list(call.stream(60))
    assert [row for row, _ in came] == [0, 1] * 3, "a token of each row a step"
    assert torch.tensor([token for _, token in came]).view(3, 2).T.equal(call.result()[:, 2:])
assert ray.get(group.state_dict.remote("0.bias").ref(), timeout=60).keys() == {"0.bias"}
os.kill(int(group._client.connection.where.rpartition(" ")[2]), signal.SIGKILL)
while group.state.value != "broken":
    time.sleep(0.05)
print("then", group.status()["cause"])
group.restart()
assert torch.equal(group.forward(Split(rows)), before)
group.set_optimizer(torch.optim.SGD, lr=0.1)
data = [{"x": [float(number)] * 8} for number in range(16)]
print(group.fit(data, batch_size=8, epochs=2, collate_fn=collate, loss=loss))
assert not torch.equal(group.forward(Split(rows)), before)
try:
    ShardedModelGroup.from_checkpoint(checkpoint, **options | {"world_size": 9}, timeouts=Timeouts(place_s=1.0))
except PlacementError as error:
    print(error)
print("sum", group.forward(Split(rows)).sum().item())
"""

ATTACHING = """
group = ShardedModelGroup.attach("llama")
print("sum", group.forward(Split(rows)).sum().item())
group.shutdown()
"""


def run(code: str, standing: StandingCluster, *checkpoints: Path) -> str:
    """What a driver says."""
    arguments = (standing.client, *map(str, checkpoints))
    done = programs.run(BEGIN + code, *arguments, environment=standing.environment, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_group_is_made_trained_restarted_and_attached_to(
    standing: StandingCluster, checkpoint: Path, tmp_path: Path
) -> None:
    llama = tmp_path / "llama"
    make_checkpoint(llama, CASES["llama"])
    said = run(DRIVER, standing, checkpoint, llama)
    assert "rank 1 died" in said
    assert re.search(r"then group 'llama': its controller \(node \S+, pid \d+\) died, and the ranks with it", said)
    assert "4 steps in" in said
    assert "infeasible: even when idle, the cluster has space for 8 ranks" in said
    attached = run(ATTACHING, standing, checkpoint, llama)
    assert attached.splitlines()[-1] == said.splitlines()[-1], "the trained weights, without a load"
