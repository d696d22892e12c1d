"""A job on a cluster of its own: `ray job stop` saves, the next job continues, and Ray shows titles and metrics."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.dashboard.modules.metrics.grafana_dashboard_factory import generate_train_grafana_dashboard
from ray.job_submission import JobSubmissionClient
from safetensors.torch import save_file

from tests.clock import now
from tests.group.standing import ROOT, Driver, StandingCluster, seconds_until_gone, standing_cluster

DASHBOARD = json.loads((ROOT / "cluster" / "grafana" / "raysharding.json").read_text())
PAUSE_S = 1.0
"""Seconds that a step of the stopped job takes."""

JOB = """
import json, sys, time
from functools import partial
import ray, torch
from raysharding import ShardedModelGroup
from tests.forking import runtime_env

checkpoint, saves, pause_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
ray.init(runtime_env=runtime_env())

def build():
    from torch import nn
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(16, 8), nn.Linear(8, 4)
        def forward(self, input_ids):
            return self.out(self.table(input_ids))
    return Tiny()

def loss(output, *, target):
    time.sleep(pause_s)
    error = output.mean(dim=(1, 2)) - target
    return error.square().sum(), error.numel()

ids = torch.arange(48).reshape(12, 4) % 16
rows = {"input_ids": ids, "target": ids.float().mean(dim=1) / 16}

def tell(**what):
    print(json.dumps(what), flush=True)

def train(**options):
    made = {"world_size": 2, "device": "cpu", "optimizer": partial(torch.optim.AdamW, lr=1e-2)}
    with ShardedModelGroup.from_checkpoint(checkpoint, model=build, **made) as group:
        group.set_scheduler(torch.optim.lr_scheduler.ConstantLR, factor=1.0)
        if pause_s:
            group.restart(checkpoint)
            group.call(lambda: print("on a rank"))
            from ray.util.state import list_actors
            actors = list_actors(detail=True, filters=[("state", "=", "ALIVE"), ("class_name", "=", "RankActor")])
            tell(actors=sorted(one.repr_name for one in actors))
            node = ray.nodes()[0]
            tell(metrics=f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", name=group.name)
        report = group.fit(rows, batch_size=4, epochs=40, shuffle=True, loss=loss,
                           callbacks=[lambda step: tell(loss=step.metrics["loss"])], **options)
    return report

report = train(save_to=saves, resume="latest", save_on_signal=True)
tell(first=report.first_step, rest=report.history["loss"])
pause_s = 0.0
tell(whole=train().history["loss"])
"""


class Jobs:
    """A cluster's jobs, by the client that `ray job` is made of."""

    def __init__(self, standing: StandingCluster) -> None:
        headers = {"Authorization": f"Bearer {standing.environment['RAY_AUTH_TOKEN']}"}
        self.client = JobSubmissionClient(standing.dashboard, headers=headers)

    def submit(self, job: str, *arguments: str) -> None:
        environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}
        program = shlex.join([sys.executable, "-c", JOB, *arguments])
        self.client.submit_job(entrypoint=program, submission_id=job, runtime_env=environment)

    def log(self, job: str) -> str:
        log: str = self.client.get_job_logs(job)
        return log

    def told(self, job: str) -> dict[str, list[Any]]:
        """Return what the job's driver has told so far: key → values."""
        told: dict[str, list[Any]] = {}
        for line in self.log(job).splitlines():
            if line.startswith("{"):
                for key, value in json.loads(line).items():
                    told.setdefault(key, []).append(value)
        return told

    def wait(self, job: str, is_there: Callable[[], Any]) -> None:
        until = now() + 100
        while not is_there():
            assert now() < until, self.log(job)
            time.sleep(0.5)

    def wait_for_end(self, job: str) -> None:
        self.wait(job, lambda: self.client.get_job_status(job).is_terminal())


@pytest.fixture(scope="module")
def standing(worker_python: Path) -> Iterator[StandingCluster]:
    with standing_cluster(num_cpus=4, dashboard=True) as cluster:
        yield cluster


def metric_names(dashboard: dict[str, Any]) -> set[str]:
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [one["definition"] for one in dashboard["templating"]["list"] if "definition" in one]
    return set(re.findall(r"\bray_\w+", " ".join(queries)))


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_stopped_job_saves_and_the_next_one_continues(standing: StandingCluster, tmp_path: Path) -> None:
    jobs = Jobs(standing)
    torch.manual_seed(0)
    shapes = {"table.weight": (16, 8), "out.weight": (4, 8), "out.bias": (4,)}
    (tmp_path / "tiny").mkdir()
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, tmp_path / "tiny" / "model.safetensors")
    paths = (str(tmp_path / "tiny" / "model.safetensors"), str(tmp_path / "saves"))
    jobs.submit("first", *paths, str(PAUSE_S))
    jobs.wait("first", lambda: jobs.told("first").get("loss"))
    told = jobs.told("first")
    loss = _exported_loss(told["metrics"][0], told["name"][0])
    jobs.client.stop_job("first")
    jobs.wait_for_end("first")
    log, losses = jobs.log("first"), jobs.told("first")["loss"]
    assert loss in [pytest.approx(one) for one in losses]
    done = len(losses)
    assert f"raysharding: fit: SIGTERM ended the run after step {done}, saved in " in log
    assert os.listdir(tmp_path / "saves") == [f"step-{done}"]
    group = told["name"][0]
    assert told["actors"][0] == [f"tiny bundle {bundle} ({group})" for bundle in (0, 1)]
    for rank in (0, 1):
        assert re.search(rf"\(tiny rank {rank} \({group}\) pid=\d+\)\S* on a rank", log), log
    jobs.submit("second", *paths, "0")
    jobs.wait_for_end("second")
    second = jobs.told("second")
    assert second["first"] == [done]
    assert [*losses, *second["rest"][0]] == pytest.approx(second["whole"][0], abs=1e-6)


HASTY = """
def loss(output, *, target):
    import time
    time.sleep(3)
    return output.square().sum(), output.numel()  # which needs no further runs to find out what it is

with make(optimizer=torch.optim.SGD) as group:
    rows = {"input": torch.ones(2, 8), "target": torch.ones(2)}
    options = {"batch_size": 2, "epochs": 100, "loss": loss, "callbacks": [lambda step: tell(step=step.num_steps)]}
    group.fit(rows, save_to=sys.argv[2] + "-saves", save_on_signal=True, **options)
"""


@pytest.mark.full
def test_a_second_sigterm_ends_the_driver_without_a_save(standing: StandingCluster, checkpoint: Path) -> None:
    with Driver(standing, checkpoint, HASTY) as driver:
        pids = driver.hear()["pids"]
        driver.hear()
        time.sleep(1.0)  # into the next step, of 3 s: a signal between two steps ends the run at once, with a save
        driver.kill(signal.SIGTERM)
        while driver.process.poll() is None:  # two signals are one if the main thread does not run between them
            time.sleep(0.2)
            sent = driver.kill(signal.SIGTERM)
        assert abs(driver.process.wait(1)) == signal.SIGTERM  # by the handler of Ray, or by the default one
    seconds_until_gone(pids, sent, 10)
    assert not any(Path(f"{checkpoint}-saves").iterdir())


def _exported_loss(address: str, group: str) -> float:
    """Wait until Ray exports every metric of the dashboard, and return the loss."""
    wanted, until = metric_names(DASHBOARD), now() + 60
    while True:
        text = ""
        with suppress(OSError):  # the node's agent may be starting yet
            text = urllib.request.urlopen(address, timeout=5).read().decode()
        lines = [line for line in text.splitlines() if f'group="{group}"' in line]
        missing = wanted - {line.partition("{")[0] for line in lines}
        if not missing:
            (loss,) = (line.split()[-1] for line in lines if line.startswith("ray_raysharding_fit_loss{"))
            return float(loss)
        assert now() < until, f"Ray does not export {missing}"
        time.sleep(1)


def test_the_dashboard_has_the_form_of_rays_own() -> None:
    rays = json.loads(generate_train_grafana_dashboard()[0])
    assert DASHBOARD.keys() <= rays.keys()
    assert rays.keys() - DASHBOARD.keys() <= {"rayMeta"}
    own = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    variables = {one["name"]: one for one in rays["templating"]["list"]}
    for name in ("datasource", "window", "SessionName"):
        assert own[name].keys() == variables[name].keys(), name
    assert own["datasource"] == variables["datasource"]
    rows = (row.get("panels") or [row] for row in rays["panels"])
    panel = next(one for row in rows for one in row if "targets" in one)
    for one in DASHBOARD["panels"]:
        assert one["datasource"] == panel["datasource"]
        assert {"id", "title", "description", "gridPos", "fieldConfig", "targets"} <= one.keys() & panel.keys()
        for target in one["targets"]:
            assert target.keys() == panel["targets"][0].keys()
            assert '{SessionName=~"$SessionName",group=~"$group"}' in target["expr"]
    places = {(one["gridPos"]["x"], one["gridPos"]["y"]) for one in DASHBOARD["panels"]}
    assert len(places) == len({one["id"] for one in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
