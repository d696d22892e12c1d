"""The zoo's own losses: which are read, by which terms, and which are refused; read ones equal one process.

`python -m tests.distributed.training.test_zoo_losses` prints the table.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from raysharding.config import Sharding
from raysharding.distributed.comm.device_mesh import init_mesh
from raysharding.distributed.fully_shard.shard import shard_module
from raysharding.distributed.training.losses import loss_of_batch
from raysharding.distributed.training.step import Accumulation, train_step
from raysharding.errors import UnreadableLossError
from tests.distributed.training.test_training import batch_of
from tests.models.architectures import ARCHITECTURES
from tests.spawn import run_ranks

NUM_ROWS = 5
REFUSED = ("clip",)
"""Compares rows with rows."""
ROUTED = ("mixtral", "qwen3-moe")
"""Mixtures of experts that add a balancing loss, if they are asked to."""


def rows_of(name: str) -> dict[str, torch.Tensor]:
    """Five rows, with labels that are masked unevenly."""
    inputs = ARCHITECTURES[name].inputs()
    rows = {key: value[torch.arange(NUM_ROWS) % len(value)] for key, value in inputs.items()}
    if name == "clip":
        return rows
    if "Classification" in ARCHITECTURES[name].model:
        return {**rows, "labels": torch.tensor([0, 1, -100, 1, 0])}
    labels = rows.pop("decoder_input_ids", rows.get("input_ids")).clone()  # type: ignore[union-attr]
    labels[0] = labels[3, 1:] = labels[1, 3:] = -100
    return {**rows, "labels": labels}


def outcome(name: str) -> str:
    """The terms of a model's loss, or "refused"; raises where a step is not one process's."""
    twin: Any = ARCHITECTURES[name].make()
    module: Any = copy.deepcopy(twin)
    for one in (module, twin) if name in ROUTED else ():
        one.config.output_router_logits = True
    more = {"return_loss": True} if name == "clip" else {}
    shard_module(module, init_mesh("cpu"), Sharding())
    rows = rows_of(name)
    batch = batch_of(rows)
    if more:
        batch = type(batch)(batch.wrapped_args, {**batch.wrapped_kwargs, **more}, batch.num_rows, batch.rows)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    try:
        metrics = train_step(module, optimizer, batch, training=False)
    except UnreadableLossError:
        return "refused"
    expected = twin(**rows, **more).loss
    expected.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(twin.parameters(), math.inf))
    tolerance = 1e-2 if name in ROUTED else 1e-5  # the balancing loss is each rank's own
    assert math.isclose(metrics["loss"], float(expected.detach()), rel_tol=tolerance), (metrics, expected)
    assert math.isclose(metrics["grad_norm"], norm, rel_tol=tolerance), (metrics, norm)
    with torch.no_grad():
        found = loss_of_batch(module, batch, with_backward=False)
    assert math.isclose(Accumulation().add(found), metrics["loss"], rel_tol=1e-6)
    return ", ".join(found.names)


def outcomes() -> dict[str, str]:
    found = {}
    for name in ARCHITECTURES:
        try:
            found[name] = outcome(name)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.full
@pytest.mark.timeout(180)
def test_the_zoos_own_losses() -> None:
    pytest.importorskip("transformers")
    for found in run_ranks(2, outcomes, timeout_s=170):
        routed = dict.fromkeys(ROUTED, "cross_entropy, ['aux_loss']")
        refused = dict.fromkeys(REFUSED, "refused")
        assert found == {**dict.fromkeys(ARCHITECTURES, "cross_entropy"), **routed, **refused}


if __name__ == "__main__":
    for architecture, terms in run_ranks(2, outcomes, timeout_s=170)[0].items():
        print(f"{ARCHITECTURES[architecture].model}: {terms}")
