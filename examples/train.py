"""A run over data that may be stopped, killed and begun again at any time: what the jobs in cluster/ run.

    python examples/train.py --model path/to/llama --data rows.parquet --out out

The rows have the columns `input_ids` and `labels`, numbers of one length; see docs/pages/fine-tune.md for text.
"""

from __future__ import annotations

import argparse
from functools import partial

import ray
import torch

from raysharding import ShardedModelGroup


def main() -> None:
    """Train, or go on training from the newest save; at SIGTERM save and end with status 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint: a directory, a URI, or a name on the hub")
    parser.add_argument("--data", required=True, help="rows: Parquet, JSON Lines or CSV; a path or a URI")
    parser.add_argument("--out", required=True, help="where saves go: a URI, or a directory that all nodes share")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data (default 1)")
    parser.add_argument("--steps", type=int, help="in place of --epochs: steps in all, over all runs of the job")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a step, over all ranks (default 32)")
    parser.add_argument("--save-every", type=int, default=500, help="steps between saves (default 500)")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate (default 1e-5)")
    parser.add_argument("--device", help="type of the ranks' devices; default: cuda if the cluster has GPUs, else cpu")
    parser.add_argument("--ranks", type=int, help="default: one for each GPU, or two on CPUs")
    arguments = parser.parse_args()

    ray.init()  # RAY_ADDRESS says where
    with ShardedModelGroup.from_checkpoint(
        arguments.model,
        world_size=arguments.ranks,
        device=arguments.device,
        optimizer=partial(torch.optim.AdamW, lr=arguments.lr),
        max_restarts=3,
    ) as group:
        report = group.fit(
            arguments.data,
            batch_size=arguments.batch_size,
            epochs=arguments.steps or arguments.epochs,  # an epoch has a step or more
            max_steps=arguments.steps,
            shuffle=True,
            save_to=arguments.out,
            save_every=arguments.save_every,
            keep_last=2,
            save_on_signal=True,  # SIGTERM: save, and end with status 0
            resume="latest",  # and go on from there when the job runs again
        )
    print(report)  # only where all steps are done


if __name__ == "__main__":
    main()
