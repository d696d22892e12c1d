"""What KubeRay makes of a manifest: the containers' commands and environment, as its operator generates them.

Follows `BuildPod`, `generateRayStartCommand`, `setContainerEnvVars`, `SetContainerTokenAuthEnvVars` of the operator in
controllers/ray/common/pod.go, and `BuildJobSubmitCommand` in job.go, at 1.7.0: see those where a test fails here.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "cluster/kubernetes"
NAMESPACE = "ml"
AUTH_TOKEN_KEY = "auth_token"
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}

Manifest = dict[str, Any]


@functools.cache
def _parsed(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def manifests(name: str) -> list[Manifest]:
    """Objects of a file of cluster/kubernetes, the caller's own."""
    return copy.deepcopy(_parsed(name))


def one(name: str, kind: str) -> Manifest:
    """The object of a kind in a file."""
    (found,) = [manifest for manifest in manifests(name) if manifest["kind"] == kind]
    return found


def quantity(text: str) -> int:
    """A quantity of Kubernetes, rounded up as `Quantity.Value` does."""
    number = text.rstrip("KMGim")
    if text.endswith("m"):
        return -(-int(number) // 1000)
    return int(number) * _UNITS[text[len(number) :]]


def templates(cluster_spec: Manifest) -> dict[str, Manifest]:
    """Pod templates of a RayCluster's groups by name; the head's is `head`."""
    workers = {group["groupName"]: group["template"] for group in cluster_spec["workerGroupSpecs"]}
    return {"head": cluster_spec["headGroupSpec"]["template"]} | workers


def head_service(cluster: str) -> str:
    """Name under which pods find the head."""
    return f"{cluster}-head-svc.{NAMESPACE}.svc.cluster.local"


def _ray_start(group: Manifest, params: dict[str, str], is_head: bool) -> str:
    limits = group["template"]["spec"]["containers"][0]["resources"].get("limits", {})
    params = params | group.get("rayStartParams", {})
    params |= {"block": "true", "metrics-export-port": "8080", "dashboard-agent-listen-port": "52365"}
    if "cpu" in limits:
        params.setdefault("num-cpus", str(quantity(limits["cpu"])))
    if "memory" in limits:
        params.setdefault("memory", str(quantity(limits["memory"])))
    for name, value in sorted(limits.items()):
        if name.endswith("gpu"):
            params.setdefault("num-gpus", str(value))
    options = ((name, params[name]) for name in sorted(params))
    flags = "".join(f" --{name} " if value == "true" else f" --{name}={value} " for name, value in options)
    return f"ray start {'--head ' if is_head else ''}{flags}"


def ray_command(cluster: str, cluster_spec: Manifest, group_name: str) -> list[str]:
    """Command and arguments of a group's Ray container."""
    if group_name == "head":
        start = _ray_start(cluster_spec["headGroupSpec"], {"dashboard-host": "0.0.0.0"}, is_head=True)
    else:
        (group,) = [group for group in cluster_spec["workerGroupSpecs"] if group["groupName"] == group_name]
        start = _ray_start(group, {"address": f"{head_service(cluster)}:6379"}, is_head=False)
    return ["/bin/bash", "-c", "--", f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {start}"]


def wait_command(cluster: str) -> list[str]:
    """What a worker's init container runs until it succeeds."""
    return ["/bin/bash", "-c", "--", f"until ray health-check --address {head_service(cluster)}:6379; do sleep 5; done"]


def environment(container: Manifest, secrets: dict[str, dict[str, str]]) -> dict[str, str]:
    """A container's own variables, with those that come from secrets."""
    found = {}
    for variable in container.get("env", []):
        if "value" in variable:
            found[variable["name"]] = variable["value"]
            continue
        reference = variable["valueFrom"]["secretKeyRef"]
        if reference["name"] in secrets or not reference.get("optional"):
            found[variable["name"]] = secrets[reference["name"]][reference["key"]]
    return found


def auth_environment(cluster_spec: Manifest, secrets: dict[str, dict[str, str]]) -> dict[str, str]:
    """What `authOptions` puts into every container of Ray and into the submitter."""
    options = cluster_spec["authOptions"]
    return {"RAY_AUTH_MODE": options["mode"], "RAY_AUTH_TOKEN": secrets[options["secretName"]][AUTH_TOKEN_KEY]}


def ray_environment(cluster: str, group_name: str) -> dict[str, str]:
    """What the operator adds to a Ray container's variables."""
    own = {"RAY_CLUSTER_NAME": cluster, "RAY_NODE_TYPE_NAME": group_name, "RAY_PORT": "6379"}
    own |= {"RAY_USAGE_STATS_KUBERAY_IN_USE": "1", "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1"}
    if group_name == "head":
        return own | {"RAY_ADDRESS": "127.0.0.1:6379"}
    service = head_service(cluster)
    return own | {"RAY_ADDRESS": f"{service}:6379", "FQ_RAY_IP": service, "RAY_IP": service.split(".")[0]}


def submit_command(cluster: str, job_spec: Manifest) -> list[str]:
    """Command and arguments of the submitter in K8sJobMode."""
    address, job = f"--address http://{head_service(cluster)}:8265", job_spec["jobId"]
    runtime_env = json.dumps(json.dumps(yaml.safe_load(job_spec["runtimeEnvYAML"])))
    submit = f"ray job submit {address} --no-wait --runtime-env-json {runtime_env} --submission-id {job}"
    script = f"if ! ray job status {address} {job} >/dev/null 2>&1 ; then {submit} -- {job_spec['entrypoint']} ; fi ; "
    return ["/bin/bash", "-ce", "--", f"{script}ray job logs {address} --follow {job}"]
