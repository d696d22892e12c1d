"""Pods without Kubernetes: commands of containers run as the manifests and KubeRay have them, each pod on its own host.

A pod has the network, mounts, user, variables and host names that it would have, but no limits of memory and CPUs. For
the image's files stand this machine's, unless RAYSHARDING_TEST_IMAGE names an image that buildah has.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from cluster.local.hosts import Host
from tests import clock
from tests.cluster.kuberay import FOLDER, Manifest, environment
from tests.cluster.kuberay import quantity as num_bytes

USER = 1000
ROOT = Path(__file__).resolve().parents[2]
IMAGE = os.environ.get("RAYSHARDING_TEST_IMAGE")
PROGRAMS = (Path(sys.base_prefix), Path(sys.prefix), ROOT)
"""What stands for the image's files."""
# Shows the directories of its arguments where they are, under parents that others may not enter: those are covered by
# empty ones. $1: parents, one a line.
EXPOSE = """
parents=$1; shift
mount -t tmpfs none /media
for path; do mkdir -p "/media$path"; mount --bind "$path" "/media$path"; done
echo "$parents" | while read -r parent; do mount -t tmpfs -o mode=755 none "$parent"; done
for path; do mkdir -p "$path"; mount --bind "/media$path" "$path"; done
"""


def image_environment() -> dict[str, str]:
    """`ENV` of the image's last stage, with this environment's Python for the image's."""
    (line,) = re.findall(r"^ENV PATH=/opt/venv/bin:\$PATH (HF_HOME=.*)$", (FOLDER / "Dockerfile").read_text(), re.M)
    variables = dict(part.split("=", 1) for part in line.split())
    path = os.pathsep.join((str(Path(sys.executable).parent), "/usr/bin:/bin"))
    # The package is this checkout; the image has it installed.
    return variables | {"PATH": path, "HOME": "/home/ray", "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}


class Pods:
    """A context manager for the volumes that all pods share, and for what they are mounted on."""

    def __init__(self, scratch: Path, secrets: dict[str, dict[str, str]], config_maps: Mapping[str, Path]) -> None:
        self.secrets = secrets
        self.claims = {f"raysharding-{name}": scratch / name for name in ("data", "cache")}
        self._config_maps = config_maps
        self._scratch = scratch
        self._made: list[Path] = []
        self._containers: dict[str, str] = {}

    def __enter__(self) -> Self:
        for target in (Path("/data"), Path("/cache")):
            if not target.exists():
                target.mkdir()
                self._made.append(target)
        for folder in (self._scratch, *self.claims.values()):
            folder.mkdir(exist_ok=True)
            os.chown(folder, USER, USER)  # what fsGroup is for
        return self

    def __exit__(self, *_: object) -> None:
        for container in self._containers.values():
            subprocess.run(["buildah", "rm", container], check=True, stdout=subprocess.DEVNULL, timeout=60)
        for target in self._made:
            target.rmdir()

    def mount(self, host: Host, pod: Manifest, names: Mapping[str, str]) -> None:
        """Give a host a pod's volumes, and the names that Kubernetes' name server would know."""
        closed = {parent for path in PROGRAMS for parent in path.parents if not parent.stat().st_mode & 1}
        if closed:
            host.run("sh", "-ec", EXPOSE, "expose", "\n".join(map(str, sorted(closed))), *map(str, PROGRAMS))
        entries = "".join(f"{address} {name}\\n" for name, address in names.items())
        host.run("sh", "-c", f"printf '{entries}' >>/etc/hosts")
        host.run("mount", "-t", "tmpfs", "-o", f"uid={USER},gid={USER},mode=755", "none", "/home")
        host.run("install", "-d", "-o", str(USER), "-g", str(USER), "/home/ray")
        if IMAGE is not None:
            self._containers[host.name] = host.run("buildah", "from", "--pull-never", IMAGE, timeout_s=120).strip()
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0].get("volumeMounts", [])}
        for volume in pod.get("volumes", []):
            self._mount_volume(host, volume, mounts[volume["name"]])

    def _mount_volume(self, host: Host, volume: Manifest, target: str) -> None:
        host.run("mkdir", "-p", target)
        if "persistentVolumeClaim" in volume:
            host.show_alone(self.claims[volume["persistentVolumeClaim"]["claimName"]], target)
        elif "configMap" in volume:
            host.show_alone(self._config_maps[volume["configMap"]["name"]], target)
        elif volume["emptyDir"].get("medium") == "Memory":
            size = num_bytes(volume["emptyDir"]["sizeLimit"])
            host.run("mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "none", target)
        else:
            own = self._scratch / f"{host.name}-{volume['name']}"
            own.mkdir()
            os.chown(own, USER, USER)
            host.show_alone(own, target)

    def popen(
        self, host: Host, pod: Manifest, command: Sequence[str], variables: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command in a pod's first container, as the user and with the rights that the pod names."""
        user, group = (pod["securityContext"][name] for name in ("runAsUser", "runAsGroup"))
        container = pod["containers"][0]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        own = {**variables, **environment(container, self.secrets)}
        if IMAGE is not None:
            mounts = (mount["mountPath"] for mount in container.get("volumeMounts", []))
            targets = ["/etc/hosts", "/etc/nsswitch.conf", *mounts]
            run = ["buildah", "run", "--isolation=chroot", "--no-hosts", f"--hostname={host.name}"]
            run += [f"--user={user}:{group}", "--cap-drop=all"]
            run += [f"--volume={target}:{target}" for target in targets]
            run += [f"--env={name}={value}" for name, value in own.items()]
            return host.popen([*run, self._containers[host.name], "--", *command], **options)
        rights = [f"--reuid={user}", f"--regid={group}", "--clear-groups"]
        rights += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        return host.popen(["setpriv", *rights, *command], cwd="/home/ray", env=image_environment() | own, **options)


def wait_until(
    condition: Callable[[], object], what: str, within_s: float, log: Path, process: subprocess.Popen[Any]
) -> None:
    """Poll while a process runs; a failure shows the end of its log."""
    try:
        clock.wait_until(lambda: process.poll() is not None or condition(), within_s, what, every_s=0.5)
        assert condition(), f"{what}: the process has ended"
    except AssertionError as error:
        raise AssertionError(f"{error}: {log.read_text(errors='replace')[-3000:]}") from None
