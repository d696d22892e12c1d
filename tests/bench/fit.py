"""Tokens per second of `fit` against the same FSDP2 loop under torchrun: same model, rows, ranks and threads.

The loop cuts the model into the same FSDP groups, which are those of transformers' plan. Two arms more: that loop in
bare Ray actors (what Ray itself costs, whose daemons take a part of a small machine), and under torchrun with groups
for the layers alone, embeddings and head left to the root (one all-gather of two megabytes a step, not three of one).

`python -m tests.bench.fit [--world-size 2] [--starts 4] [--rounds 3] [--steps 24]` starts a local Ray cluster. All arms
stand ready all the time and take turns, in an order that alternates; the ratio is taken within a round. Start-up is in
no arm's time; opening the data is in all. Every start makes all processes anew: where their memory lies makes one a few
percent faster than its like as long as it lives, so that more rounds of one start would not tell more. Each arm takes
a turn first that does not count.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from raysharding import ShardedModelGroup
from tests.bench.fit_loop import Loop

LENGTH = 64
BATCH = 16
_TURN_S = 600.0


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


class TorchrunLoop:
    """The loop under torchrun: started once, so that turns can be short and the arms meet the same machine."""

    def __init__(self, world_size: int, model: Path, rows: Path, groups: str) -> None:
        """Start it; the first turn waits until it is ready. `groups`: see `fit_loop`."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size), "--standalone"]
        script = [str(Path(__file__).with_name("fit_loop.py")), str(model), str(rows), str(BATCH), groups]
        # Where Ray's workers run, so that both arms get the same share of the machine.
        self._process = subprocess.Popen(
            ["nice", "-n", "15", *command, *script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def rate(self, num_steps: int) -> float:
        """Tokens per second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(num_steps, file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], _TURN_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"the loop under torchrun did not answer within {_TURN_S:g} s, or has ended")
        return num_steps * BATCH * LENGTH / float(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)


class Bare:
    """A rank of the loop as a Ray actor, without raysharding."""

    def join(self, rank: int, world_size: int, store: str, model: str, rows: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        self._loop = Loop(model, rows, BATCH)

    def seconds(self, num_steps: int) -> float:
        return self._loop.seconds(num_steps)


def bare_rate(actors: Sequence[Any], num_steps: int) -> float:
    """Tokens per second of the loop in Ray actors."""
    taken = ray.get([actor.seconds.remote(num_steps) for actor in actors])
    return num_steps * BATCH * LENGTH / float(taken[0])


def fit_rate(group: ShardedModelGroup, rows: Path, num_steps: int) -> float:
    """Tokens per second of `fit`."""
    report = group.fit(rows, batch_size=BATCH, epochs=99, max_steps=num_steps, max_grad_norm=1.0, progress=False)
    return float(report.tokens_per_s)


def measure(world_size: int, start: int, rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Rates of one start, and their ratios within rounds."""
    rates: dict[str, list[float]] = {"fit": [], "bare": [], "loop": [], "layers": []}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model, rows = prepare(Path(scratch))
        actors = [ray.remote(num_cpus=0)(Bare).remote() for _ in range(world_size)]
        members = [
            actor.join.remote(rank, world_size, f"{scratch}/store", str(model), str(rows))
            for rank, actor in enumerate(actors)
        ]
        stack.callback(lambda: [ray.kill(actor) for actor in actors])
        ray.get(members, timeout=_TURN_S)
        factory = partial(torch.optim.AdamW, lr=1e-3)
        group = stack.enter_context(
            ShardedModelGroup.from_checkpoint(model, world_size=world_size, optimizer=factory, progress=False)
        )
        loop, layers = (
            stack.enter_context(closing(TorchrunLoop(world_size, model, rows, groups))) for groups in ("ends", "layers")
        )
        arms: list[tuple[str, Callable[[int], float]]] = [
            ("fit", partial(fit_rate, group, rows)),
            ("bare", partial(bare_rate, actors)),
            ("loop", loop.rate),
            ("layers", layers.rate),
        ]
        for _, run in arms:
            run(num_steps)  # a young process takes thousands of page faults a step, until malloc has grown
        for index in range(rounds):
            for name, run in arms if (start + index) % 2 else arms[::-1]:
                rates[name].append(run(num_steps))
    pairs = (("fit", "loop"), ("bare", "loop"), ("fit", "bare"), ("fit", "layers"))
    ratios = {
        f"{one} ÷ {other}": [first / second for first, second in zip(rates[one], rates[other], strict=True)]
        for one, other in pairs
    }
    return {**rates, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # which is what the loop sets
    ray.init("local", num_cpus=max(arguments.world_size, 2), include_dashboard=False, log_to_driver=False)
    figures = []
    for start in range(arguments.starts):
        figures.append(measure(arguments.world_size, start, arguments.rounds, arguments.steps))
        told = ", ".join(f"{name} {median(values):.3f}" for name, values in figures[-1].items() if "÷" in name)
        print(f"start {start + 1}: {told}", file=sys.stderr, flush=True)
    ray.shutdown()
    for name in figures[0]:
        values = [value for one in figures for value in one[name]]
        if "÷" in name:
            starts = ", ".join(f"{median(one[name]):.3f}" for one in figures)
            spread = f"{min(values):.3f} - {max(values):.3f}; medians of the starts: {starts}"
            print(f"{name:<12} {median(values):.3f} ({spread})")
        else:
            print(f"{name:<6} {median(values):,.0f} tokens/s ({min(values):,.0f} - {max(values):,.0f})")
    print("asked: fit ÷ loop 0.98")


if __name__ == "__main__":
    main()
