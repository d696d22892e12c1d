"""The same job in another library and here: the blocks of the pages in docs/pages/coming-from give the same losses."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import raysharding.callbacks
import raysharding.distributed
from raysharding import ShardedModelGroup
from raysharding.distributed.comm.rendezvous import listen
from tests.docs.blocks import ROOT, blocks_of
from tests.spawn import run_ranks

NUM_STEPS = 8
OURS = (raysharding, raysharding.callbacks, raysharding.distributed)


def as_torchrun_does(folder: str, text: str, port: int) -> list[float]:
    """Run a script in a process that torchrun's variables tell of the others; return its `losses`."""
    import torch.distributed as dist

    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()  # the script makes its own
    os.chdir(folder)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(text, namespace)
    if not dist.is_initialized():  # `run_ranks` ends a group, and the script may have ended its own
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return [float(loss) for loss in namespace["losses"]]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ["accelerate", "ray-train", "torchrun-fsdp2", "transformers-trainer"])
def test_the_losses_are_those_of_the_other_library(page: str, page_folder: Path) -> None:
    blocks = [block for block in blocks_of(f"docs/pages/coming-from/{page}.md") if block.is_code]
    before, after = (block.text for block in blocks if block.marker == "run by")
    if page == "ray-train":
        theirs: dict[str, Any] = {"__name__": "__main__"}
        exec(before, theirs)
        expected = theirs["losses"]
    else:
        with listen("127.0.0.1") as free:
            port = free.getsockname()[1]
        expected, _ = run_ranks(2, as_torchrun_does, str(page_folder), before, port)
    ours: dict[str, Any] = {"__name__": "__main__"}
    exec(after, ours)
    assert len(ours["losses"]) == NUM_STEPS
    assert list(ours["losses"]) == pytest.approx(expected, abs=1e-5)


def test_what_you_type_here_exists() -> None:
    """In the last column of the tables: what is called, and each method of a group."""
    for page in sorted((ROOT / "docs/pages/coming-from").glob("*.md")):
        for row in re.findall(r"^\|.*\| *(.*?) *\|$", page.read_text(), re.MULTILINE):
            code = " ".join(re.findall(r"`([^`]+)`", row))
            for method in re.findall(r"(?:group|ShardedModelGroup)\.(\w+)", code):
                assert hasattr(ShardedModelGroup, method), f"{page.name}: {method}"
            for name in re.findall(r"(?<![\w.])([A-Z]\w+)\(", code):
                assert name in ("LoraConfig", "LinearLR") or any(hasattr(module, name) for module in OURS), name
