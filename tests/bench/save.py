"""Saves of a 1.8 GiB Llama at W = 4: ours, ours in the background, and what others have.

`python -m tests.bench.save [--rounds 3] [--world-size 4] [--layers 18] [--directory DIR]` needs 6 GiB of disk. A round
is one save of each arm, in an order that alternates; ratios are taken within a round. What an arm left in the page
cache is synced before the next begins.

    ours      `save_checkpoint`: files are on the disk when it returns
    async     `AsyncSaver`: seconds until training may go on; `written` until the save is committed
    copy      each rank copies its shards once, in memory that was touched before: the floor of `async`
    dcp       `torch.distributed.checkpoint` with `HuggingFaceStorageWriter`, consolidated: as it is, and with an fsync
    gather    full state dict on rank 0 (`get_model_state_dict`), then transformers' `save_pretrained`: likewise
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from raysharding.distributed import init_mesh, save_checkpoint, shard_module
from raysharding.distributed.fully_shard.layout import local_tensor
from raysharding.distributed.saving.async_save import AsyncSaver
from raysharding.distributed.saving.save import Destination
from raysharding.units import MIB
from tests.bench.memory import MemorySampler
from tests.bench.ratios import Figure
from tests.spawn import run_ranks

Seconds = dict[str, float]


def build(num_layers: int) -> nn.Module:
    """A sharded Llama in bf16 with some values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        module = LlamaForCausalLM(config).to(torch.bfloat16)
    shard_module(module, init_mesh("cpu"))
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            local_tensor(parameter).fill_(0.5)
    return module


def ours(module: nn.Module, path: Path) -> Seconds:
    return timed("ours", lambda: save_checkpoint(module, path), path)


def background(module: nn.Module, path: Path, saver: AsyncSaver) -> Seconds:
    begun = time.perf_counter()
    found = timed("async", lambda: saver.save(module, Destination(str(path))), path)
    saver.wait()
    assert saver.last_committed == str(path)
    dist.barrier()
    return {**found, "written": time.perf_counter() - begun}


def copy(module: nn.Module, path: Path, memory: list[torch.Tensor]) -> Seconds:
    def run() -> None:
        for target, parameter in zip(memory, module.parameters(), strict=True):
            target.copy_(local_tensor(parameter))

    return timed("copy", run, path)


def consolidated(module: nn.Module, path: Path) -> Seconds:
    names = list(module.state_dict())
    writer = HuggingFaceStorageWriter(
        str(path), fqn_to_index_mapping=dict.fromkeys(names, 1), save_distributed=True, enable_consolidation=True
    )
    return timed("dcp", lambda: dcp_save(module.state_dict(), storage_writer=writer), path)


def gather(module: nn.Module, path: Path) -> Seconds:
    def run() -> None:
        state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if not dist.get_rank():
            module.save_pretrained(path, state_dict=state)  # type: ignore[operator]

    return timed("gather", run, path)


def timed(name: str, run: Callable[[], object], path: Path) -> Seconds:
    """Seconds until all ranks are through, and until what they wrote is on the disk; peak memory above the start."""
    dist.barrier()
    with MemorySampler() as memory:
        begun = time.perf_counter()
        run()
        dist.barrier()
        seconds = time.perf_counter() - begun
    if not dist.get_rank() and path.exists():
        for file in path.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
    dist.barrier()
    synced = time.perf_counter() - begun
    return {name: seconds, f"{name} synced": synced, f"{name} MiB": memory.extra_bytes / MIB}


def rounds_on_ranks(num_layers: int, rounds: int, root: Path) -> list[Seconds]:
    """On every rank: all arms, round by round."""
    module = build(num_layers)
    saver = AsyncSaver()
    saver.prepare(module)  # as `fit` does after its first step
    memory = [local_tensor(parameter).clone() for parameter in module.parameters()]
    arms: list[Callable[[nn.Module, Path], Seconds]] = [
        ours,
        partial(background, saver=saver),
        partial(copy, memory=memory),
        consolidated,
        gather,
    ]
    found = []
    for number in range(rounds):
        measured: Seconds = {}
        for index, arm in enumerate(arms if number % 2 else arms[::-1]):
            path = root / f"{number}-{index}"
            measured.update(arm(module, path))
            if not dist.get_rank():
                if path.exists():
                    files = [file for file in path.rglob("*") if file.is_file()]
                    measured[f"bytes of {index if number % 2 else len(arms) - 1 - index}"] = sum(
                        file.stat().st_size for file in files
                    )
                    shutil.rmtree(path)
                os.sync()
            dist.barrier()
        found.append(measured)
    num_bytes = sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())
    return [{**one, "num_bytes": float(num_bytes)} for one in found]


def figure(found: list[Seconds], name: str, base: str | None = None) -> Figure:
    return Figure.of([one[name] / (one[base] if base else 1.0) for one in found])


def said(figure: Figure) -> str:
    return f"{figure.median:.2f} ({figure.low:.2f} - {figure.high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        ranks = run_ranks(
            arguments.world_size, rounds_on_ranks, arguments.layers, arguments.rounds, Path(root), timeout_s=1800
        )
    found: list[Seconds] = ranks[0]
    print(f"{found[0]['num_bytes'] / 2**30:.2f} GiB, W = {arguments.world_size}, {arguments.rounds} rounds, seconds")
    for name in ("ours", "async", "written", "copy", "dcp", "dcp synced", "gather", "gather synced"):
        print(f"  {name:<14} {said(figure(found, name))}")
    for name in ("dcp", "dcp synced", "gather", "gather synced"):
        print(f"  {name + ' / ours':<22} {said(figure(found, name, 'ours'))}  (asked: 2)")
    print(f"  async / copy           {said(figure(found, 'async', 'copy'))}  (asked: 1.3 or less)")
    extra = max(one["ours MiB"] for rank in ranks for one in rank)
    print(f"  ours: {extra:.0f} MiB above the start at most; bytes written / B "
          f"{found[0]['bytes of 0'] / found[0]['num_bytes']:.4f}")  # fmt: skip


if __name__ == "__main__":
    main()
