"""Making a group again, as a notebook's cell does that is run a second time: who has the room, and the name."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import GroupBrokenError, GroupError, Placement, PlacementError, ShardedModelGroup, Split, Timeouts
from raysharding.checkpoint import open_checkpoint
from tests.clock import wait_until
from tests.conftest import make_mlp
from tests.controllers import controller_pids, new_controller
from tests.group.conftest import make_group

pytestmark = pytest.mark.usefixtures("nothing_left")

ROWS = torch.ones(3, 8)


def test_a_full_cluster_names_this_programs_own_groups(checkpoint: Path) -> None:
    wide, waits = Placement(cpus_per_rank=2.5), Timeouts(place_s=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        group = make_group(checkpoint, placement=wide)
    with group:
        with pytest.raises(PlacementError, match="busy") as caught:
            make_group(checkpoint, placement=wide, timeouts=waits)
        own = f"this program's own {group.name} holds 2 x 2.5 CPU ({checkpoint}, ready)"
        assert own in str(caught.value)
        assert "end it by its shutdown()" in str(caught.value)
        with pytest.raises(PlacementError, match="infeasible") as caught:
            make_group(checkpoint, world_size=9, timeouts=waits)
        assert own not in str(caught.value), "it would not help"


def test_replace_shuts_this_programs_group_down_first(checkpoint: Path, tmp_path: Path) -> None:
    wide: dict[str, Any] = {"name": "again", "placement": Placement(cpus_per_rank=2.5)}
    with pytest.warns(UserWarning, match=r"name='again': .* `ray start --head`") as caught:
        first = ShardedModelGroup.from_checkpoint(checkpoint, model=make_mlp(), world_size=2, device="cpu", **wide)
    assert caught[0].filename == __file__
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with first:
        first.save(tmp_path / "save", async_save=True)
        for wrong, path, options in (
            (r"name='again': a group of that name .* replace=True ends it", checkpoint, {"name": "again"}),
            ("replace=True without name=: give the name", checkpoint, {"replace": True}),
            (r"model.safetensors", tmp_path / "model.safetensors", {"name": "again", "replace": True}),
            (r"config.json", checkpoint, {"name": "again", "replace": True, "model": "AutoModel"}),
        ):
            with pytest.raises(ValueError, match=wrong):
                make_group(path, **options)
        assert first.forward(Split(ROWS)).shape == (3, 4), "nothing was ended"

        with make_group(checkpoint, replace=True, **wide) as group:
            assert group.forward(Split(ROWS)).shape == (3, 4)
            assert {one.pid for one in group.ranks}.isdisjoint(one.pid for one in first.ranks)
            with pytest.raises(GroupBrokenError, match="group 'again' is shut down"):
                first.forward(Split(ROWS))
            assert len(open_checkpoint(str(tmp_path / "save")).tensors) == 4, "the background save was waited for"


@pytest.mark.full
@pytest.mark.parametrize("dies", ["nobody", "rank", "controller"])
def test_replace_ends_what_another_driver_left(checkpoint: Path, dies: str) -> None:
    before = controller_pids()
    first = make_group(checkpoint, name="left")
    pids = {one.pid for one in first.ranks}
    victims = {"nobody": [], "rank": [first.ranks[0].pid], "controller": [new_controller(before)]}
    first._client.detach()  # what the end of a program does
    for pid in victims[dies]:
        os.kill(pid, signal.SIGKILL)
    with make_group(checkpoint, name="left", replace=True) as group:
        assert group.forward(Split(ROWS)).shape == (3, 4)
        assert {one.pid for one in group.ranks}.isdisjoint(pids)


def test_replace_ends_a_group_that_is_being_made(checkpoint: Path, tmp_path: Path) -> None:
    began = tmp_path / "builds"

    def build() -> Any:
        began.touch()
        time.sleep(1000)

    errors: list[GroupError] = []

    def make_first() -> None:
        with pytest.raises(GroupError) as caught:
            make_group(checkpoint, model=build, name="again")
        errors.append(caught.value)

    making = threading.Thread(target=make_first)
    making.start()
    wait_until(began.exists, 60.0, "the model is built", 0.01)
    with pytest.raises(ValueError, match="driver is still making it"):
        ShardedModelGroup.attach("again")
    with make_group(checkpoint, name="again", replace=True) as group:
        assert group.forward(Split(ROWS)).shape == (3, 4)
        making.join(30.0)
        assert "shut down" in str(errors[0])
        assert group.forward(Split(ROWS)).shape == (3, 4), "what the first driver undoes is its own"
