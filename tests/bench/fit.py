"""Tokens per second of `fit` against the same FSDP2 loop under torchrun: same model, rows, ranks and threads.

A third arm is that loop in bare Ray actors: what Ray itself costs, whose daemons take a part of a small machine.

`python -m tests.bench.fit [--world-size 2] [--rounds 5] [--steps 40]` starts a local Ray cluster. A round is one
measurement of each arm, in an order that alternates; the ratio is taken within a round. Start-up, and three steps
before, are in no arm's time; opening the data is in both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from raysharding import ShardedModelGroup
from raysharding.bench.ratios import Figure
from tests.bench.fit_loop import seconds

LENGTH = 64
BATCH = 16


def prepare(directory: Path) -> tuple[Path, Path]:
    """A Llama of 5 million parameters, and 2,000 rows of 64 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    rows = torch.randint(0, 1024, (2000, LENGTH)).tolist()
    columns = {name: pa.array(rows, pa.list_(pa.int32())) for name in ("input_ids", "labels")}
    pq.write_table(pa.table(columns), directory / "rows.parquet", row_group_size=256)
    return directory / "model", directory / "rows.parquet"


def loop_rate(world_size: int, model: Path, rows: Path, num_steps: int) -> float:
    """Tokens per second of the loop."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size), "--standalone"]
    script = Path(__file__).with_name("fit_loop.py")
    # Where Ray's workers run, so that both arms get the same share of the machine.
    arguments = [str(script), str(model), str(rows), str(BATCH), str(num_steps)]
    done = subprocess.run(
        ["nice", "-n", "15", *command, *arguments], capture_output=True, text=True, timeout=600, check=True
    )
    seconds = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
    return num_steps * BATCH * LENGTH / float(seconds)


class Bare:
    """A rank of the loop as a Ray actor, without raysharding."""

    def join(self, rank: int, world_size: int, store: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)

    def seconds(self, model: str, rows: str, num_steps: int) -> float:
        return seconds(model, rows, BATCH, num_steps)


def bare_rate(actors: Sequence[Any], model: Path, rows: Path, num_steps: int) -> float:
    """Tokens per second of the loop in Ray actors."""
    taken = ray.get([actor.seconds.remote(str(model), str(rows), num_steps) for actor in actors])
    return num_steps * BATCH * LENGTH / float(taken[0])


def fit_rate(group: ShardedModelGroup, rows: Path, num_steps: int) -> float:
    """Tokens per second of `fit`."""
    report = group.fit(rows, batch_size=BATCH, epochs=99, max_steps=num_steps, max_grad_norm=1.0, progress=False)
    return float(report.tokens_per_s)


def measure(world_size: int, rounds: int, num_steps: int) -> dict[str, Figure]:
    """Rates, and their ratio within rounds."""
    rates: dict[str, list[float]] = {"fit": [], "bare": [], "loop": []}
    with tempfile.TemporaryDirectory() as scratch:
        model, rows = prepare(Path(scratch))
        factory = partial(torch.optim.AdamW, lr=1e-3)
        actors = [ray.remote(num_cpus=0)(Bare).remote() for _ in range(world_size)]
        ray.get([actor.join.remote(rank, world_size, f"{scratch}/store") for rank, actor in enumerate(actors)])
        with ShardedModelGroup.from_checkpoint(
            model, world_size=world_size, optimizer=factory, progress=False
        ) as group:
            fit_rate(group, rows, 3)
            arms = [
                ("fit", partial(fit_rate, group, rows, num_steps)),
                ("bare", partial(bare_rate, actors, model, rows, num_steps)),
                ("loop", partial(loop_rate, world_size, model, rows, num_steps)),
            ]
            for index in range(rounds):
                for name, run in arms if index % 2 else arms[::-1]:
                    rates[name].append(run())
    pairs = (("fit", "loop"), ("bare", "loop"), ("fit", "bare"))
    ratios = {
        f"{one} ÷ {other}": [first / second for first, second in zip(rates[one], rates[other], strict=True)]
        for one, other in pairs
    }
    return {name: Figure.of(values) for name, values in {**rates, **ratios}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ray.init("local", num_cpus=max(arguments.world_size, 2), include_dashboard=False, log_to_driver=False)
    figures = measure(arguments.world_size, arguments.rounds, arguments.steps)
    ray.shutdown()
    for name, figure in figures.items():
        if "÷" in name:
            print(f"{name:<11} {figure.median:.3f} ({figure.low:.3f} - {figure.high:.3f}), {figure.num_rounds} rounds")
        else:
            print(f"{name:<5} {figure.median:,.0f} tokens/s ({figure.low:,.0f} - {figure.high:,.0f})")
    print("asked: fit ÷ loop 0.98")


if __name__ == "__main__":
    main()
