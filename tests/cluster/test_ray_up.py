"""cluster/ray-up: what docs/pages/ray-up.md says, over ssh to two hosts; the files for clouds by Ray's own checks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.local.hosts import Host, Hosts
from tests.cluster.conftest import require_hosts
from tests.cluster.driver import ROOT
from tests.docs.blocks import texts_of

FOLDER = ROOT / "cluster" / "ray-up"
SSHD = "/usr/sbin/sshd"
COMMANDS = ("file_mounts", "setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
"""What a cloud's file shares with the one that runs here."""


def read(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / name).read_text()))


@pytest.mark.parametrize("name", ["local.yaml", "aws.yaml", "gcp.yaml"])
def test_ray_takes_the_file_and_a_cloud_runs_the_commands_that_run_over_ssh(name: str) -> None:
    config = prepare_config(read(name))
    validate_config(config)
    # None of the provider's own start commands, whose dashboard is open to the network, is merged in.
    assert [command for command in config["head_start_ray_commands"] if "0.0.0.0" in command] == []
    workers = sum(kind["max_workers"] for kind in config["available_node_types"].values())
    assert workers == config["max_workers"]

    local = prepare_config(read("local.yaml"))
    assert {key: config[key] for key in COMMANDS} == {key: local[key] for key in COMMANDS}
    assert config["worker_setup_commands"] == local["worker_setup_commands"]
    # Beside them, the head gets the client of the cloud.
    clients = config["head_setup_commands"][len(local["head_setup_commands"]) :]
    assert len(clients) == (name != "local.yaml")
    assert all(one.startswith("~/raysharding-env/bin/python -m pip install --quiet ") for one in clients)


class Site:
    """A head, a worker, and the laptop of `ray up`: homes, /tmp and processes of their own, and /mnt, which all see."""

    def __init__(self, hosts: Hosts, scratch: Path) -> None:
        self.head, self.worker, self.laptop = hosts
        self._scratch = scratch
        self.shared = scratch / "shared"
        self.shared.mkdir()
        key = scratch / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=30)
        for host in hosts:
            self._separate(host)
        for host in (self.head, self.worker):
            self._serve_ssh(host, key.with_suffix(".pub"))
        shutil.copy(key, self.home(self.laptop) / ".ssh" / "id_ed25519")
        # The worker's first set-up was on another day: `ray up` finds its environment.
        venv.create(self.home(self.worker) / "raysharding-env")
        self.project = self.home(self.laptop) / "project"
        self.project.mkdir()

    def home(self, host: Host) -> Path:
        """The home of the user there, as this process sees it; the hosts see it at /home."""
        return self._scratch / host.name

    def _separate(self, host: Host) -> None:
        home = self.home(host)
        home.mkdir(mode=0o700)
        (home / ".ssh").mkdir(mode=0o700)
        # The machine's Python: what this one's environment has counts as installed, and nothing is fetched.
        paths = os.pathsep.join((str(ROOT), sysconfig.get_path("purelib")))
        machine = {"PATH": f"{Path(sys.executable).parent}:$PATH", "PYTHONPATH": paths, "PIP_NO_INDEX": "1"}
        machine |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_raylet_start_wait_time_s": "120"}
        (home / ".bashrc").write_text("".join(f"export {name}={value}\n" for name, value in machine.items()))
        # The user of the file, root by another name: the environment may be root's alone.
        users = self._scratch / f"{host.name}.passwd"
        users.write_text(f"{read('local.yaml')['auth']['ssh_user']}:*:0:0::/home:/bin/bash\n")
        users.write_text(users.read_text() + Path("/etc/passwd").read_text())
        host.show_alone(users, "/etc/passwd")
        host.show_alone(self.shared, "/mnt")
        host.show_alone(home, "/home")
        for place in ("/tmp", "/run", "/dev/shm"):
            host.hide(place)
        # `ray dashboard` listens at ::1, too, and ssh ends where it cannot.
        host.run("sh", "-c", "f=/proc/sys/net/ipv6/conf/lo/disable_ipv6; [ ! -e $f ] || echo 0 > $f")

    def _serve_ssh(self, host: Host, key: Path) -> None:
        shutil.copy(key, self.home(host) / ".ssh" / "authorized_keys")
        host.run("mkdir", "/run/sshd")
        host.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/run/host_key")
        # Processes of its own: `ray stop` ends all of Ray's that it sees.
        own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        options = ["-o", "PidFile=none", "-o", "UsePAM=no", "-o", "PermitRootLogin=prohibit-password"]
        command = [*own, SSHD, "-D", "-f", "/dev/null", "-h", "/run/host_key", *options]
        host.popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def begin(self, script: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a script on the laptop, in its project."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        own = {"HOME": "/home", "PATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
        command = ["bash", "-ec", script]
        return self.laptop.popen(command, env=inherited | own, cwd="/home/project", stdin=subprocess.DEVNULL, **options)

    def run(self, script: str, timeout_s: float = 200.0) -> str:
        """Run a script on the laptop to its end; returns what it printed, without colours."""
        process = self.begin(script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output, _ = process.communicate(timeout=timeout_s)
        output = re.sub(r"\x1b\[\d+m", "", output).replace("\r", "")
        assert process.returncode == 0, f"{script} ended with {process.returncode}:\n{output[-6000:]}"
        return str(output)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    require_hosts(SSHD, "ssh", "ssh-keygen", "rsync")
    with Hosts(3) as hosts:
        yield Site(hosts, tmp_path)


def one_process(model: Any) -> list[float]:
    """The losses of the page's program in this process; trains the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(8 * 32).reshape(8, 32) % 100
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.full
@pytest.mark.timeout(580)
def test_ray_up_over_ssh(site: Site) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **sizes))
    model.save_pretrained(site.shared / "llama")
    up, program, dashboard, submit, down = texts_of("docs/pages/ray-up.md", "test_ray_up_over_ssh")
    config = read("local.yaml")
    config["provider"] |= {"head_ip": site.head.address, "worker_ips": [site.worker.address]}
    (site.project / "cluster" / "ray-up").mkdir(parents=True)
    (site.project / "cluster" / "ray-up" / "local.yaml").write_text(yaml.safe_dump(config))
    (site.project / "train.py").write_text(program)

    site.run(up)
    site.begin(dashboard, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    site.run("for try in {1..600}; do : </dev/tcp/127.0.0.1/8265 && exit; sleep 0.1; done 2>/dev/null; exit 1")
    refused = "exec 3<>/dev/tcp/127.0.0.1/8265; printf 'GET /api/jobs/ HTTP/1.0\\r\\n\\r\\n' >&3; head -n 1 <&3"
    assert "401" in site.run(refused)
    said = site.run(submit)
    assert f"nodes ['{site.head.address}', '{site.worker.address}']" in said
    losses = [float(loss) for loss in re.findall(r"^loss (\S+)", said, re.MULTILINE)]
    assert losses == pytest.approx(one_process(model), abs=1e-5)
    saved = transformers.AutoModelForCausalLM.from_pretrained(site.shared / "out")
    torch.testing.assert_close(saved.state_dict(), model.state_dict(), rtol=0, atol=1e-5)
    said = site.run(down)
    assert re.search(r"2 local.cluster.node|1 local.cluster.node\n 1 local.cluster.node", said), said
    assert "No nodes remaining." in said
    for host in (site.head, site.worker):
        assert oct((site.home(host) / ".ray" / "auth_token").stat().st_mode)[-3:] == "600"
