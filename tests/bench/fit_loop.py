"""The loop that `fit` is compared with: FSDP2 as torch's own tutorial has it, under torchrun, without raysharding.

`torchrun --nproc-per-node W tests/bench/fit_loop.py CHECKPOINT PARQUET BATCH ends|layers` makes the model ready, reads
numbers of steps from standard input, a line each, takes as many, and prints rank 0's seconds.
"""

from __future__ import annotations

import sys
import time

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM


class Loop:
    """The sharded model and its optimizer, on each rank of the default group."""

    def __init__(self, checkpoint: str, parquet: str, batch_size: int, *, ends: bool = True) -> None:
        """Load and shard; collective.

        Args:
            checkpoint: A Llama's.
            parquet: The rows.
            batch_size: Of all ranks together.
            ends: Whether embeddings and head are groups of their own, as in transformers' plan and torchtitan's; if
                not, the root keeps them gathered from forward to backward, which takes memory and saves messages.
        """
        torch.set_num_threads(1)
        self._parquet = parquet
        self._batch_size = batch_size
        self._model = LlamaForCausalLM.from_pretrained(checkpoint)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if ends:
            fully_shard(self._model.model.embed_tokens, mesh=mesh)
            fully_shard([self._model.model.norm, self._model.lm_head], mesh=mesh, reshard_after_forward=False)
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._model.train()

    def seconds(self, num_steps: int) -> float:
        """Time of some steps, opening the data with them; collective."""
        dist.barrier()
        begun = time.perf_counter()
        self._run(num_steps)
        dist.barrier()
        return time.perf_counter() - begun

    def _run(self, num_steps: int) -> None:
        table = pq.read_table(self._parquet, columns=["input_ids"])
        rows = torch.from_numpy(table["input_ids"].combine_chunks().flatten().to_numpy().copy()).long()
        rows = rows.view(len(table), -1)
        share = self._batch_size // dist.get_world_size()
        for step in range(num_steps):
            start = step * self._batch_size % (len(rows) - self._batch_size) + dist.get_rank() * share
            ids = rows[start : start + share]
            self._optimizer.zero_grad()
            loss = self._model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            total = loss.detach()
            dist.all_reduce(total)
            assert isinstance(norm, DTensor)
            total.item(), norm.full_tensor().item()  # what one logs


def _serve(loop: Loop) -> None:
    """Take as many steps as rank 0 reads, until its input ends; collective."""
    while True:
        line = "" if dist.get_rank() else sys.stdin.readline()
        number = torch.tensor(int(line or 0))
        dist.broadcast(number, 0)  # a rank that did not hear of the end would wait for the others' next step
        if not number:
            return
        taken = loop.seconds(int(number))
        if not dist.get_rank():
            print(taken, flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _serve(Loop(sys.argv[1], sys.argv[2], int(sys.argv[3]), ends=sys.argv[4] == "ends"))
    dist.destroy_process_group()
