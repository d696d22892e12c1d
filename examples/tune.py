"""A sweep by Ray Tune: each trial trains a group of its own, with its learning rate.

The model is a small language model with random weights, which learns the bytes of Python's `argparse`. Nothing is
fetched, and no GPU is needed: a trial has two ranks on CPUs. Run

    bash examples/make_venv.sh demo,tune && .venv/bin/python examples/tune.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.util import get_current_placement_group
from transformers import LlamaConfig

from raysharding import FitStep, Placement, ShardedModelGroup

BUNDLES, DEVICE = [{"CPU": 1}] * 2, "cpu"
"""What the ranks of a trial need, a bundle for each; on GPUs `[{"CPU": 1, "GPU": 1}] * 8, "cuda"`."""

LENGTH = 64
"""Bytes of a row; every byte is a token."""


class Report:
    """Reports to Tune. Where Tune stops the trial, `tune.report` ends it, and with it `fit` and the group."""

    every = 5
    """`fit` calls this after every fifth step, and takes no further step until Tune has decided."""

    def __call__(self, step: FitStep) -> None:
        """Report the loss of the step."""
        tune.report({"loss": step.metrics["loss"], "step": step.num_steps})


def train(config: dict[str, Any]) -> None:
    """Run one trial, in an actor of Tune's."""
    content = Path(argparse.__file__).read_bytes()
    texts = torch.tensor(list(content)).split(LENGTH)[:-1]
    with ShardedModelGroup.from_checkpoint(
        config["model"],
        random_weights=True,
        placement=Placement(placement_group=get_current_placement_group()),
        device=DEVICE,
        optimizer=partial(torch.optim.AdamW, lr=config["lr"]),
    ) as group:
        rows = [{"input_ids": text, "labels": text} for text in texts]
        group.fit(rows, batch_size=16, max_steps=config["steps"], shuffle=True, callbacks=[Report()])


def sweep(directory: Path, learning_rates: list[float], num_steps: int) -> tune.ResultGrid:
    """Run a trial for each learning rate, as many at a time as the cluster has room for."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(vocab_size=256, architectures=["LlamaForCausalLM"], **sizes).save_pretrained(directory / "model")
    # Tune starts a trial once it has reserved a placement group for all of it. The first bundle is for the trial
    # itself, which only waits for its ranks; the others are for them.
    room = tune.PlacementGroupFactory([{}, *BUNDLES])
    tuner = tune.Tuner(
        tune.with_resources(train, room),
        param_space={"model": str(directory / "model"), "lr": tune.grid_search(learning_rates), "steps": num_steps},
        tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=ASHAScheduler(reduction_factor=2)),
        run_config=tune.RunConfig(storage_path=str(directory), name="sweep"),
    )
    return tuner.fit()


def main() -> None:
    """Parse the command line, sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps of a trial (default 40)")
    parser.add_argument("--out", type=Path, help="where files go (default: a temporary directory)")
    arguments = parser.parse_args()
    if arguments.steps < Report.every:
        parser.error(f"--steps {arguments.steps}: a trial reports after every {Report.every} steps; give no fewer")
    directory = (arguments.out or Path(tempfile.mkdtemp(prefix="raysharding-tune-"))).resolve()
    results = sweep(directory, [3e-3, 3e-5], arguments.steps)
    for error in results.errors:  # of trials: `fit` of the tuner does not raise them
        raise error
    for result in results:
        print(f"lr {result.config['lr']:g}: loss {result.metrics['loss']:.3f} after {result.metrics['step']} steps")
    print(f"best: lr {results.get_best_result().config['lr']:g}")


if __name__ == "__main__":
    main()
