"""Files for Kubernetes and Docker Compose: by the schemas of who reads them, and by what must agree in them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.cluster.driver import ROOT
from tests.cluster.kuberay import FOLDER, Manifest, manifests, one, ray_command, templates
from tests.docs.blocks import blocks_of

KUBERNETES = "1.37"
SCHEMA = json.loads((Path(__file__).parent / "kuberay.json").read_text())


def cluster_specs() -> dict[str, Manifest]:
    """Ray clusters by the instance that their pods are labelled with."""
    job = one("rayjob.yaml", "RayJob")["spec"]
    return {"raysharding": one("raycluster.yaml", "RayCluster")["spec"], "train": job["rayClusterSpec"]}


def pods() -> dict[str, Manifest]:
    """Pod templates of all files."""
    found = {f"{name}/{group}": pod for name, spec in cluster_specs().items() for group, pod in templates(spec).items()}
    found["train/submitter"] = one("rayjob.yaml", "RayJob")["spec"]["submitterPodTemplate"]
    notebook = one("notebook.yaml", "Pod")
    found["notebook"] = {"metadata": notebook["metadata"], "spec": notebook["spec"]}
    return found


def validate(manifest: Manifest) -> None:
    """By Kubernetes' own schemas, or by those of operators in kuberay.json."""
    if manifest["kind"] in SCHEMA["$defs"]:
        schema = {"$ref": f"#/$defs/{manifest['kind']}", "$defs": SCHEMA["$defs"]}
        jsonschema.Draft202012Validator(schema).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def validate_pods(templates: dict[str, Manifest]) -> None:
    """All with one look at the schemas, which are large."""
    items = [
        {"metadata": template.get("metadata", {}) | {"name": name.replace("/", "-")}, "spec": template["spec"]}
        for name, template in templates.items()
    ]
    validate({"apiVersion": "v1", "kind": "PodList", "items": items})


def test_objects_and_pod_templates_have_the_fields_and_types_of_their_schemas() -> None:
    for path in FOLDER.glob("*.yaml"):
        for manifest in manifests(path.name):
            validate(manifest)
    validate_pods(pods())


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("raycluster.yaml", "spec headGroupSpec rayStartParams num-cpus", 0),
        ("raycluster.yaml", "spec authOptions secret", "raysharding-token"),
        ("rayjob.yaml", "spec backofLimit", 3),
        ("monitor.yaml", "spec podMetricsEndpoints 0 interval", "15 s"),
        ("storage.yaml", "spec accessMode", ["ReadWriteMany"]),
        ("network-policy.yaml", "spec ingress 0 from 0 podSelectors", {}),
        ("notebook.yaml", "spec containers 0 resources limits", "8Gi"),
    ],
)
def test_a_fault_in_a_manifest_is_seen(file: str, path: str, value: Any) -> None:
    manifest = manifests(file)[0]
    inner, last = inside(manifest, path.split())
    inner[last] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(manifest)


def inside(manifest: Any, path: list[str]) -> tuple[Any, Any]:
    """What the end of a path is in, and its key there."""
    *parents, last = path
    for step in parents:
        manifest = manifest[int(step)] if isinstance(manifest, list) else manifest[step]
    return manifest, int(last) if isinstance(manifest, list) else last


@pytest.mark.parametrize("name", pods())
def test_pods_fit_into_a_restricted_namespace_and_refer_to_what_is_there(name: str) -> None:
    """The rules of the pod security standard `restricted` that are about what we set; containers' defaults pass."""
    spec = pods()[name]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    kinds = {kind for volume in volumes.values() for kind in volume.keys() - {"name"}}
    assert kinds <= {"persistentVolumeClaim", "emptyDir", "configMap"}
    claims = {manifest["metadata"]["name"] for manifest in manifests("storage.yaml")}
    claimed = [volume["persistentVolumeClaim"] for volume in volumes.values() if "persistentVolumeClaim" in volume]
    assert {claim["claimName"] for claim in claimed} <= claims
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
        assert set(mounts) == set(volumes)
        if volumes:
            shm = volumes["shm"]["emptyDir"]
            assert mounts["shm"] == "/dev/shm"
            assert shm["medium"] == "Memory"
            assert shm["sizeLimit"].endswith("Gi"), "it counts as the container's memory"
            assert mounts["cache"] == "/cache", "HF_HOME of the image"


def test_clusters_of_the_job_and_of_the_notebook_are_alike() -> None:
    resident, job = cluster_specs().values()
    for group in ("head", "ranks"):
        mine, other = (templates(spec)[group]["spec"] for spec in (resident, job))
        for spec in (mine, other):
            (container,) = spec["containers"]
            for place, own in ((spec, "terminationGracePeriodSeconds"), (container, "lifecycle"), (container, "env")):
                place.pop(own, None)
            for place, listed in ((spec, "volumes"), (container, "volumeMounts")):
                place[listed] = [one for one in place[listed] if one["name"] != "job"]
        assert mine == other
    assert resident["authOptions"] == job["authOptions"]
    pinned: Any = re.search(r"^ray==(\S+)$", (FOLDER.parents[1] / "tests/constraints.txt").read_text(), re.MULTILINE)
    assert (resident["rayVersion"], job["rayVersion"]) == (pinned[1], pinned[1]), "what the tests run with"


def test_network_policies_select_the_pods_of_one_cluster_each() -> None:
    labels = {name: template["metadata"]["labels"]["app.kubernetes.io/instance"] for name, template in pods().items()}
    assert labels == {name: "train" if name.startswith("train/") else "raysharding" for name in labels}
    for policy in manifests("network-policy.yaml"):
        selector = {"matchLabels": {"app.kubernetes.io/instance": policy["metadata"]["name"]}}
        assert policy["spec"]["podSelector"] == selector
        assert policy["spec"]["ingress"][0] == {"from": [{"podSelector": selector}]}, "among themselves, on all ports"
        assert policy["spec"]["egress"][0] == {"to": [{"podSelector": selector}]}
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        ports = [port for rule in policy["spec"]["ingress"][1:] for port in rule["ports"]]
        assert ports == [{"port": 8265}, {"port": "metrics"}]
    first, second = (policy["spec"] for policy in manifests("network-policy.yaml"))
    assert (first["ingress"][1:], first["egress"][1:]) == (second["ingress"][1:], second["egress"][1:])


@pytest.mark.parametrize("file", ["raycluster.yaml", "rayjob.yaml"])
def test_a_gpu_is_one_sharp_away(file: str) -> None:
    manifest = yaml.safe_load((FOLDER / file).read_text().replace("# nvidia.com/gpu", "nvidia.com/gpu"))
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    assert " --num-gpus=1 " in ray_command("raysharding", spec, "ranks")[-1]
    assert "--num-gpus" not in ray_command("raysharding", spec, "head")[-1]


def page_patches() -> dict[str, list[Manifest]]:
    """The patches of docs/pages/kubernetes.md by file, in the order of its kustomization.yaml; its own is `inline`."""
    files = {block.title: block.text for block in blocks_of("docs/pages/kubernetes.md") if block.title}
    listed = yaml.safe_load(files["kustomization.yaml"])["patches"]
    return {one.get("path", "inline"): yaml.safe_load(one.get("patch") or files[one["path"]]) for one in listed}


def patched(changes: Iterable[Manifest]) -> Manifest:
    """The RayJob after operations of RFC 6902, as `kubectl kustomize` makes it."""
    job: Any = json.loads(json.dumps(one("rayjob.yaml", "RayJob")))  # without the anchors' shared objects
    for change in changes:
        inner, key = inside(job, change["path"].strip("/").split("/"))
        assert (key in inner if isinstance(inner, dict) else key < len(inner)) == (change["op"] != "add")
        if change["op"] == "remove":
            del inner[key]
        else:
            inner[key] = change["value"]
    return dict(job)


@pytest.mark.parametrize("name", [*page_patches(), "all"])
def test_the_page_s_patches_make_jobs(name: str) -> None:
    found = page_patches()
    job = patched([change for file, changes in found.items() if name in (file, "all") for change in changes])
    validate(job)
    found_pods = templates(job["spec"]["rayClusterSpec"]) | {"submitter": job["spec"]["submitterPodTemplate"]}
    specs = {name: template["spec"] for name, template in found_pods.items()}
    validate_pods(found_pods)
    if name in ("registry.yaml", "all"):
        assert all(spec["imagePullSecrets"] == [{"name": "registry"}] for spec in specs.values())
    if name in ("bucket.yaml", "all"):
        assert "persistentVolumeClaim" not in json.dumps(job)
        for role in ("head", "ranks"):
            (container,) = specs[role]["containers"]
            assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}]
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert set(mounts) == {volume["name"] for volume in specs[role]["volumes"]}
            assert "/data" not in mounts.values()
            assert mounts["cache"] == "/cache"
    if name in ("gpus.yaml", "all"):
        start = ray_command("train", job["spec"]["rayClusterSpec"], "ranks")[-1]
        assert " --num-gpus=8 " in start
        assert " --num-cpus=8 " in start
    if name == "all":
        (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        assert f"--ranks {workers['replicas'] * 8} " in job["spec"]["entrypoint"]
        assert "/data" not in job["spec"]["entrypoint"]


def test_the_page_shows_every_file_and_its_policy_is_for_the_pods_of_egress_https() -> None:
    (text,) = [block.text for block in blocks_of("docs/pages/kubernetes.md") if block.title == "egress-minio.yaml"]
    policy = yaml.safe_load(text)
    validate(policy)
    assert policy["spec"]["podSelector"] == one("egress-https.yaml", "NetworkPolicy")["spec"]["podSelector"]
    page = (FOLDER.parents[1] / "docs/pages/kubernetes.md").read_text()
    for path in (*FOLDER.glob("*.yaml"), FOLDER / "Dockerfile"):
        assert f'--8<-- "cluster/kubernetes/{path.name}"' in page


def test_the_job_has_the_time_that_its_parts_ask_for() -> None:
    job = one("rayjob.yaml", "RayJob")["spec"]
    stop_s = int(yaml.safe_load(job["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    head, ranks = templates(job["rayClusterSpec"]).values()
    (drain_s,) = [int(one["value"]) for one in ranks["spec"]["containers"][0]["env"] if "DRAIN" in one["name"]]
    grace_s = ranks["spec"]["terminationGracePeriodSeconds"]
    assert stop_s < drain_s < grace_s == head["spec"]["terminationGracePeriodSeconds"]
    hook = head["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[-1] == job["jobId"]


def test_the_image_pins_what_the_tests_run_with() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    assert text.count("-c /src/constraints.txt") == 1
    assert "USER 1000:1000" in text
    assert set(re.findall(r"(\w+)==", text)) == {"torch", "jupyterlab"}
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE)
    for path in " ".join(copied).split():
        assert any(f"!{path}".startswith(line) for line in ignored if line.startswith("!")), path


COMPOSE_FOLDER = ROOT / "cluster"
CPUS, GPUS = COMPOSE_FOLDER / "docker-compose.yaml", COMPOSE_FOLDER / "docker-compose.gpu.yaml"


def resolve(*files: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The files as one, with variables filled in, by podman-compose."""
    pytest.importorskip("podman_compose")
    command = [str(Path(sys.executable).with_name("podman-compose"))]
    command += [part for file in files for part in ("--file", str(file))]
    path = {"PATH": os.environ["PATH"]}
    options: dict[str, Any] = {"env": path | environment, "cwd": COMPOSE_FOLDER, "timeout": 60}
    return subprocess.run([*command, "config"], capture_output=True, text=True, **options)


@pytest.mark.skipif(shutil.which("podman") is None, reason="podman-compose needs podman, also to read a file")
@pytest.mark.parametrize("files", [(CPUS,), (CPUS, GPUS)], ids=["cpus", "gpus"])
def test_the_files_keep_to_the_specification(files: tuple[Path, ...]) -> None:
    compose_spec = pytest.importorskip("compose_spec")
    resolved = resolve(*files, RAY_AUTH_TOKEN="secret")
    compose_spec.PyCompose.from_yaml(resolved.stdout)
    services = yaml.safe_load(resolved.stdout)["services"]
    # Ray runs what it is sent, and Jupyter too: for this machine alone, and with the token.
    assert [port for service in services.values() for port in service["ports"] if port[:10] != "127.0.0.1:"] == []
    assert {service["environment"]["RAY_AUTH_TOKEN"] for service in services.values()} == {"secret"}
    assert ("deploy" in services["head"], "deploy" in services["notebook"]) == (GPUS in files, False)


@pytest.mark.skipif(shutil.which("podman") is None, reason="podman-compose needs podman, also to read a file")
def test_nothing_starts_without_a_token() -> None:
    resolved = resolve(CPUS)
    assert resolved.returncode != 0
    assert "32 random bytes" in resolved.stderr + resolved.stdout
