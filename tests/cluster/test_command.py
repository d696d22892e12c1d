"""`python -m cluster.local`, as a developer calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import require_hosts
from tests.cluster.driver import ROOT

PROGRAM = """
import ray
ray.init(logging_level="ERROR")
print(sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]), ray.util.get_node_ip_address())
"""


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_program_runs_on_two_hosts_and_nothing_is_left() -> None:
    require_hosts()
    command = [sys.executable, "-m", "cluster.local", "--hosts", "2", "--cpus", "1", "--"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert output == "['10.77.0.1', '10.77.0.2'] 10.77.0.1\n"
    assert "Ray at 10.77.0.1:6379" in errors
    left = [path for root in ("/run/netns", "/etc/netns") for path in Path(root).glob(f"rs{process.pid}-*")]
    assert left == []


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to give it up")
def test_without_root_the_message_says_so() -> None:
    # Imports first: nobody else may read this environment's files.
    code = "import os, sys; from cluster.local.__main__ import main; os.setuid(65534); sys.exit(main())"
    command = [sys.executable, "-c", code, "--hosts", "2", "--", "true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "network namespaces need root" in done.stderr
