"""`group.start_report`, and the import of a model's code beside the start."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from raysharding import ShardedModelGroup
from tests import programs
from tests.conftest import make_group
from tests.models.architectures import ARCHITECTURES

PHASES = ("store", "process group", "first collectives", "build", "preflight of the memory", "load")


@pytest.mark.usefixtures("cluster")
def test_phases_sum_to_the_whole_and_name_their_parts(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    with make_group(checkpoint, name="report") as group:
        whole_s = time.monotonic() - begun
        report = group.start_report
        parts = {phase.name: tuple(phase.slowest) for phase in report.phases}
        assert sum(phase.seconds for phase in report.phases) == report.seconds == report.as_dict()["seconds"]
        assert 0.9 * whole_s <= report.seconds <= whole_s, "what is left is the answer to `ready`"
        assert [*parts][-len(PHASES) :] == [*PHASES]
        packages = ("torch", "FSDP", "raysharding")
        assert parts["processes"] == ("place", "process", *packages)
        assert parts["process group"] == ("device", "connect")
        assert parts["build"] == ("module",)
        assert parts["load"] == ("plan", "stream", "initialise")
        assert f"{group.name}: ready after {report.seconds:.2f} s: " in capsys.readouterr().err
        other = ShardedModelGroup.attach("report")
        assert other.start_report == report
        group.save(tmp_path / "saved")
        group.restart(world_size=1)
        assert group.start_report.phases[0].name == "ranks stopped, checkpoint"


def test_the_model_is_imported_beside_other_work(tmp_path: Path) -> None:
    """And nothing but the import: an error is `build`'s to raise."""
    ARCHITECTURES["gpt-neox"].make().save_pretrained(tmp_path)
    program = """
import sys
from dataclasses import replace
from raysharding.checkpoint import open_checkpoint
from raysharding.group.rank.commands import import_code
opened = open_checkpoint(sys.argv[1])
import_code(None, replace(opened, config={"architectures": ["NoModel"], "model_type": "gpt_neox"}).to_json())
assert "transformers.models.gpt_neox.modeling_gpt_neox" not in sys.modules
assert import_code(None, replace(opened, files=(), tensors={}).to_json()) > 0
assert "transformers.models.gpt_neox.modeling_gpt_neox" in sys.modules
"""
    done = programs.run(program, str(tmp_path))
    assert done.returncode == 0, done.stderr
