"""`cluster/slurm/raysharding.sbatch` under Debian's Slurm on two hosts: a preemption, a failure, and what is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.local.hosts import Hosts
from tests.cluster.conftest import require_hosts
from tests.cluster.driver import ROOT
from tests.cluster.slurm import Slurm, slurm_on, why_unavailable
from tests.forking import runtime_env

PAGE = ROOT / "docs" / "pages" / "slurm.md"
SMALL = ("--cpus-per-task=1", "--gpus-per-node=1", "--mem=900M", "--time=60")
NUM_STEPS, SAVE_EVERY, LR = 200, 20, 1e-3
FAILS = """
import ray
ray.init()
print({name: ray.cluster_resources()[name] for name in ("CPU", "GPU")})
raise SystemExit(3)
"""
DONE = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def write(home: Path) -> tuple[LlamaForCausalLM, torch.Tensor]:
    """Write `model` and `rows.jsonl`; returns what is in them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, bos_token_id=None, eos_token_id=None, dtype="float32"))
    model.save_pretrained(home / "model")
    rows = torch.randint(0, 64, (16, 8))
    lines = [json.dumps({"input_ids": row, "labels": row}) for row in rows.tolist()]
    (home / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return model, rows


def undisturbed(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Train in this process, by torch and transformers alone: a step has all rows. Returns the last step's loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for _ in range(NUM_STEPS):
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def driver_pid(slurm: Slurm) -> int:
    """The job's program."""
    for pid in slurm.hosts[0].pids():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if command[1:2] == [b"train.py"]:
            return pid
    raise AssertionError("no program on host 0")


@pytest.mark.full
@pytest.mark.timeout(480)
def test_a_preempted_job_goes_on_and_one_that_fails_does_not(worker_python: Path) -> None:
    require_hosts()
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(2) as hosts, slurm_on(list(hosts), seen=worker_python.parent) as slurm:
        # What a user has in the environment of `sbatch`; a loaded machine takes its time to start Ray.
        slurm.environment |= {"PYTHONPATH": str(ROOT), "RAY_raylet_start_wait_time_s": "120"}
        slurm.environment["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps({"runtime_env": runtime_env()})
        model, rows = write(slurm.home)
        for path in ("cluster/slurm/raysharding.sbatch", "examples/train.py"):
            shutil.copy(ROOT / path, slurm.home)
        submit = re.search(r"^sbatch (.* --steps (\d+))$", PAGE.read_text(), re.MULTILINE)
        assert submit is not None, "the page says how to submit"
        assert int(submit[2]) == NUM_STEPS
        options = [f"--save-every={SAVE_EVERY}", f"--lr={LR}", "--batch-size=16", "--ranks=2", "--device=cpu"]
        job = slurm.submit(*SMALL, *shlex.split(submit[1]), *options)
        log = slurm.home / f"raysharding-{job}.log"

        # Stopped once it has a save, so that it is not done before its nodes are taken. Slurm lets it go on for that.
        slurm.wait((slurm.home / "out" / f"step-{SAVE_EVERY}").exists, 200, "a save")
        driver = driver_pid(slurm)
        os.kill(driver, signal.SIGSTOP)
        assert hosts[0].run("stat", "--format=%a", f"/tmp/ray-{job}") == "700\n"
        assert (slurm.home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
        assert [path.name for path in (slurm.home / ".ray").iterdir()] == ["auth_token"]
        urgent = ("--partition=urgent", "--exclusive", "--nodes=1", "--job-name=urgent")
        fails = slurm.submit(*SMALL, *urgent, "--gpus-per-node=2", "raysharding.sbatch", "python", "-c", FAILS)
        slurm.wait(lambda: "raysharding.sbatch: SIGTERM" in log.read_text(), 60, "the job is preempted")
        os.kill(driver, signal.SIGCONT)
        slurm.wait(lambda: slurm.job(job)["JobState"] == "PENDING", 100, "it is queued again")
        said = log.read_text()
        stopped = re.search(r"SIGTERM ended the run after step (\d+); the program ends with status 0", said)
        assert stopped is not None, said
        assert int(stopped[1]) < NUM_STEPS

        # The one that took a node of it fails, and is not queued again. It saw what Slurm gave it of that.
        slurm.wait(lambda: slurm.job(fails)["JobState"] in DONE, 200, "the urgent job ends")
        said = (slurm.home / f"urgent-{fails}.log").read_text()
        assert "{'CPU': 1.0, 'GPU': 2.0}" in said, said
        ended = slurm.job(fails)
        assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "3:0", "0"), said

        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm waits before it starts a job again
        slurm.wait(lambda: slurm.job(job)["JobState"] in DONE, 200, "the job ends")
        ended, said = slurm.job(job), log.read_text()
        assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), said
        print(said)  # for a failure
        loss = re.search(rf"^step {NUM_STEPS}, loss (\S+): (\d+) steps", said, re.MULTILINE)
        assert loss is not None, said
        assert int(loss[2]) == NUM_STEPS - int(stopped[1]), "it went on where it was stopped"
        assert float(loss[1]) == pytest.approx(undisturbed(model, rows), abs=2e-3)
        trained = load_file(slurm.home / "out" / f"step-{NUM_STEPS}" / "model.safetensors")
        # By norm: AdamW makes up to LR of a step's rounding where a gradient is nearly 0 (2e-3 was seen).
        for name, weight in model.state_dict().items():
            assert (trained[name] - weight).norm() <= 0.02 * weight.norm(), name
        slurm.wait(lambda: not slurm.left(), 20, f"nothing is left: {slurm.left()}")
