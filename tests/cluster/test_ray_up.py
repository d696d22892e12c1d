"""cluster/ray-up: `ray up` over ssh to two hosts, from a third; the files for clouds by Ray's own checks of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.local.hosts import Host, Hosts
from tests.cluster.conftest import require_hosts
from tests.cluster.driver import ROOT

FOLDER = ROOT / "cluster" / "ray-up"
PAGE = ROOT / "docs" / "pages" / "ray-up.md"
SSHD = "/usr/sbin/sshd"


class Site:
    """A head, a worker, and the machine of `ray up`: homes, /tmp and processes of their own, one folder that all see."""

    def __init__(self, hosts: Hosts, scratch: Path) -> None:
        self.head, self.worker, self.laptop = hosts
        self.scratch = scratch
        self.shared = scratch / "shared"
        self.shared.mkdir()
        key = scratch / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=30)
        for host in hosts:
            self._separate(host, key)
        for host in (self.head, self.worker):
            self._serve_ssh(host)
        self.home(self.laptop).joinpath(".ssh", "id_ed25519").write_bytes(key.read_bytes())
        self.home(self.laptop).joinpath(".ssh", "id_ed25519").chmod(0o600)

    def home(self, host: Host) -> Path:
        """The home of the user `ubuntu` there, as this process sees it; the hosts see it at /home."""
        return self.scratch / host.name

    def _separate(self, host: Host, key: Path) -> None:
        home = self.home(host)
        (home / ".ssh").mkdir(parents=True, mode=0o700)
        home.chmod(0o700)
        shutil.copy(key.with_suffix(".pub"), home / ".ssh" / "authorized_keys")
        # The machine's Python: what is installed in this one's environment counts as installed, nothing is fetched.
        paths = os.pathsep.join((str(ROOT), sysconfig.get_path("purelib")))
        machine = {"PATH": f"{Path(sys.executable).parent}:$PATH", "PYTHONPATH": paths, "PIP_NO_INDEX": "1"}
        machine |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_raylet_start_wait_time_s": "120"}
        (home / ".bashrc").write_text("".join(f"export {name}={value}\n" for name, value in machine.items()))
        users = self.scratch / f"{host.name}.passwd"
        users.write_text(f"ubuntu:*:0:0::/home:/bin/bash\n{Path('/etc/passwd').read_text()}")
        host.show_alone(users, "/etc/passwd")
        host.show_alone(self.shared, "/mnt")
        host.show_alone(home, "/home")
        for place in ("/tmp", "/run", "/dev/shm"):
            host.hide(place)
        # `ray dashboard` listens at ::1, too, and ssh gives up where it cannot.
        host.run("sh", "-c", "f=/proc/sys/net/ipv6/conf/lo/disable_ipv6; [ ! -e $f ] || echo 0 > $f")

    def _serve_ssh(self, host: Host) -> None:
        host.run("mkdir", "/run/sshd")
        host.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/run/host_key")
        # Processes of its own: `ray stop` ends all of Ray's that it sees.
        own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        options = ["-o", "PidFile=none", "-o", "UsePAM=no", "-o", "PermitRootLogin=prohibit-password"]
        with (self.scratch / f"{host.name}.sshd").open("wb") as log:
            host.popen([*own, SSHD, "-D", "-e", "-f", "/dev/null", "-h", "/run/host_key", *options], stderr=log)

    def begin(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the laptop, in the home there."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
        environment = {"HOME": "/home", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
        environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        return self.laptop.popen(command, env=inherited | environment, cwd="/home", stdin=subprocess.DEVNULL, **options)

    def run(self, *command: str, timeout_s: float = 240.0) -> str:
        """Run a command on the laptop to its end; returns what it printed, colours left out."""
        process = self.begin(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output, _ = process.communicate(timeout=timeout_s)
        output = re.sub(r"\x1b\[\d+m", "", output)
        assert process.returncode == 0, f"{' '.join(command)} ended with {process.returncode}:\n{output[-6000:]}"
        return str(output)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    require_hosts()
    missing = [name for name in (SSHD, "ssh", "ssh-keygen", "rsync") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not found: {', '.join(missing)}; tests/install_debian.sh installs them")
    with Hosts(3) as hosts:
        yield Site(hosts, tmp_path)


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def program() -> str:
    """The page's."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(block)


def save_llama(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **sizes)).save_pretrained(folder)


@pytest.mark.full
@pytest.mark.timeout(580)
def test_ray_up_over_ssh(site: Site) -> None:
    config = read("local.yaml")
    config["provider"] |= {"head_ip": site.head.address, "worker_ips": [site.worker.address]}
    home = site.home(site.laptop)
    (home / "local.yaml").write_text(yaml.safe_dump(config))
    (home / "program").mkdir()
    (home / "program" / "train.py").write_text(program())
    save_llama(site.shared / "llama")
    import time
    t = time.time()
    site.run("ray", "get-auth-token", "--generate")
    print("token", time.time() - t); t = time.time()
    up = site.run("ray", "up", "-y", "local.yaml")
    print("up", time.time() - t); t = time.time()
    tunnel = site.begin("ray", "dashboard", "local.yaml", stdout=subprocess.DEVNULL)
    time.sleep(8)
    submit = ["ray", "job", "submit", "--address", "http://127.0.0.1:8265", "--working-dir", "program", "--"]
    site.begin(*submit, "python", "train.py", stdout=open("/tmp/rayup/job.log","w"), stderr=subprocess.STDOUT).wait(250)
    print(open("/tmp/rayup/job.log").read())
    print("job", time.time() - t); t = time.time()
    print(site.run("ray", "exec", "local.yaml", "ray status"))
    print("exec", time.time() - t); t = time.time()
    shutil.copytree(site.scratch, "/tmp/rayup/scratch", dirs_exist_ok=True, ignore=lambda d, n: ["raysharding-env"])
    site.head.run("sh","-c",f"cp -r /tmp/ray/session_latest/logs /home/logs")
    shutil.copytree(site.home(site.head)/"logs", "/tmp/rayup/logs", dirs_exist_ok=True)
    print(site.run("ray", "down", "-y", "local.yaml"))
    print("down", time.time() - t); t = time.time()
    while time.time() - t < 40:
        for host in (site.head, site.worker):
            print(host.name, len([Path(f"/proc/{p}/cmdline").read_bytes()[:100] for p in host.pids()]))
        time.sleep(4)
