"""The loop that `fit` is compared with: FSDP2 as torch's own tutorial has it, under torchrun, without raysharding.

`torchrun --nproc-per-node W tests/bench/fit_loop.py CHECKPOINT PARQUET BATCH STEPS` prints rank 0's seconds as JSON, of
`STEPS` steps after three more.
"""

from __future__ import annotations

import json
import sys
import time

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM


def seconds(checkpoint: str, parquet: str, batch_size: int, num_steps: int) -> float:
    """Time of the steps, on each rank of the default group."""
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()

    def run(num_steps: int) -> None:
        rows = torch.tensor(pq.read_table(parquet, columns=["input_ids"])["input_ids"].to_pylist())
        share = batch_size // world_size
        for step in range(num_steps):
            start = step * batch_size % (len(rows) - batch_size) + rank * share
            ids = rows[start : start + share]
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total = loss.detach()
            dist.all_reduce(total)
            assert isinstance(norm, DTensor)
            total.item(), norm.full_tensor().item()  # what one logs

    run(3)
    dist.barrier()
    begun = time.perf_counter()
    run(num_steps)
    dist.barrier()
    return time.perf_counter() - begun


if __name__ == "__main__":
    dist.init_process_group("gloo")
    taken = seconds(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    if not dist.get_rank():
        print(json.dumps({"seconds": taken}), flush=True)
    dist.destroy_process_group()
