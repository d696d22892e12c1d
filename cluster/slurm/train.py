"""A run over data that may be stopped and queued again at any time: the program of `raysharding.sbatch`.

sbatch cluster/slurm/raysharding.sbatch python cluster/slurm/train.py --model path/to/llama --data rows.parquet \
    --steps 1000 --out out
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import ray
import torch

from raysharding import ShardedModelGroup


def main() -> None:
    """Train, or go on training from the newest save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint, a name on the hub, or an address of a store")
    parser.add_argument("--data", required=True, help="rows with input_ids and labels: Parquet, JSON Lines or CSV")
    parser.add_argument("--out", type=Path, required=True, help="where saves go: a folder that all nodes share")
    parser.add_argument("--steps", type=int, required=True, help="steps in all, over all runs of the job")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a step, over all ranks (default 32)")
    parser.add_argument("--save-every", type=int, default=500, help="steps between saves (default 500)")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate (default 1e-5)")
    parser.add_argument("--device", help="type of the ranks' devices; default: cuda if the cluster has GPUs, else cpu")
    parser.add_argument("--ranks", type=int, help="default: one for each GPU, or two on CPUs")
    arguments = parser.parse_args()
    ray.init()  # RAY_ADDRESS says where
    optimizer = partial(torch.optim.AdamW, lr=arguments.lr)
    options = {"device": arguments.device, "world_size": arguments.ranks, "optimizer": optimizer}
    with ShardedModelGroup.from_checkpoint(arguments.model, **options) as group:
        report = group.fit(
            arguments.data,
            batch_size=arguments.batch_size,
            epochs=arguments.steps,  # at least; --steps ends the run
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
