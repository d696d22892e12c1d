"""`examples/notebook.ipynb` over three hosts, as a person runs it: an interrupt in `fit`, a restart of the kernel."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from cluster.local.ray_hosts import RayHosts
from tests.cluster.conftest import assert_released
from tests.cluster.driver import ROOT, Driver
from tests.forking import runtime_env
from tests.kernel import Notebook

EXAMPLE = ROOT / "examples/notebook.ipynb"


def test_it_is_committed_without_outputs() -> None:
    cells = [cell for cell in nbformat.read(EXAMPLE, as_version=4).cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * len(cells)


def run_example(folder: Path) -> dict[str, str]:
    """Run the cells from a kernel on this host; returns the outputs of each, by its id."""
    # As Ray's jobs pass it: the notebook's own `ray.init` names no environment of workers.
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": runtime_env()})}
    job["PYTHONPATH"] = os.pathsep.join((str(EXAMPLE.parent), os.environ["PYTHONPATH"]))
    shorter = ("NUM_STEPS = 200", "NUM_STEPS = 40")
    playing = Notebook(EXAMPLE, folder, replace=shorter, interrupt=("fit", "fit: step"), restart="attach")
    return asyncio.run(playing.run(job))


@pytest.mark.full
@pytest.mark.timeout(240)
def test_it_runs_with_an_interrupt_and_a_restart_of_its_kernel(driver: Driver, rays: RayHosts, tmp_path: Path) -> None:
    outputs = driver.run(run_example, tmp_path)
    print(*(f"== {cell}\n{text}" for cell, text in outputs.items()), sep="\n")  # for a failure
    failed = [cell for cell, text in outputs.items() if re.search(r"^\w+(Error|Interrupt): ", text, re.MULTILINE)]
    assert failed == ["fit"], "the interrupt alone"
    assert "KeyboardInterrupt" in outputs["fit"]
    assert "GroupState.READY" in outputs["state"]
    report: Any = re.search(r"^step 40, loss (\S+): (\d+) steps", outputs["resume"], re.MULTILINE)
    assert 20 < int(report[2]) < 40, "it went on after the steps that the interrupt let end"
    assert float(report[1]) < 4.0, "from 5.5"
    # The view saw what ran in later cells: steps of both runs.
    assert re.search(r"(last )?fit: step \d+, epoch 0, loss \S+, \S+ tokens/s", outputs["watch"])
    assert outputs["curve"].endswith("<png>")
    assert outputs["picture"].endswith("<png>")
    made, attached = (re.findall(r"^\d +(10\.77\.0\.\d) +(\d+)", outputs[cell], re.M) for cell in ("load", "attach"))
    assert [address for address, _ in made] == [host.address for host in rays.hosts]
    assert attached == made, "the same processes"
    assert "Return the " in outputs["attached"]
    assert "CLOSED" in outputs["end"]
    assert_released(*rays.hosts)
