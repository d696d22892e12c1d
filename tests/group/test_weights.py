"""`current_worker().weights()` in `group.call`: `examples/feed_engine.py`, and engines that fail while they are fed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.feed_engine import main
from raysharding import GroupError, ShardedModelGroup, Split
from raysharding.group import GroupState
from tests.conftest import make_group

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(120)]


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left")
def test_the_example_feeds_an_engine_that_then_generates_what_the_trainer_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["feed_engine.py", "--rounds", "2"])
    main()
    printed = capsys.readouterr().out
    rounds = re.findall(r"^round \d: loss (\S+), 21 tensors fed, the engine writes (.*)$", printed, re.MULTILINE)
    assert len(rounds) == 2
    assert float(rounds[1][0]) < float(rounds[0][0])
    assert "the engine writes what the trainer writes: True" in printed


def feeding() -> Callable[..., dict[str, torch.Tensor]]:
    """Takes weights until the second, and then ends as told: not at all, by a return, or by an error."""

    def feed(end: str) -> dict[str, torch.Tensor]:
        from raysharding import current_worker

        worker, taken = current_worker(), {}
        for name, tensor in worker.weights(ranks=[1], bucket_bytes=128):
            taken[name] = tensor
            if len(taken) == 2 and end == "return":
                break
            if len(taken) == 2 and end == "error":
                raise LookupError("the engine has no such layer")
        return taken

    return feed


@pytest.mark.full
def test_an_engine_that_fails_leaves_three_ranks_ready(checkpoint: Path) -> None:
    with make_group(checkpoint, world_size=3) as group:
        with pytest.raises(GroupError, match="rank 1 raised"):
            group.call(feeding(), "error")
        assert group.state is GroupState.READY
        group.forward(Split(torch.zeros(3, 8)))


@pytest.mark.parametrize(
    ("end", "error", "message"),
    [
        ("return", "ValueError", r"weights\(\): rank 1 stopped after 2 of 4 tensors: every rank iterates to the end"),
        ("error", "LookupError", "the engine has no such layer"),
    ],
)
def test_an_end_on_one_rank_is_the_first_cause_and_the_group_goes_on(
    group: ShardedModelGroup, checkpoint: Path, end: str, error: str, message: str
) -> None:
    with pytest.raises(GroupError) as found:
        group.call(feeding(), end)
    primary, other = found.value.primary, found.value.failures[0]
    assert primary is not None
    assert (primary.rank, primary.error_type.rpartition(".")[2]) == (1, error)
    assert re.search(message, primary.message)
    assert (other.kind, other.error_type.rpartition(".")[2]) == ("collateral", "ConnectionAbortedError")
    assert group.state is GroupState.READY
    nothing, taken = group.call(feeding(), "")
    assert nothing == {}
    wanted = load_file(checkpoint)
    assert taken.keys() == wanted.keys()
    assert all(torch.equal(taken[name], wanted[name]) for name in wanted)
    group.forward(Split(torch.zeros(2, 8)))
