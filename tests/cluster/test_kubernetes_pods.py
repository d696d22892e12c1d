"""The commands of cluster/kubernetes on hosts: a cluster as KubeRay starts it, its probes, the job, the notebook."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers

from cluster.local.hosts import Hosts
from tests.cluster import kuberay
from tests.cluster.conftest import rank_pids, require_hosts
from tests.cluster.kube_pods import IMAGE, USER, Pods, image_environment, wait_until
from tests.cluster.kuberay import FOLDER, one
from tests.docs.blocks import texts_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

NUM_STEPS, BATCH_SIZE = 300, 8
STATUS = """
import sys, urllib.request as r
try: print(r.urlopen(sys.argv[1], timeout=10).status)
except r.HTTPError as e: print(e.code)
"""
LOSS = """
import os, torch
from raysharding import Same
rows = torch.arange(8).view(1, 8)
print("loss", group.forward(input_ids=Same(rows), labels=Same(rows)).loss.item(), flush=True)
"""
GROUPS = ("head", "ranks", "ranks")


class Cluster:
    """The RayJob's cluster: a head, two workers, a host for submitter and notebook, and one for the next notebook."""

    def __init__(self, hosts: Hosts, pods: Pods, logs: Path) -> None:
        self.hosts, self.pods, self.logs = hosts, pods, logs
        self.job = one("rayjob.yaml", "RayJob")["spec"]
        self.spec = self.job["rayClusterSpec"]
        self.templates = {name: template["spec"] for name, template in kuberay.templates(self.spec).items()}
        self.auth = kuberay.auth_environment(self.spec, pods.secrets)
        address = hosts[0].address
        self.names = {kuberay.head_service(name): address for name in ("train", "raysharding")}
        self.names["raysharding-head-svc"] = address  # within the namespace
        self.ray: dict[int, subprocess.Popen[bytes]] = {}

    def variables(self, group: str) -> dict[str, str]:
        """What KubeRay adds to those of a group's container."""
        slow = {"RAY_raylet_start_wait_time_s": "300"}  # as in cluster/local: of a machine that does much else
        return slow | self.auth | kuberay.ray_environment("train", group)

    def start(self, index: int) -> None:
        """Start Ray in a pod; a worker's waits for the head in its init container."""
        host, group = self.hosts[index], GROUPS[index]
        command = kuberay.ray_command("train", self.spec, group)
        if group != "head":
            command[-1] = f"{kuberay.wait_command('train')[-1]}; {command[-1]}"
        with self.log(index).open("wb") as log:
            options = {"stdout": log, "stderr": log}
            self.ray[index] = self.pods.popen(host, self.templates[group], command, self.variables(group), **options)

    def wait_until_ready(self, index: int) -> None:
        """As kubelet waits."""
        wait_until(partial(self.is_ready, index), f"pod {index} ready", 300, self.log(index), self.ray[index])

    def first_process(self, index: int) -> int:
        """The process that gets the signals of a pod: bash has become `ray start`."""
        for pid in self.hosts[index].pids():
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(first.endswith(b"/ray") and second == b"start" for first, second in pairwise(arguments)):
                return pid
        raise LookupError(f"pod {index} has no `ray start`: {self.log(index).read_text()[-2000:]}")

    def log(self, index: int) -> Path:
        """What a pod's container prints."""
        return self.logs / f"{self.hosts[index].name}.log"

    def is_ready(self, index: int) -> bool:
        """KubeRay's probe of Ray 2.53 and newer, and those of its older versions, as kubelet runs them: no token."""
        urls = ["http://localhost:52365/api/healthz", "http://localhost:52365/api/local_raylet_healthz"]
        urls += ["http://localhost:8265/api/gcs_healthz"] * (GROUPS[index] == "head")
        return all(self.status(index, url) == "200" for url in urls)

    def status(self, index: int, url: str) -> str:
        """What a request from a host is answered."""
        process = self.hosts[index].popen([sys.executable, "-I", "-S", "-c", STATUS, url], stdout=-1, stderr=-1)
        return process.communicate(timeout=30)[0].decode().strip()

    def submit(self, log: Path, job: str = "train") -> subprocess.Popen[bytes]:
        """Start the submitter's container. A new cluster would know no jobs; this one needs another id."""
        pod = self.job["submitterPodTemplate"]["spec"]
        with log.open("wb") as output:
            command = kuberay.submit_command("train", self.job | {"jobId": job})
            return self.pods.popen(self.hosts[3], pod, command, self.auth, stdout=output, stderr=output)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_hosts()
    folder = tmp_path_factory.mktemp("pods")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # pytest's own are root's alone
    token = {"auth_token": secrets.token_hex(16)}
    job = folder / "job"
    job.mkdir()
    (job / "train.py").write_text((FOLDER.parents[1] / "examples" / "train.py").read_text())
    with Hosts(5) as hosts, Pods(folder / "volumes", {"raysharding-token": token}, {"train": job}) as pods:
        make_data(pods.claims["raysharding-data"])
        cluster = Cluster(hosts, pods, folder)
        for index, group in enumerate(GROUPS):
            pods.mount(hosts[index], cluster.templates[group], cluster.names)
        for host in list(hosts)[3:]:
            pods.mount(host, one("notebook.yaml", "Pod")["spec"], cluster.names)
        for index in range(len(GROUPS)):  # not all at once, unlike KubeRay: the machine has two cores
            cluster.start(index)
            cluster.wait_until_ready(index)
        yield cluster
        for host in hosts:
            host.kill()


def make_data(folder: Path) -> None:
    """`/data/model` and `/data/rows.jsonl` of rayjob.yaml."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    model.save_pretrained(folder / "model")
    rows = torch.randint(0, 32, (NUM_STEPS * BATCH_SIZE, 8)).tolist()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in rows))
    for path in folder.rglob("*"):
        os.chown(path, USER, USER)


def steps_saved(out: Path) -> list[int]:
    """Steps of the complete saves."""
    return sorted(int(path.parent.name.split("-")[-1]) for path in out.glob("step-*/model.safetensors*"))


def test_probes_answer_without_a_token_and_nothing_else_does(cluster: Cluster) -> None:
    assert cluster.status(0, "http://localhost:8265/api/jobs/") == "401"
    assert cluster.status(1, "http://localhost:8080/metrics") == "200", "Prometheus has no token either"


def test_the_job_is_stopped_saves_and_goes_on_where_it_was(cluster: Cluster, tmp_path: Path) -> None:
    """As by `kubectl delete rayjob`, or a drained node: the head's hook, and the signal to a worker, at once."""
    out = cluster.pods.claims["raysharding-data"] / "out"
    submitter = cluster.submit(log := tmp_path / "first.log")
    wait_until(lambda: steps_saved(out), "the job's first save", 200, log, submitter)
    assert [len(rank_pids(host)) for host in cluster.hosts] == [0, 1, 1, 0, 0]
    for index in range(len(GROUPS)):
        assert "object store is using /tmp" not in cluster.log(index).read_text(), "it fits into /dev/shm"
    os.kill(cluster.first_process(1), signal.SIGTERM)
    hook = cluster.templates["head"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    stop = cluster.pods.popen(cluster.hosts[0], cluster.templates["head"], hook, cluster.variables("head"))
    assert stop.wait(timeout=100) == 0
    submitter.wait(timeout=60)
    ended = re.search(r"fit: SIGTERM ended the run after step (\d+)", log.read_text())
    assert ended is not None, log.read_text()
    assert steps_saved(out)[-1] == int(ended[1]) < NUM_STEPS
    cluster.ray[1].wait(timeout=60)  # Ray had waited for the ranks, which have ended

    cluster.start(1)  # KubeRay's next pod
    cluster.wait_until_ready(1)
    submitter = cluster.submit(log := tmp_path / "second.log", job="train-2")
    assert submitter.wait(timeout=200) == 0, log.read_text()
    report = re.search(rf"^step {NUM_STEPS}, loss \S+: (\d+) steps", log.read_text(), re.MULTILINE)
    assert report is not None, log.read_text()
    assert int(report[1]) == NUM_STEPS - int(ended[1])
    model = transformers.LlamaForCausalLM.from_pretrained(out / f"step-{NUM_STEPS}")
    assert model.config.vocab_size == 32


@pytest.mark.skipif(IMAGE is not None, reason="puts a program in the place of Jupyter, which the image has")
def test_a_notebook_joins_makes_a_group_and_attaches_after_a_restart(cluster: Cluster, tmp_path: Path) -> None:
    test = "test_a_notebook_joins_makes_a_group_and_attaches_after_a_restart"
    first, second = texts_of("docs/pages/kubernetes.md", test)
    folder = cluster.pods.claims["raysharding-cache"] / "bin"
    folder.mkdir()
    said = ""
    kernels = (first + LOSS + "os._exit(0)\n", second + LOSS + "group.shutdown()\n")
    # The next pod has another address; for some seconds Ray would take it for the one that is gone.
    for host, kernel in zip(list(cluster.hosts)[3:], kernels, strict=True):
        cell = f"{sys.executable} - <<'END'\n{kernel}END\n"  # where Jupyter would run it
        (folder / "jupyter").write_text(f"#!/bin/sh\nset -e\necho jupyter $*\n{cell}")
        (folder / "jupyter").chmod(0o755)
        pod = one("notebook.yaml", "Pod")["spec"]
        container = pod["containers"][0]
        path = {"PATH": f"/cache/bin:{image_environment()['PATH']}", "RAY_raylet_start_wait_time_s": "300"}
        with (log := tmp_path / "notebook.log").open("wb") as output:
            command = [*container["command"], *container["args"]]
            process = cluster.pods.popen(host, pod, command, path, stdout=output, stderr=output)
        assert process.wait(timeout=200) == 0, log.read_text()
        said += log.read_text()
        host.kill()  # the pod goes, not only its kernel
    assert "jupyter lab --ip=0.0.0.0 --port=8888 --no-browser" in said
    made, attached = re.findall(r"^loss (\S+)$", said, re.MULTILINE)
    assert made == attached


@pytest.mark.skipif(IMAGE is None, reason="needs the image: RAYSHARDING_TEST_IMAGE")
def test_jupyter_of_the_image_answers_its_probe(cluster: Cluster, tmp_path: Path) -> None:
    pod = one("notebook.yaml", "Pod")["spec"]
    container = pod["containers"][0]
    with (log := tmp_path / "notebook.log").open("wb") as output:
        command = [*container["command"], *container["args"]]
        process = cluster.pods.popen(cluster.hosts[3], pod, command, {}, stdout=output, stderr=output)
    url = f"http://localhost:8888{container['readinessProbe']['httpGet']['path']}"
    wait_until(lambda: cluster.status(3, url) == "200", "Jupyter answers", 200, log, process)
    assert cluster.status(3, "http://localhost:8888/api/kernels") == "403", "without the token"
