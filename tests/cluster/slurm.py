"""A real Slurm over `Hosts`: munged and slurmctld on host 0, a slurmd on every host, a home that all of them share."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.local.hosts import Host, HostsError
from tests.clock import wait_until

DAEMONS = ("munged", "slurmctld", "slurmd", "slurmscriptd")
START_S = 60.0
FREEZER = "/sys/fs/cgroup/freezer"

# See `man slurm.conf`. Two partitions over the same nodes: a job in `urgent` takes them from one in `normal`, which has
# a grace time and is queued again. As many CPUs as are said, and two devices on each node that are no GPUs, but are
# handed out as such.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={head}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{user_signal}
SlurmdParameters=config_overrides
KillWait=5
NodeName={names} CPUs=4 RealMemory=2000 Gres=gpu:2
PartitionName=normal Nodes={names} Default=YES PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes={names} PriorityTier=2 PreemptMode=OFF
"""


@contextmanager
def slurm_on(hosts: Sequence[Host], *, seen: Path, user_signal: bool) -> Iterator[Slurm]:
    """Hosts with Slurm on them; at the end, every process on them is killed.

    Args:
        hosts: Those that get Slurm, made by the caller, who closes them after this.
        seen: A folder in /tmp that the hosts see, too.
        user_signal: Whether SIGTERM, before a grace time, goes to the batch script (`preempt_send_user_signal`), and
            not to the tasks of `srun`. Without cgroups it does anyway: else all processes of the tasks would get it.
    """
    slurm = Slurm(hosts, seen, user_signal)
    try:
        slurm.start()
        yield slurm
    finally:
        for host in hosts:
            host.kill()
        slurm.remove_cgroups()
        shutil.rmtree(slurm.folder, ignore_errors=True)


class Slurm:
    """Each host has a /tmp and a /dev/shm of its own; `home` is shared."""

    def __init__(self, hosts: Sequence[Host], seen: Path, user_signal: bool) -> None:
        self.hosts = hosts
        self.user_signal = user_signal
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.home = self.folder / "home"
        self._shared = (self.folder, seen)
        for name in ("home", "state", "munge", *(f"spool-{host.name}" for host in hosts)):
            (self.folder / name).mkdir()
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
        self.environment = inherited | {"SLURM_CONF": str(self.folder / "slurm.conf"), "HOME": str(self.home)}
        self.environment["PATH"] += ":/usr/sbin"

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        for host in self.hosts:
            self._separate(host)
        self._configure(has_cgroups=all(self._give_cgroups(host) for host in self.hosts))
        head, munge = self.hosts[0], self.folder / "munge"
        files = [f"--{what}={munge}/{what.split('-')[0]}" for what in ("key-file", "pid-file", "log-file", "seed-file")]
        self._serve(head, "munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        self.wait((munge / "socket").exists, START_S, "munged listens")
        self._serve(head, "slurmctld", "-D")
        for host in self.hosts:
            self._serve(host, "slurmd", "-D", "-N", host.name)
        self.wait(self._is_idle, START_S, "all nodes are idle")

    def run(self, *command: str) -> str:
        """Run a command at home, as a user who has logged in to host 0, to its end; returns what it printed."""
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self.hosts[0].popen(command, env=self.environment, cwd=self.home, **piped)
        output, errors = process.communicate(timeout=START_S)
        assert process.returncode == 0, f"{command}: {errors}"
        return str(output)

    def submit(self, *arguments: str) -> int:
        """`sbatch`; returns the job's number."""
        return int(self.run("sbatch", "--parsable", *arguments))

    def job(self, number: int) -> Mapping[str, str]:
        """What `scontrol show job` says of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "--oneliner", "show", "job", str(number))))

    def left(self) -> list[str]:
        """Processes on the hosts that are not Slurm's daemons, and folders of jobs."""
        found = []
        for host in self.hosts:
            found += [f"{host.name}: {path}" for path in host.run("sh", "-c", "ls -d /tmp/ray* || true").split()]
            for pid in host.pids():
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                except FileNotFoundError:
                    continue
                if command and Path(command.split()[0]).name not in DAEMONS and "slurmscriptd" not in command:
                    found.append(f"{host.name}: {command}")
        return found

    def wait(self, is_so: Callable[[], Any], seconds: float, what: str) -> None:
        """Wait until something is so; else says what the logs of Slurm and of the jobs say."""
        try:
            wait_until(is_so, seconds, what, every_s=0.2)
        except AssertionError as error:
            logs = [path for place in (self.folder, self.home) for path in place.glob("*.log")]
            said = "\n".join(f"{log}: {log.read_text(errors='replace')[-12000:]}" for log in logs)
            raise AssertionError(f"{error}\n{said}") from None

    def _separate(self, host: Host) -> None:
        """A /tmp of its own, in which the shared folders have the paths that they have elsewhere."""
        for number, folder in enumerate(self._shared):
            host.run("mkdir", "-p", f"/dev/shm/{host.namespace}/{number}")
            host.run("mount", "--bind", str(folder), f"/dev/shm/{host.namespace}/{number}")
        host.hide("/tmp")
        host.run("chmod", "1777", "/tmp")
        for number, folder in enumerate(self._shared):
            host.run("mkdir", "-p", str(folder))
            host.run("mount", "--move", f"/dev/shm/{host.namespace}/{number}", str(folder))
        host.run("rm", "-r", f"/dev/shm/{host.namespace}")
        host.hide("/dev/shm")

    def _give_cgroups(self, host: Host) -> bool:
        """The freezer of cgroup v1, for `proctrack/cgroup`; returns whether there is one. Its root is Slurm's own."""
        host.hide("/sys/fs/cgroup")
        host.run("mkdir", FREEZER)
        try:
            host.run("mount", "-t", "cgroup", "-o", "freezer", "none", FREEZER)
        except HostsError:
            return False
        own = f"{FREEZER}/{self.folder.name}"
        host.run("mkdir", "-p", own)
        host.run("mount", "--bind", own, FREEZER)
        return True

    def remove_cgroups(self) -> None:
        """Once nothing runs in them. `_give_cgroups` has mounted one over the other."""
        remove = f"umount {FREEZER} && find {FREEZER}/{self.folder.name} -depth -type d -delete || true"
        for host in self.hosts:
            host.run("sh", "-c", remove)

    def _configure(self, *, has_cgroups: bool) -> None:
        names = ",".join(host.name for host in self.hosts)
        written = CONFIGURATION.format(
            head=self.hosts[0].name,
            folder=self.folder,
            names=names,
            proctrack="cgroup" if has_cgroups else "linuxproc",
            user_signal="SlurmctldParameters=preempt_send_user_signal" if self.user_signal or not has_cgroups else "",
        )
        (self.folder / "slurm.conf").write_text(written)
        # Else slurmd looks at /sys/fs/cgroup for the kind of cgroups, where a host may have nothing.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File=/dev/null,/dev/zero\n")

    def _serve(self, host: Host, *command: str) -> None:
        with (self.folder / f"{command[0]}-{host.name}.out.log").open("wb") as output:
            host.popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def _is_idle(self) -> bool:
        states = self.run("sh", "-c", "sinfo --noheader --Node --partition=normal --format=%T 2>/dev/null || true")
        return states.split() == ["idle"] * len(self.hosts)
