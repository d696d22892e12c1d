"""A trainer's weights for an inference engine that is not ours, through Ray, a bucket at a time and without files.

The engine here is a plain transformers model in an actor of its own. It takes weights as vLLM's and SGLang's models do:
`load_weights(pairs)`, pairs of a checkpoint's names and full tensors. A group of two ranks learns the bytes of Python's
`argparse`, and every few steps the engine gets its weights and continues a line. No rank, and no message, ever holds
the model. Nothing is fetched, and no GPU is needed. Run

    bash examples/make_venv.sh demo && .venv/bin/python examples/feed_engine.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raysharding import ShardedModelGroup, Split, current_worker

DEVICE = "cpu"
LENGTH = 64
"""Bytes of a row; every byte is a token."""
BUCKET_BYTES = 256 << 10
"""Weights in flight. With a real model leave it at its default, 32 MiB."""


class Engine:
    """What serves: a model that knows nothing of the trainer, and starts without its weights."""

    def __init__(self, directory: str) -> None:
        """Make the model from its config.json, as engines do."""
        self.model = LlamaForCausalLM(LlamaConfig.from_pretrained(directory)).eval()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy weights into the model as they come; return their names, as vLLM's models do."""
        held, loaded = self.model.state_dict(), set()
        for name, tensor in weights:
            held[name].copy_(tensor)
            loaded.add(name)
        return loaded

    def generate(self, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Continue rows of tokens [N, L] greedily; the result is [N, L + num_tokens]."""
        written: torch.Tensor = self.model.generate(ids, max_new_tokens=num_tokens, do_sample=False)
        return written


def feed(engine: Any) -> int:
    """Send the weights; returns their number. `group.call` runs this on every rank, and rank 0 gets the tensors."""
    batch: list[tuple[str, torch.Tensor]] = []
    names: set[str] = set()

    def send() -> None:
        # The wait bounds the memory: no bucket is gathered before the engine has the last one.
        names.update(ray.get(engine.load_weights.remote(batch), timeout=60))
        batch.clear()

    for pair in current_worker().weights(ranks=[0], bucket_bytes=BUCKET_BYTES):  # adapters: merge=True
        batch.append(pair)
        if sum(tensor.nbytes for _, tensor in batch) >= BUCKET_BYTES:
            send()
    if batch:
        send()
    return len(names)


def main() -> None:
    """Parse the command line, train, feed, generate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of 20 steps (default 4)")
    rounds = parser.parse_args().rounds
    directory = tempfile.mkdtemp(prefix="raysharding-feed-")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, pad_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    prompt = torch.tensor([list(b"    def ")])

    if not ray.is_initialized():
        ray.init(num_cpus=3)  # two ranks, and the engine; on a cluster: ray.init()
    engine = ray.remote(Engine).remote(directory)
    with ShardedModelGroup.from_checkpoint(directory, world_size=2, device=DEVICE, progress=False) as trainer:
        trainer.set_optimizer(torch.optim.AdamW, lr=3e-3)
        for number in range(rounds):
            for _ in range(20):
                batch = rows[torch.randint(len(rows), (16,))]
                loss = trainer.train_step(input_ids=Split(batch), labels=Split(batch))["loss"]
            count = trainer.call(feed, engine)[0]
            ids = ray.get(engine.generate.remote(prompt, 24), timeout=60)
            written = bytes(ids[0].tolist())
            print(f"round {number}: loss {loss:.2f}, {count} tensors fed, the engine writes {written!r}")
        same = torch.equal(ids, trainer.generate(prompt, max_new_tokens=24, do_sample=False))
        print(f"the engine writes what the trainer writes: {same}")
    ray.kill(engine)


if __name__ == "__main__":
    main()
