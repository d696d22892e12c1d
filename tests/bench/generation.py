"""Greedy generation by ranks beside transformers' own on a whole model in each process: seconds, ratio, ids.

`python -m tests.bench.generation --device cuda --shape 1b [--world-size 1] [--new-tokens 32] [--rounds 3]`. Each round
is one call of each; `kept` gathers the parameters once a call, and `blocks` each block for each token.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import Split, deal
from raysharding.distributed.fully_shard import keep_gathered, reshard
from raysharding.distributed.training import generate
from tests.bench.ratios import Figure
from tests.bench.step import SHAPES, Shape, build, ours, said
from tests.spawn import device_type, run_ranks

ROWS, PROMPT = 8, 64


def measure(shape: Shape, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of each call, and whether the ids are equal; collective."""
    prompts = torch.randint(3, shape.vocabulary, (ROWS, PROMPT), generator=torch.Generator().manual_seed(2)).to(
        device_type()
    )
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    batch = {"input_ids": Split(prompts), "attention_mask": Split(torch.ones_like(prompts))}
    own = deal((), {**batch, **options}, dist.get_world_size())[dist.get_rank()]
    whole: Any = build(shape).eval()
    sharded: nn.Module = ours(build(shape).eval(), ())
    rows = {name: own.kwargs[name] for name in batch}

    def kept() -> torch.Tensor:
        keep_gathered(sharded)
        found: torch.Tensor = generate(sharded, own).value
        reshard(sharded)
        return found

    arms: dict[str, Callable[[], torch.Tensor]] = {
        "whole": lambda: whole.generate(**rows, **options).cpu(),
        "kept": kept,
        "blocks": lambda: generate(sharded, own).value,
    }
    ids = {name: run() for name, run in arms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, run in arms.items():
            dist.barrier()
            begun = time.perf_counter()
            run()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begun)
    equal = {name: float((ids["whole"] == found).float().mean()) for name, found in ids.items()}
    return {"seconds": seconds, "equal": equal}


def main() -> None:
    """Print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "sim"))
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    measured = SHAPES[args.shape], args.new_tokens, args.rounds
    found = run_ranks(args.world_size, measure, *measured, device=args.device, timeout_s=300)[0]
    whole = found["seconds"]["whole"]
    for name in ("kept", "blocks"):
        seconds = found["seconds"][name]
        ratio = Figure.of([one / other for one, other in zip(seconds, whole, strict=True)])
        print(
            f"generate, W={args.world_size}, {args.shape}, {ROWS} x ({PROMPT} + {args.new_tokens}): {name} "
            f"{said(Figure.of(seconds), 's')} ÷ whole {said(Figure.of(whole), 's')} = {said(ratio, '')}; "
            f"{found['equal'][name]:.1%} of the ids are equal"
        )


if __name__ == "__main__":
    main()
