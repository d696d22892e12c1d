"""What rayjob.yaml runs: train a checkpoint on rows, so that the job may be stopped, killed and begun again.

    kubectl create configmap train --from-file=cluster/kubernetes/train.py

The rows have the columns `input_ids` and `labels`, numbers of one length; see docs/pages/training.md for text.
"""

from __future__ import annotations

import argparse
from functools import partial

import ray
import torch

from raysharding import ShardedModelGroup


def main() -> None:
    """Resume after the newest save, if there is one; at SIGTERM save and end with status 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint: a directory, a URI, or a name on the hub")
    parser.add_argument("--data", required=True, help="rows: Parquet, JSON Lines or CSV; a path or a URI")
    parser.add_argument("--out", required=True, help="where saves go, and come from: a directory or a URI")
    parser.add_argument("--ranks", type=int, help="default: one for each GPU of the cluster")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--save-every", type=int, default=100, help="steps: what is lost with a node, at most")
    args = parser.parse_args()

    ray.init()
    optimizer = partial(torch.optim.AdamW, lr=args.lr)
    with ShardedModelGroup.from_checkpoint(
        args.model, world_size=args.ranks, optimizer=optimizer, max_restarts=3
    ) as group:
        report = group.fit(
            args.data,
            batch_size=args.batch_size,
            epochs=args.epochs,
            save_to=args.out,
            save_every=args.save_every,
            keep_last=2,
            save_on_signal=True,
            resume="latest",
        )
        print(report)


if __name__ == "__main__":
    main()
