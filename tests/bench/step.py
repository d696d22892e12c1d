"""A training step of a Llama: plain torch, FSDP2 by hand and ours, in rounds that alternate; seconds, ratios, MFU.

    python -m tests.bench.step --device cuda --shape 1b                     # the arms below but the last three
    python -m tests.bench.step --device cuda --shape 1b --arms ours,compiled,checkpointed
    python -m tests.bench.step --device cuda --shape 8b --arms checkpointed,compiled_checkpointed --rows 2

    plain          one process without sharding; W = 1 only
    hand           FSDP2 as torch's tutorial has it; reads loss and norm of every step, as one logs them
    hand_queued    the same, which reads nothing until a round's end
    ours           `raysharding.distributed.train_step`
    queued         `queue_train_step`, as `fit` takes its steps: the norm of a step is read once the next is queued
    compiled, checkpointed, compiled_checkpointed
                   `ours` with `Sharding(compile=True)`, with `activation_checkpointing=True`, with both

Weights and gradients are bf16, the optimizer is fused AdamW, gradients are clipped, no arm makes a KV cache. Arms begin
with the same weights, and the losses of their first steps must agree. Each arm takes two steps first that do not count.
Ratios are taken within a round. MFU counts 6 operations a parameter and token, of the card's dense bf16 peak. Off the
GPU `compile` has the backend `eager`, which compiles nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from raysharding.batch import RankBatch, Split
from raysharding.config import Sharding
from raysharding.distributed import init_mesh, shard_module, train_step
from raysharding.distributed.training.step import queue_train_step
from raysharding.units import GIB
from tests.bench.ratios import Figure
from tests.spawn import RanksFailedError, device_type, run_ranks


@dataclass(frozen=True)
class Shape:
    """A Llama and its batch."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    rows: int = 8
    length: int = 1024


SHAPES = {
    "tiny": Shape(2, 64, 176, 4, 2, 512, rows=4, length=32),
    "1b": Shape(24, 2048, 5632, 32, 32, 32_000),
    "8b": Shape(32, 4096, 14_336, 32, 8, 128_256, rows=2),
}
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Part of a card's name → dense bf16 operations a second; the first that matches."""
SHARDINGS: dict[str, tuple[str, ...]] = {
    "ours": (),
    "queued": (),
    "compiled": ("compile",),
    "checkpointed": ("activation_checkpointing",),
    "compiled_checkpointed": ("compile", "activation_checkpointing"),
}
ARMS = ("plain", "hand", "hand_queued", *SHARDINGS)
RATIOS = (
    ("hand", "plain"),
    ("ours", "plain"),
    ("ours", "hand"),
    ("queued", "hand"),
    ("queued", "hand_queued"),
    ("compiled", "ours"),
    ("checkpointed", "ours"),
    ("compiled_checkpointed", "checkpointed"),
)
MAX_NORM = 1.0


def build(shape: Shape) -> nn.Module:
    """A Llama in bf16 on the rank's device, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(shape.length, 128),
    )
    with torch.device("meta"):
        module: nn.Module = LlamaForCausalLM(config).to(torch.bfloat16)
    inv_freq = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "vocab_size": 8, "num_hidden_layers": 0})).model
    module.to_empty(device=device_type())
    generator = torch.Generator(device_type()).manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            _ = parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02, generator=generator)
        for name, buffer in inv_freq.named_buffers():
            module.get_submodule("model").get_buffer(name).copy_(buffer)
    return module


class Loop:
    """A model and its optimizer, and loops of steps on it."""

    def __init__(self, module: nn.Module, rows: dict[str, torch.Tensor]) -> None:
        self.module = module.train()
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
        self.rows = rows

    def by_hand(self, num_steps: int, *, reads: bool) -> float:
        """Without raysharding. Returns the last loss."""
        for index in range(num_steps):
            self.optimizer.zero_grad()
            rows = {name: value.to(device_type(), non_blocking=True) for name, value in self.rows.items()}
            loss = self.module(**rows, use_cache=False).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), MAX_NORM)
            self.optimizer.step()
            if reads or index == num_steps - 1:
                total = loss.detach() / dist.get_world_size()
                dist.all_reduce(total)
                found = float(total), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return found[0]

    def ours(self, num_steps: int) -> float:
        """By `train_step`."""
        for _ in range(num_steps):
            found = train_step(self.module, self.optimizer, self.rows, max_grad_norm=MAX_NORM)
        return found["loss"]

    def queued(self, num_steps: int) -> float:
        """As `fit` does."""
        step, num_rows = None, len(next(iter(self.rows.values())))
        kwargs = {name: Split(value) for name, value in self.rows.items()}
        batch = RankBatch(wrapped_kwargs=kwargs, num_rows=num_rows, rows=(num_rows,) * dist.get_world_size())
        for _ in range(num_steps):
            step = queue_train_step(self.module, self.optimizer, [[batch]], None, MAX_NORM, earlier=step)
        assert step is not None
        return step.read()["loss"]


def by_hand(module: nn.Module) -> nn.Module:
    """Shard as torch's tutorial does, with the groups of transformers' plan."""
    mesh, model = init_mesh(device_type()), module.get_submodule("model")
    fully_shard(model.get_submodule("embed_tokens"), mesh=mesh)
    fully_shard([model.get_submodule("norm"), module.get_submodule("lm_head")], mesh=mesh, reshard_after_forward=False)
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def ours(module: nn.Module, options: Sequence[str]) -> nn.Module:
    """Shard with raysharding."""
    values: dict[str, Any] = {"compile": True if device_type() == "cuda" else "eager"}
    sharding = Sharding(**{name: values.get(name, True) for name in options})
    return shard_module(module, init_mesh(device_type(), sharding), sharding)


def make_arms(names: Sequence[str], shape: Shape) -> dict[str, tuple[Loop, Callable[[int], float]]]:
    """Arm → its model, and what takes steps on it. Arms that differ in their loop alone share a model."""
    ids = torch.randint(shape.vocabulary, (shape.rows, shape.length), generator=torch.Generator().manual_seed(1))
    own = ids.chunk(dist.get_world_size())[dist.get_rank()]
    rows = {"input_ids": own, "labels": own}
    loops: dict[Any, Loop] = {}
    arms: dict[str, tuple[Loop, Callable[[int], float]]] = {}
    for name in names:
        options = SHARDINGS.get(name)
        key = name.removesuffix("_queued") if options is None else options
        if key not in loops:
            module = build(shape)
            sharded = ours(module, options) if options is not None else by_hand(module) if key == "hand" else module
            loops[key] = Loop(sharded, rows)
        loop = loops[key]
        hand = partial(loop.by_hand, reads=name != "hand_queued")
        arms[name] = loop, hand if options is None else loop.queued if name == "queued" else loop.ours
    return arms


def measure(names: Sequence[str], shape: Shape, rounds: int, num_steps: int) -> dict[str, Any]:
    """Seconds of a step, arm by arm and round by round; collective."""
    torch.manual_seed(0)
    device = torch.get_device_module(device_type())
    begun = time.monotonic()
    arms = make_arms(names, shape)
    losses: dict[str, float] = {}
    trained: list[Loop] = []
    for name, (loop, run) in arms.items():
        loss, _ = run(1), run(1)
        if loop not in trained:  # by another arm
            losses[name] = loss
        trained.append(loop)
    ready_s = time.monotonic() - begun
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(rounds):
        for name in list(arms) if index % 2 else list(arms)[::-1]:
            device.synchronize()
            dist.barrier()
            start = time.perf_counter()
            arms[name][1](num_steps)
            device.synchronize()
            dist.barrier()
            seconds[name].append((time.perf_counter() - start) / num_steps)
    peak = getattr(device, "max_memory_allocated", lambda: 0)()
    return {"losses": losses, "seconds": seconds, "ready_s": ready_s, "peak": peak, "card": card()}


def card() -> str:
    """Name of the rank's device."""
    return torch.cuda.get_device_name() if device_type() == "cuda" else device_type()


def num_parameters(shape: Shape) -> int:
    """Of the model."""
    attention = shape.hidden**2 * 2 + 2 * shape.hidden * (shape.hidden // shape.heads) * shape.kv_heads
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return 2 * shape.vocabulary * shape.hidden + shape.layers * layer + shape.hidden


def report(found: dict[str, Any], shape: Shape, world_size: int) -> list[str]:
    """Lines of a table."""
    seconds: dict[str, list[float]] = found["seconds"]
    peak = next((peak for name, peak in PEAKS.items() if name in found["card"]), None)
    devices = min(world_size, max(torch.cuda.device_count(), 1))
    operations = 6 * num_parameters(shape) * shape.rows * shape.length
    what = f"{num_parameters(shape) / 1e9:.2f} B parameters, {shape.rows} x {shape.length} tokens"
    took = f"first steps after {found['ready_s']:.0f} s; {found['peak'] / GIB:.1f} GiB of device memory at most"
    lines = [f"{found['card']}, W={world_size}, {what}; {took}"]
    for name, values in seconds.items():
        figure = Figure.of(values)
        mfu = f"{operations / figure.median / devices / peak:.1%} MFU" if peak else "MFU unknown"
        lines.append(f"  {name:<22} {said(figure, 's')}  {mfu}")
    for name, base in RATIOS:
        if name in seconds and base in seconds:
            figure = Figure.of([one / other for one, other in zip(seconds[name], seconds[base], strict=True)])
            lines.append(f"  {f'{name} ÷ {base}':<22} {said(figure, '')}")
    return lines


def said(figure: Figure, unit: str) -> str:
    """Median and spread."""
    return f"{figure.median:.4f} {unit} ({figure.low:.4f} - {figure.high:.4f})"


def main() -> None:
    """Print the table of one shape; a shape that does not fit gets a line that says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "sim"))
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--arms", default=",".join(ARMS[:5]), help=f"of {','.join(ARMS)}")
    parser.add_argument("--rows", type=int, help="rows of a batch, over all ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    args = parser.parse_args()
    names = [name for name in args.arms.split(",") if name != "plain" or args.world_size == 1]
    if not names or not set(names) <= set(ARMS):
        parser.error(f"--arms {args.arms}: give some of {','.join(ARMS)}")
    shape = replace(SHAPES[args.shape], rows=args.rows or SHAPES[args.shape].rows)
    measured = names, shape, args.rounds, args.steps
    try:
        found = run_ranks(args.world_size, measure, *measured, device=args.device, timeout_s=args.timeout_s)[0]
    except RanksFailedError as error:
        if "OutOfMemoryError" not in str(error):
            raise
        last = next(line for line in str(error).splitlines()[::-1] if "OutOfMemoryError" in line)
        print(f"{args.shape}, {args.arms}: does not fit, MFU unknown: {last}")
        return
    print("\n".join(report(found, shape, args.world_size)))
    losses: dict[str, float] = found["losses"]
    print("  losses of the first steps:", ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    if max(losses.values()) - min(losses.values()) > 0.02 * min(losses.values()):
        sys.exit("the arms do not compute the same")


if __name__ == "__main__":
    main()
